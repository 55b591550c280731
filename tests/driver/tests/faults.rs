//! Do the faults that settings order come when and where they should?

mod common;

use common::{Fill, Gpu, PATIENCE, child, finish, inside, is_inside};

const LAUNCH_FAILED: i32 = 719;

fn fill(out: u64) -> Fill {
    Fill { out, elems: 4, bits: 9, vector: 1 }
}

/// Launches do nothing here, so that no compiler is needed.
#[test]
fn the_ordered_allocation_fails() {
    if !inside("the_ordered_allocation_fails", "fault=oom:3") {
        return;
    }
    let gpu = Gpu::open(true);
    let tries: Vec<bool> = (0..4).map(|_| gpu.try_alloc(64).is_ok()).collect();
    assert_eq!(tries, [true, true, false, true]);
}

#[test]
fn the_ordered_launch_fails_where_it_runs() {
    if !inside("the_ordered_launch_fails_where_it_runs", "null=1;fault=launch:fill_u32:2") {
        return;
    }
    let gpu = Gpu::open(false);
    let (s, out) = (gpu.stream(), gpu.alloc(16));
    let (one, other) = (gpu.kernel("elementwise.cu", "fill_u32"), gpu.kernel("elementwise.cu", "fill_u16"));
    assert_eq!(gpu.launch(one, 1, 256, 0, s, &fill(out)), 0);
    assert_eq!(gpu.launch(other, 1, 256, 0, s, &fill(out)), 0);
    assert_eq!(gpu.sync(s), 0);
    assert_eq!(gpu.launch(one, 1, 256, 0, s, &fill(out)), 0, "the call itself is well");
    assert_eq!((gpu.sync(s), gpu.sync(s), gpu.try_alloc(4)), (LAUNCH_FAILED, LAUNCH_FAILED, Err(LAUNCH_FAILED)));
    gpu.use_device(1);
    assert!(gpu.try_alloc(4).is_ok(), "the other device is well");
}

#[test]
fn a_lost_device_stays_lost() {
    if !inside("a_lost_device_stays_lost", "null=1;fault=lost:3:214") {
        return;
    }
    let gpu = Gpu::open(true);
    let (s, out) = (gpu.stream(), gpu.alloc(16));
    let kernel = gpu.kernel("elementwise.cu", "fill_u32");
    for _ in 0..2 {
        assert_eq!((gpu.launch(kernel, 1, 256, 0, s, &fill(out)), gpu.sync(s)), (0, 0));
    }
    assert_eq!((gpu.launch(kernel, 1, 256, 0, s, &fill(out)), gpu.sync(s)), (0, 214));
    assert_eq!(gpu.free(out), 214);
}

#[test]
fn calls_return_codes_that_nobody_knows() {
    if !inside("calls_return_codes_that_nobody_knows", "fault=call:cuStreamSynchronize:2:12345,call:cuMemAlloc_v2:1:7") {
        return;
    }
    let gpu = Gpu::open(false);
    let s = gpu.stream();
    assert_eq!((gpu.sync(s), gpu.sync(s), gpu.sync(s)), (0, 12345, 0));
    assert_eq!((gpu.try_alloc(4), gpu.try_alloc(4).is_ok()), (Err(7), true));
}

#[test]
fn an_image_may_be_the_other_vendors() {
    if !inside("an_image_may_be_the_other_vendors", "fault=image:2") {
        return;
    }
    let gpu = Gpu::open(true);
    let load = || gpu.load(&gpu.compile("rope.cu", "gfx942").expect("an image")).is_ok();
    assert_eq!([load(), load(), load()], [true, false, true]);
}

#[test]
fn faults_of_one_rank_spare_the_others() {
    let test = "faults_of_one_rank_spare_the_others";
    if !is_inside(test) {
        for rank in ["0", "1"] {
            let out = finish(child(test, "fault=oom:1@1", &[("RANK", rank)]), PATIENCE);
            assert!(out.status.success(), "rank {rank}: {}", String::from_utf8_lossy(&out.stderr));
        }
        return;
    }
    let fails = Gpu::open(false).try_alloc(16).is_err();
    assert_eq!(fails, std::env::var("RANK").is_ok_and(|r| r == "1"));
}

#[test]
fn settings_that_are_not_understood_fail_the_first_call() {
    let test = "settings_that_are_not_understood_fail_the_first_call";
    if !is_inside(test) {
        let out = finish(child(test, "fault=bang:1", &[]), PATIENCE);
        assert!(out.status.success() && String::from_utf8_lossy(&out.stderr).contains("`bang:1` is no fault"), "{out:?}");
        return;
    }
    // SAFETY: our own library.
    let library = unsafe { libloading::Library::new(zrt_driver::library().expect("built")) }.expect("loads");
    let gpu = Gpu { library, amd: false };
    assert_eq!(call!(gpu, "cuInit", "", (u32), (0)), 999);
}

#[test]
fn a_library_may_lack_functions() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = match zrt_driver::library_with(folder.path(), &["cuInit", "cuDriverGetVersion"]) {
        Ok(path) => path,
        Err(why) => return println!("not run: {why}"),
    };
    // SAFETY: functions that return 0.
    unsafe {
        let library = libloading::Library::new(path).expect("it loads");
        let init = library.get::<unsafe extern "C" fn(u32) -> i32>(b"cuInit").expect("it is there");
        assert_eq!(init(0), 0);
        assert!(library.get::<unsafe extern "C" fn()>(b"cuDeviceGetCount").is_err());
    }
}
