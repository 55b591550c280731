//! Does the emulated driver behave as CUDA's and HIP's where programs are wrong about them most often: memory, copies, order, errors?

mod common;

use common::{Add, Fill, Gpu, inside};
use std::ffi::{c_char, c_int, c_uint, c_void};

const INVALID_VALUE: i32 = 1;
const NOT_READY: i32 = 600;
const ILLEGAL_ADDRESS: i32 = 700;

#[test]
fn devices_say_that_they_are_emulated() {
    if !inside("devices_say_that_they_are_emulated", "devices=2;memory=1MiB") {
        return;
    }
    for amd in [false, true] {
        let gpu = Gpu::open(amd);
        let mut count = 0;
        assert_eq!(call!(gpu, "cuDeviceGetCount", "hipGetDeviceCount", (*mut c_int), (&mut count)), 0);
        assert_eq!(count, 2);
        let mut name = [0u8; 64];
        let code = call!(gpu, "cuDeviceGetName", "hipDeviceGetName", (*mut u8, c_int, c_int), (name.as_mut_ptr(), 64, 1));
        assert_eq!((code, name.starts_with(b"Emulated ")), (0, true));
        let (mut free, mut total) = (0usize, 0usize);
        let mut info = || {
            let code = call!(gpu, "cuMemGetInfo_v2", "hipMemGetInfo", (*mut usize, *mut usize), (&mut free, &mut total));
            (code, free, total)
        };
        assert_eq!(info(), (0, 1 << 20, 1 << 20));
        let at = gpu.alloc(512 << 10);
        assert_eq!(info(), (0, 512 << 10, 1 << 20));
        assert_eq!(gpu.try_alloc((512 << 10) + 1), Err(2));
        assert_eq!(gpu.free(at), 0);
        assert_eq!(gpu.free(at), INVALID_VALUE);
        assert_eq!(info(), (0, 1 << 20, 1 << 20));
    }
    let gpu = Gpu::open(true);
    let mut properties = [0u8; 1472];
    assert_eq!(call!(gpu, "", "hipGetDevicePropertiesR0600", (*mut u8, c_int), (properties.as_mut_ptr(), 0)), 0);
    assert!(properties[1160..].starts_with(b"gfx942:"));
    let mut value = 0;
    let cuda = Gpu::open(false);
    assert_eq!(call!(cuda, "cuDeviceGetAttribute", "", (*mut c_int, c_int, c_int), (&mut value, 75, 0)), 0);
    assert_eq!(value, 9);
    let mut text: *const c_char = std::ptr::null();
    assert_eq!(call!(cuda, "cuGetErrorName", "", (c_int, *mut *const c_char), (719, &mut text)), 0);
    assert_eq!(call!(cuda, "cuGetErrorName", "", (c_int, *mut *const c_char), (12345, &mut text)), INVALID_VALUE);
}

#[test]
fn a_context_must_be_current() {
    if !inside("a_context_must_be_current", "") {
        return;
    }
    // SAFETY: our own library.
    let library = unsafe { libloading::Library::new(zrt_driver::library().expect("built")) }.expect("loads");
    let gpu = Gpu { library, amd: false };
    assert_eq!(gpu.try_alloc(16), Err(3));
    assert_eq!(call!(gpu, "cuInit", "", (c_uint), (0)), 0);
    assert_eq!(gpu.try_alloc(16), Err(201));
    gpu.use_device(0);
    let first = gpu.stream();
    gpu.use_device(1);
    assert_eq!(gpu.sync(first), 400, "a stream of another device");
}

#[test]
fn memory_is_poisoned_and_checked() {
    if !inside("memory_is_poisoned_and_checked", "") {
        return;
    }
    for amd in [false, true] {
        let gpu = Gpu::open(amd);
        let s = gpu.stream();
        let at = gpu.alloc(100);
        assert_eq!(gpu.take::<u8>(at, 100, s), [0xff; 100]);
        let mut host = [0u8; 200];
        let to = host.as_mut_ptr().cast::<c_void>();
        assert_eq!(gpu.download(to, at, 101, s), INVALID_VALUE, "one byte too many");
        assert_eq!(gpu.download(to, at + 1, 100, s), INVALID_VALUE);
        assert_eq!(gpu.upload(to as u64, to, 8, s), INVALID_VALUE, "to host memory");
        let set = call!(gpu, "cuMemsetD32Async", "hipMemsetD32Async", (u64, c_uint, usize, u64), (at, 0x0403_0201, 25, s));
        assert_eq!((set, gpu.take::<u8>(at + 96, 4, s)), (0, vec![1, 2, 3, 4]));
        assert_eq!(gpu.free(at), 0);
        assert_eq!(gpu.download(to, at, 4, s), INVALID_VALUE, "after it was freed");
    }
}

#[test]
fn pinned_memory_is_read_when_the_copy_runs() {
    if !inside("pinned_memory_is_read_when_the_copy_runs", "") {
        return;
    }
    for amd in [false, true] {
        let gpu = Gpu::open(amd);
        let s = gpu.stream();
        let (x, y) = (gpu.alloc(64), gpu.alloc(64));
        let (mut pageable, mut pinned) = (vec![1u8; 64], vec![1u8; 64]);
        let register = |m: &mut Vec<u8>| {
            let (at, bytes) = (m.as_mut_ptr().cast::<c_void>(), m.len());
            call!(gpu, "cuMemHostRegister_v2", "hipHostRegister", (*mut c_void, usize, c_uint), (at, bytes, 0))
        };
        assert_eq!(register(&mut pinned), 0);
        assert_eq!(register(&mut pinned), 712);
        let query = || call!(gpu, "cuStreamQuery", "hipStreamQuery", (u64), (s));
        assert_eq!(query(), 0);
        gpu.hold(true);
        assert_eq!(gpu.upload(x, pageable.as_ptr().cast(), 64, s), 0);
        assert_eq!(gpu.upload(y, pinned.as_ptr().cast(), 64, s), 0);
        (pageable[0], pinned[0]) = (2, 2);
        assert_eq!(query(), NOT_READY);
        gpu.hold(false);
        assert_eq!(gpu.take::<u8>(x, 1, s), [1], "pageable memory is read at the call");
        assert_eq!(gpu.take::<u8>(y, 1, s), [2], "pinned memory is read when the copy runs");
        let at = pinned.as_mut_ptr().cast::<c_void>();
        assert_eq!(call!(gpu, "cuMemHostUnregister", "hipHostUnregister", (*mut c_void), (at)), 0);
    }
}

#[test]
fn events_order_streams_and_devices() {
    if !inside("events_order_streams_and_devices", "jitter=7") {
        return;
    }
    for amd in [false, true] {
        let gpu = Gpu::open(amd);
        let a = gpu.stream();
        let x = gpu.alloc(1 << 20);
        let event = gpu.event();
        assert_eq!(call!(gpu, "cuEventQuery", "hipEventQuery", (u64), (event)), 0, "never recorded");
        gpu.use_device(1);
        let b = gpu.stream();
        let y = gpu.alloc(1 << 20);
        for round in 0..20u8 {
            gpu.use_device(0);
            assert_eq!(call!(gpu, "cuMemsetD8Async", "hipMemsetD8Async", (u64, u8, usize, u64), (x, round, 1 << 20, a)), 0);
            assert_eq!(gpu.record(event, a), 0);
            gpu.use_device(1);
            assert_eq!(gpu.wait(b, event), 0);
            let copied = if amd {
                call!(gpu, "", "hipMemcpyAsync", (u64, u64, usize, c_int, u64), (y, x, 1 << 20, 3, b))
            } else {
                call!(gpu, "cuMemcpyAsync", "", (u64, u64, usize, u64), (y, x, 1 << 20, b))
            };
            assert_eq!(copied, 0);
            assert_eq!(gpu.take::<u8>(y + (1 << 20) - 1, 1, b), [round]);
        }
        let (first, second) = (gpu.event(), gpu.event());
        assert_eq!(gpu.record(first, b), 0);
        assert_eq!(call!(gpu, "cuMemsetD8Async", "hipMemsetD8Async", (u64, u8, usize, u64), (y, 0, 1 << 20, b)), 0);
        assert_eq!(gpu.record(second, b), 0);
        let query = call!(gpu, "cuEventQuery", "hipEventQuery", (u64), (second));
        assert!(query == 0 || query == NOT_READY);
        assert_eq!(call!(gpu, "cuEventSynchronize", "hipEventSynchronize", (u64), (second)), 0);
        let mut ms = 0f32;
        assert_eq!(call!(gpu, "cuEventElapsedTime", "hipEventElapsedTime", (*mut f32, u64, u64), (&mut ms, first, second)), 0);
        // One microsecond, and a MiB at 1,500 GB/s.
        assert!(ms > 0.001 && ms < 0.01, "{ms} ms");
        assert_eq!(call!(gpu, "cuStreamDestroy_v2", "hipStreamDestroy", (u64), (b)), 0);
        assert_eq!(gpu.sync(b), 400);
    }
}

#[test]
fn kernels_run_with_the_parameters_of_their_launch() {
    if !inside("kernels_run_with_the_parameters_of_their_launch", "jitter=3") || !can_compile() {
        return;
    }
    for amd in [false, true] {
        let gpu = Gpu::open(amd);
        let s = gpu.stream();
        let n = 1000;
        let (a, b): (Vec<f32>, Vec<f32>) = (0..n).map(|i| (i as f32 * 0.37, 1.0 / (i + 1) as f32)).unzip();
        let (pa, pb, out) = (gpu.put(&a, s), gpu.put(&b, s), gpu.alloc(n * 4));
        let add = gpu.kernel("elementwise.cu", "add_f32");
        let mut params = Box::new(Add { out, a: pa, b: pb, elems: n as i64, vector: 1, unused: 0 });
        gpu.hold(true);
        assert_eq!(gpu.launch(add, 4, 256, 0, s, &*params), 0);
        // A launch has copied its parameters.
        params.a = 0;
        drop(params);
        gpu.hold(false);
        let expected: Vec<u32> = a.iter().zip(&b).map(|(a, b)| (a + b).to_bits()).collect();
        assert_eq!(gpu.take::<u32>(out, n, s), expected);
        let fill = gpu.kernel("elementwise.cu", "fill_u32");
        assert_eq!(gpu.launch(fill, 4, 256, 0, s, &Fill { out, elems: n as i64, bits: 77, vector: 1 }), 0);
        assert_eq!(gpu.take::<u32>(out, n, s), vec![77; n]);
        assert_eq!(gpu.launch(fill, 4, 2048, 0, s, &Fill { out, elems: 0, bits: 0, vector: 0 }), INVALID_VALUE);
        assert_eq!(gpu.launch(fill, 0, 256, 0, s, &Fill { out, elems: 0, bits: 0, vector: 0 }), INVALID_VALUE);
        let limit = if amd { 64 << 10 } else { 48 << 10 };
        assert_eq!(gpu.launch(fill, 1, 256, limit + 1, s, &Fill { out, elems: 0, bits: 0, vector: 0 }), INVALID_VALUE);
    }
    let gpu = Gpu::open(false);
    let fill = gpu.kernel("elementwise.cu", "fill_u32");
    assert_eq!(call!(gpu, "cuFuncSetAttribute", "", (u64, c_int, c_int), (fill, 8, 100 << 10)), 0);
    let (s, out) = (gpu.stream(), gpu.alloc(16));
    assert_eq!(gpu.launch(fill, 1, 256, 100 << 10, s, &Fill { out, elems: 4, bits: 5, vector: 1 }), 0);
    assert_eq!(gpu.take::<u32>(out, 4, s), [5; 4]);
}

#[test]
fn a_wrong_pointer_in_a_kernel_fails_the_device_for_good() {
    if !inside("a_wrong_pointer_in_a_kernel_fails_the_device_for_good", "") || !can_compile() {
        return;
    }
    let gpu = Gpu::open(false);
    let s = gpu.stream();
    let fill = gpu.kernel("elementwise.cu", "fill_u32");
    let out = gpu.alloc(400);
    // 101 elements: one too many.
    assert_eq!(gpu.launch(fill, 1, 256, 0, s, &Fill { out, elems: 101, bits: 1, vector: 0 }), 0);
    assert_eq!(gpu.sync(s), ILLEGAL_ADDRESS);
    assert_eq!(gpu.try_alloc(16), Err(ILLEGAL_ADDRESS));
    assert_eq!(gpu.launch(fill, 1, 256, 0, s, &Fill { out, elems: 1, bits: 1, vector: 0 }), ILLEGAL_ADDRESS);
    // Another device goes on; its kernels cannot touch host memory that is not pinned.
    gpu.use_device(1);
    let s = gpu.stream();
    let mut host = [0u32; 4];
    assert_eq!(gpu.launch(fill, 1, 256, 0, s, &Fill { out: host.as_mut_ptr() as u64, elems: 4, bits: 1, vector: 0 }), 0);
    assert_eq!((gpu.sync(s), host), (ILLEGAL_ADDRESS, [0; 4]));
}

#[test]
fn images_must_be_for_this_vendor_and_machine() {
    if !inside("images_must_be_for_this_vendor_and_machine", "") {
        return;
    }
    let (cuda, hip) = (Gpu::open(false), Gpu::open(true));
    let (cubin, object) = (cuda.compile("rope.cu", "sm_90").expect("an image"), hip.compile("rope.cu", "gfx942").expect("an image"));
    assert_eq!((cuda.load(&object), hip.load(&cubin)), (Err(200), Err(200)));
    assert_eq!(cuda.load(&cuda.compile("rope.cu", "sm_80").expect("an image")), Err(209));
    assert_eq!(hip.load(b"nonsense of some bytes"), Err(200));
    let module = cuda.load(&cubin).expect("a module");
    assert_eq!(cuda.function(module, "add_f32"), Err(500));
    assert_eq!(cuda.compile("rope.cu", "gfx942").expect_err("wrong machine").0, 5);
}

/// Whether kernels can be compiled for the host.
fn can_compile() -> bool {
    let can = zrt_simt::build::compiler().is_some();
    if !can {
        println!("not run: there is no C++ compiler");
    }
    can
}
