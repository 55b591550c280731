//! How do the embedded sources become code of a GPU at run time? By the vendor's run-time compiler, NVRTC or hipRTC: a library
//! that needs neither a driver nor a folder of headers, since ours are passed as strings. The two have the same functions under
//! two prefixes, so there is one table of them.
#![allow(unsafe_code)]

use super::library::Symbols;
use super::{Vendor, c_text, cuda, open_library};
use crate::gpu::table;
use crate::{Error, Result};
use std::ffi::{CString, c_char, c_int, c_void};
use std::path::Path;

type Handle = *mut c_void;
type Strings = *const *const c_char;

struct Functions {
    error: unsafe extern "C" fn(c_int) -> *const c_char,
    version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int,
    create: unsafe extern "C" fn(*mut Handle, *const c_char, *const c_char, c_int, Strings, Strings) -> c_int,
    destroy: unsafe extern "C" fn(*mut Handle) -> c_int,
    compile: unsafe extern "C" fn(Handle, c_int, Strings) -> c_int,
    log: Getter,
    code: Getter,
    /// NVRTC's intermediate code, which says what the parameters are.
    ptx: Option<Getter>,
}

struct Getter {
    bytes: unsafe extern "C" fn(Handle, *mut usize) -> c_int,
    get: unsafe extern "C" fn(Handle, *mut c_char) -> c_int,
}

/// A function's name: NVRTC's, hipRTC's.
type Names = [&'static str; 2];

macro_rules! name {
    ($name:literal) => {
        [concat!("nvrtc", $name), concat!("hiprtc", $name)]
    };
}

/// A run-time compiler.
pub struct Rtc {
    functions: Functions,
    amd: bool,
    // Behind the functions that it owns.
    library: Symbols,
}

/// What a compiler made of one source.
pub struct Compiled {
    /// Code that a driver loads: a cubin or a code object.
    pub code: Vec<u8>,
    /// PTX; empty from hipRTC.
    pub ptx: String,
    /// What the compiler said.
    pub log: String,
}

impl Rtc {
    /// The compiler of this vendor: at `path`, else as it is installed.
    ///
    /// # Errors
    /// [`Error::Library`]: the library or a function is missing.
    pub fn open(vendor: Vendor, path: Option<&Path>) -> Result<Rtc> {
        let amd = vendor == Vendor::Amd;
        let library = match (vendor, path) {
            (Vendor::Nvidia, None) => cuda::open_compiler()?,
            (Vendor::Nvidia, _) => open_library(path, &[], "")?,
            (Vendor::Amd, _) => open_library(path, &["libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so"], NO_COMPILER)?,
        };
        let (prefix, code) = if amd { ("hiprtc", "Code") } else { ("nvrtc", "CUBIN") };
        fn symbol<T: Copy>(library: &Symbols, name: String) -> Result<T> {
            // SAFETY: `T` is the function's type in the vendor's header, given by the field that it is stored in.
            unsafe { library.get::<T>(&name) }
        }
        let getter = |what: &str| -> Result<Getter> {
            let bytes = symbol(&library, format!("{prefix}Get{what}Size"))?;
            Ok(Getter { bytes, get: symbol(&library, format!("{prefix}Get{what}"))? })
        };
        let functions = Functions {
            error: symbol(&library, format!("{prefix}GetErrorString"))?,
            version: symbol(&library, format!("{prefix}Version"))?,
            create: symbol(&library, format!("{prefix}CreateProgram"))?,
            destroy: symbol(&library, format!("{prefix}DestroyProgram"))?,
            compile: symbol(&library, format!("{prefix}CompileProgram"))?,
            log: getter("ProgramLog")?,
            code: getter(code)?,
            // Only the compile gates read it.
            ptx: if amd { None } else { getter("PTX").ok() },
        };
        Ok(Rtc { functions, amd, library })
    }

    fn check(&self, what: &str, call: Names, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: takes any code, returns a static text or null.
        let text = c_text(unsafe { (self.functions.error)(code) });
        let call = call[usize::from(self.amd)];
        Err(Error::Driver { what: format!("{}, {what}", self.library.name()), call, code, text })
    }

    /// Its name and version: `NVRTC 13.5`.
    pub fn version(&self) -> String {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: two numbers to write to.
        let code = unsafe { (self.functions.version)(&mut major, &mut minor) };
        let name = if self.amd { "hipRTC" } else { "NVRTC" };
        if code == 0 { format!("{name} {major}.{minor}") } else { format!("{name} of unknown version") }
    }

    /// Compiles an embedded source for a machine (`sm_90`, `gfx942`).
    ///
    /// # Errors
    /// What the compiler says.
    pub fn compile(&self, source: &str, arch: &str) -> Result<Compiled> {
        let unknown = || Error::Shape { op: "compile", what: format!("no source {source}") };
        let text = table::SOURCES.iter().find(|(name, _)| *name == source).ok_or_else(unknown)?.1;
        let options: &[&str] = if self.amd { &["-std=c++17", "-O3"] } else { &["--std=c++17", "--ptxas-options=-v", "--disable-warnings"] };
        let machine = if self.amd { format!("--offload-arch={arch}") } else { format!("--gpu-architecture={arch}") };
        let options: Vec<&str> = std::iter::once(machine.as_str()).chain(options.iter().copied()).collect();
        self.compile_text(source, text, &options)
    }

    fn compile_text(&self, source: &str, text: &str, options: &[&str]) -> Result<Compiled> {
        let c = |s: &str| CString::new(s).map_err(|e| Error::Shape { op: "compile", what: format!("{source}: {e}") });
        let (headers, names): (Vec<_>, Vec<_>) =
            table::SOURCES.iter().filter(|(name, _)| !name.ends_with(".cu")).map(|(name, text)| (c(text), c(name))).unzip();
        let (headers, names) = (headers.into_iter().collect::<Result<Vec<_>>>()?, names.into_iter().collect::<Result<Vec<_>>>()?);
        let options = options.iter().map(|o| c(o)).collect::<Result<Vec<_>>>()?;
        let pointers = |v: &[CString]| v.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
        let (headers_at, names_at, options_at) = (pointers(&headers), pointers(&names), pointers(&options));
        let (name, text) = (c(source)?, c(text)?);
        let f = &self.functions;

        let mut program = Program { handle: std::ptr::null_mut(), rtc: self };
        // SAFETY: all strings live to the end of this function, and the counts are theirs.
        let code = unsafe {
            let headers = headers_at.len() as c_int;
            (f.create)(&mut program.handle, text.as_ptr(), name.as_ptr(), headers, headers_at.as_ptr(), names_at.as_ptr())
        };
        self.check(source, name!("CreateProgram"), code)?;
        // SAFETY: as above.
        let code = unsafe { (f.compile)(program.handle, options_at.len() as c_int, options_at.as_ptr()) };
        let log = String::from_utf8_lossy(&program.get(name!("GetProgramLog"), &f.log)?).trim_end_matches('\0').to_string();
        self.check(&format!("{source}: {log}"), name!("CompileProgram"), code)?;
        let ptx = match &f.ptx {
            Some(getter) => String::from_utf8_lossy(&program.get(name!("GetPTX"), getter)?).trim_end_matches('\0').to_string(),
            None => String::new(),
        };
        Ok(Compiled { code: program.get(["nvrtcGetCUBIN", "hiprtcGetCode"], &f.code)?, ptx, log })
    }
}

pub(super) const NO_COMPILER: &str =
    "install the vendor's run-time compiler, name it in [device.libraries], or make code ahead with `zlaunch kernels build`";

struct Program<'a> {
    handle: Handle,
    rtc: &'a Rtc,
}

impl Program<'_> {
    fn get(&self, call: Names, getter: &Getter) -> Result<Vec<u8>> {
        let mut bytes = 0;
        // SAFETY: a program, and a number to write to.
        self.rtc.check("result of a compilation", call, unsafe { (getter.bytes)(self.handle, &mut bytes) })?;
        let mut out = vec![0u8; bytes];
        if bytes > 0 {
            // SAFETY: as many bytes as it asked for.
            self.rtc.check("result of a compilation", call, unsafe { (getter.get)(self.handle, out.as_mut_ptr().cast()) })?;
        }
        Ok(out)
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: made by this library, used by nobody else.
            unsafe { (self.rtc.functions.destroy)(&mut self.handle) };
        }
    }
}
