//! How do tests call the emulated driver? As the product does: the library is loaded by its path, functions by name. Settings are
//! read once per process, so each test runs its body in a process of its own.
#![allow(dead_code)]

use libloading::Library;
use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};
use zrt_kernels::gpu::table;

/// Variable that is set in the process that runs a test's body.
const INSIDE: &str = "ZRT_DRIVER_TEST";

/// This test again, in a process with these settings.
pub fn child(test: &str, settings: &str, variables: &[(&str, &str)]) -> Child {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", test, "--nocapture", "--test-threads=1"]);
    command.env(INSIDE, test).env(zrt_driver::VARIABLE, settings).envs(variables.iter().copied());
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("a process")
}

/// Waits for a process, at most so long.
pub fn finish(mut child: Child, within: Duration) -> Output {
    let until = Instant::now() + within;
    while child.try_wait().expect("its state").is_none() {
        if Instant::now() > until {
            child.kill().expect("it ends");
            let out = child.wait_with_output().expect("its output");
            panic!("not done within {within:?}: {}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().expect("its output")
}

/// Long enough for any test on any machine; only a hang takes longer.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Whether this is the process that runs the body of `test`; otherwise such a process has run, without failing.
pub fn inside(test: &str, settings: &str) -> bool {
    if is_inside(test) {
        return true;
    }
    let out = finish(child(test, settings, &[]), PATIENCE);
    let text = format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    print!("{text}");
    assert!(out.status.success(), "{test} failed with {settings}:\n{text}");
    false
}

/// Whether this process runs the body of `test`.
pub fn is_inside(test: &str) -> bool {
    std::env::var(INSIDE).is_ok_and(|t| t == test)
}

/// The library, as one vendor's.
pub struct Gpu {
    pub library: Library,
    pub amd: bool,
}

/// Calls a function that returns a code, by its name at CUDA and HIP.
#[macro_export]
macro_rules! call {
    ($gpu:expr, $cuda:literal, $hip:literal, ($($type:ty),*), ($($arg:expr),*)) => {{
        let f: extern "C" fn($($type),*) -> i32 = $gpu.symbol(if $gpu.amd { $hip } else { $cuda });
        f($($arg),*)
    }};
}

impl Gpu {
    /// A function of the library, as what its documentation says it is.
    pub fn symbol<F: Copy>(&self, name: &str) -> F {
        // SAFETY: tests name the signatures of the vendors' headers; what they pass lives across each call.
        unsafe { *self.library.get::<F>(name.as_bytes()).unwrap_or_else(|e| panic!("{name}: {e}")) }
    }

    /// The library with device 0 current in this thread.
    pub fn open(amd: bool) -> Gpu {
        let path = zrt_driver::library().expect("the library is built");
        // SAFETY: our own library.
        let library = unsafe { Library::new(path) }.expect("the library loads");
        let gpu = Gpu { library, amd };
        assert_eq!(call!(gpu, "cuInit", "hipInit", (c_uint), (0)), 0);
        gpu.use_device(0);
        gpu
    }

    pub fn use_device(&self, device: c_int) {
        if self.amd {
            assert_eq!(call!(self, "", "hipSetDevice", (c_int), (device)), 0);
        } else {
            let mut context = 0u64;
            assert_eq!(call!(self, "cuDevicePrimaryCtxRetain", "", (*mut u64, c_int), (&mut context, device)), 0);
            assert_eq!(call!(self, "cuCtxSetCurrent", "", (u64), (context)), 0);
        }
    }

    pub fn try_alloc(&self, bytes: usize) -> Result<u64, i32> {
        let mut at = 0u64;
        match call!(self, "cuMemAlloc_v2", "hipMalloc", (*mut u64, usize), (&mut at, bytes)) {
            0 => Ok(at),
            code => Err(code),
        }
    }

    pub fn alloc(&self, bytes: usize) -> u64 {
        self.try_alloc(bytes).expect("memory")
    }

    pub fn free(&self, at: u64) -> i32 {
        call!(self, "cuMemFree_v2", "hipFree", (u64), (at))
    }

    pub fn stream(&self) -> u64 {
        let mut out = 0u64;
        assert_eq!(call!(self, "cuStreamCreate", "hipStreamCreateWithFlags", (*mut u64, c_uint), (&mut out, 1)), 0);
        out
    }

    pub fn sync(&self, stream: u64) -> i32 {
        call!(self, "cuStreamSynchronize", "hipStreamSynchronize", (u64), (stream))
    }

    pub fn upload(&self, to: u64, from: *const c_void, bytes: usize, stream: u64) -> i32 {
        call!(self, "cuMemcpyHtoDAsync_v2", "hipMemcpyHtoDAsync", (u64, *const c_void, usize, u64), (to, from, bytes, stream))
    }

    pub fn download(&self, to: *mut c_void, from: u64, bytes: usize, stream: u64) -> i32 {
        call!(self, "cuMemcpyDtoHAsync_v2", "hipMemcpyDtoHAsync", (*mut c_void, u64, usize, u64), (to, from, bytes, stream))
    }

    pub fn put<T: Copy>(&self, values: &[T], stream: u64) -> u64 {
        let at = self.alloc(size_of_val(values));
        assert_eq!(self.upload(at, values.as_ptr().cast(), size_of_val(values), stream), 0);
        at
    }

    pub fn take<T: Copy + Default>(&self, from: u64, count: usize, stream: u64) -> Vec<T> {
        let mut out = vec![T::default(); count];
        assert_eq!(self.download(out.as_mut_ptr().cast(), from, count * size_of::<T>(), stream), 0);
        out
    }

    /// Stops all streams before their next operation, or lets them go on.
    pub fn hold(&self, held: bool) {
        assert_eq!(call!(self, "zrtEmulatedHold", "zrtEmulatedHold", (c_int), (held.into())), 0);
    }

    pub fn event(&self) -> u64 {
        let mut out = 0u64;
        assert_eq!(call!(self, "cuEventCreate", "hipEventCreateWithFlags", (*mut u64, c_uint), (&mut out, 0)), 0);
        out
    }

    pub fn record(&self, event: u64, stream: u64) -> i32 {
        call!(self, "cuEventRecord", "hipEventRecord", (u64, u64), (event, stream))
    }

    pub fn wait(&self, stream: u64, event: u64) -> i32 {
        call!(self, "cuStreamWaitEvent", "hipStreamWaitEvent", (u64, u64, c_uint), (stream, event, 0))
    }

    /// Compiles an embedded source; the image, or the code and log.
    pub fn compile(&self, source: &str, arch: &str) -> Result<Vec<u8>, (i32, String)> {
        let c = |s: &str| CString::new(s).expect("no zeros");
        let text = table::SOURCES.iter().find(|(n, _)| *n == source).map(|(_, t)| c(t)).expect("a source");
        let headers = table::SOURCES.iter().filter(|(n, _)| !n.ends_with(".cu"));
        let (names, texts): (Vec<_>, Vec<_>) = headers.map(|(n, t)| (c(n), c(t))).unzip();
        let pointers = |v: &[CString]| v.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
        let (names, texts) = (pointers(&names), pointers(&texts));
        let option = c(&format!("{}{arch}", if self.amd { "--offload-arch=" } else { "--gpu-architecture=" }));
        let options = [option.as_ptr()];
        let mut program = 0u64;
        type List = *const *const c_char;
        let code = call!(
            self,
            "nvrtcCreateProgram",
            "hiprtcCreateProgram",
            (*mut u64, *const c_char, *const c_char, c_int, List, List),
            (&mut program, text.as_ptr(), c(source).as_ptr(), names.len() as c_int, texts.as_ptr(), names.as_ptr())
        );
        assert_eq!(code, 0);
        let code = call!(self, "nvrtcCompileProgram", "hiprtcCompileProgram", (u64, c_int, List), (program, 1, options.as_ptr()));
        let mut bytes = 0usize;
        if code != 0 {
            let read = call!(self, "nvrtcGetProgramLogSize", "hiprtcGetProgramLogSize", (u64, *mut usize), (program, &mut bytes));
            let mut log = vec![0u8; bytes];
            assert_eq!(read, 0);
            assert_eq!(call!(self, "nvrtcGetProgramLog", "hiprtcGetProgramLog", (u64, *mut u8), (program, log.as_mut_ptr())), 0);
            return Err((code, String::from_utf8_lossy(&log).into_owned()));
        }
        assert_eq!(call!(self, "nvrtcGetCUBINSize", "hiprtcGetCodeSize", (u64, *mut usize), (program, &mut bytes)), 0);
        let mut image = vec![0u8; bytes];
        assert_eq!(call!(self, "nvrtcGetCUBIN", "hiprtcGetCode", (u64, *mut u8), (program, image.as_mut_ptr())), 0);
        assert_eq!(call!(self, "nvrtcDestroyProgram", "hiprtcDestroyProgram", (*mut u64), (&mut program)), 0);
        Ok(image)
    }

    /// The arch of this vendor.
    pub fn arch(&self) -> &'static str {
        if self.amd { "gfx942" } else { "sm_90" }
    }

    pub fn load(&self, image: &[u8]) -> Result<u64, i32> {
        let mut module = 0u64;
        match call!(self, "cuModuleLoadData", "hipModuleLoadData", (*mut u64, *const u8), (&mut module, image.as_ptr())) {
            0 => Ok(module),
            code => Err(code),
        }
    }

    pub fn function(&self, module: u64, name: &str) -> Result<u64, i32> {
        let name = CString::new(name).expect("no zeros");
        let mut out = 0u64;
        let types =
            call!(self, "cuModuleGetFunction", "hipModuleGetFunction", (*mut u64, u64, *const c_char), (&mut out, module, name.as_ptr()));
        if types == 0 { Ok(out) } else { Err(types) }
    }

    /// A kernel of an embedded source.
    pub fn kernel(&self, source: &str, name: &str) -> u64 {
        let image = self.compile(source, self.arch()).expect("an image");
        self.function(self.load(&image).expect("a module"), name).expect("a kernel")
    }

    pub fn launch<P>(&self, function: u64, blocks: u32, threads: u32, shared_bytes: u32, stream: u64, params: &P) -> i32 {
        let list = [std::ptr::from_ref(params).cast::<c_void>()];
        type U = c_uint;
        type List = *const *const c_void;
        call!(
            self,
            "cuLaunchKernel",
            "hipModuleLaunchKernel",
            (u64, U, U, U, U, U, U, U, u64, List, List),
            (function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, list.as_ptr(), std::ptr::null())
        )
    }
}

/// Parameters of the kernels `add_*`.
#[repr(C)]
pub struct Add {
    pub out: u64,
    pub a: u64,
    pub b: u64,
    pub elems: i64,
    pub vector: i32,
    pub unused: i32,
}

/// Parameters of the kernels `fill_*`.
#[repr(C)]
pub struct Fill {
    pub out: u64,
    pub elems: i64,
    pub bits: u32,
    pub vector: i32,
}
