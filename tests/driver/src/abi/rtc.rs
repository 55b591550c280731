//! NVRTC and hipRTC: what is a compiler that compiles nothing? It checks what a real one would refuse first (options, the machine,
//! includes) and gives an image that names the kernels of the text; the code is the SIMT emulator's. The two libraries have the same
//! functions and codes under two prefixes.
#![allow(non_snake_case)]

use super::{export, put};
use crate::device::{Handles, Machine};
use crate::faults::Kind;
use crate::memory::lock;
use crate::module::image;
use std::ffi::{CStr, c_char, c_int};
use std::sync::{Arc, Mutex, OnceLock};
use zrt_kernels::gpu::driver::Vendor::{self, Amd, Nvidia};
use zrt_kernels::gpu::launch::Arch;

const INVALID_INPUT: i32 = 3;
const INVALID_PROGRAM: i32 = 4;
const INVALID_OPTION: i32 = 5;
const COMPILATION: i32 = 6;

/// A source.
struct Program {
    name: String,
    text: String,
    /// Names of its headers.
    headers: Vec<String>,
    output: Mutex<Output>,
}

/// What compiling it gave.
#[derive(Clone, Default)]
struct Output {
    log: String,
    code: Vec<u8>,
}

fn programs() -> &'static Handles<Program> {
    static PROGRAMS: OnceLock<Handles<Program>> = OnceLock::new();
    PROGRAMS.get_or_init(Handles::default)
}

fn program(handle: u64) -> Result<Arc<Program>, i32> {
    programs().get(handle).map_err(|_| INVALID_PROGRAM)
}

/// Texts of a caller's list.
///
/// # Safety
/// `list` has `count` texts, or none.
unsafe fn texts(list: *const *const c_char, count: c_int) -> Result<Vec<String>, i32> {
    let count = usize::try_from(count).map_err(|_| INVALID_INPUT)?;
    if count == 0 {
        return Ok(Vec::new());
    }
    if list.is_null() {
        return Err(INVALID_INPUT);
    }
    // SAFETY: the caller's promise.
    let list = unsafe { std::slice::from_raw_parts(list, count) };
    // SAFETY: as above.
    list.iter().map(|t| if t.is_null() { Err(INVALID_INPUT) } else { Ok(unsafe { CStr::from_ptr(*t) }.to_string_lossy().into()) }).collect()
}

/// Options that the real compilers know, or how they begin.
fn known_option(vendor: Vendor, option: &str) -> bool {
    let both = ["-D", "-U", "-I", "-std=", "--std=", "-w"];
    let own: &[&str] = match vendor {
        Nvidia => &[
            "--ptxas-options=",
            "-Xptxas",
            "--disable-warnings",
            "--device-as-default-execution-space",
            "--use_fast_math",
            "--fmad=",
            "-fmad=",
            "--ftz=",
            "--prec-div=",
            "--prec-sqrt=",
            "--maxrregcount=",
            "-maxrregcount=",
            "-lineinfo",
            "--generate-line-info",
            "-default-device",
            "--extra-device-vectorization",
            "--define-macro=",
            "--include-path=",
            "-diag-suppress",
            "--diag-suppress",
            "--dopt=",
            "-dopt=",
        ],
        Amd => &["-O", "-m", "-f", "-W", "-g", "-Xclang", "-munsafe"],
    };
    both.iter().chain(own).any(|known| option.starts_with(known))
}

impl Program {
    fn compile(&self, vendor: Vendor, options: &[String]) -> Result<Vec<u8>, (i32, String)> {
        let prefixes: &[&str] = match vendor {
            Nvidia => &["--gpu-architecture=", "-arch="],
            Amd => &["--offload-arch="],
        };
        let mut arch = None;
        for option in options {
            match prefixes.iter().find_map(|p| option.strip_prefix(p)) {
                // HIP's names carry features behind a colon.
                Some(name) => arch = name.split(':').next(),
                None if known_option(vendor, option) => {}
                None => return Err((INVALID_OPTION, format!("error: unrecognized option {option}"))),
            }
        }
        let family = if vendor == Nvidia { "sm_" } else { "gfx" };
        let arch = arch.filter(|a| a.starts_with(family) && Arch::known(a).is_some());
        let Some(arch) = arch else {
            return Err((
                INVALID_OPTION,
                format!("error: no option names a machine that is known, as {}sm_90 or gfx942 would", prefixes[0]),
            ));
        };
        self.check_includes()?;
        let kernels = entry_points(&self.text);
        if kernels.is_empty() {
            return Err((COMPILATION, format!("{}: error: no kernels", self.name)));
        }
        let wrong = Machine::open().ok().and_then(|m| m.faults.hit(|k| (*k == Kind::Image).then_some(())));
        let other = if vendor == Nvidia { (Amd, "gfx942") } else { (Nvidia, "sm_90") };
        let (vendor, arch) = if wrong.is_some() { other } else { (vendor, arch) };
        Ok(image(vendor, arch, &kernels))
    }

    /// Of the source alone: what its headers include may stand behind conditions.
    fn check_includes(&self) -> Result<(), (i32, String)> {
        for included in self.text.lines().filter_map(|l| l.trim().strip_prefix("#include \"")?.split('"').next()) {
            if !self.headers.iter().any(|name| name == included) {
                return Err((COMPILATION, format!("{}: error: cannot open source file \"{included}\"", self.name)));
            }
        }
        Ok(())
    }
}

/// Kernels that a text defines: by the sources' own macros, or as CUDA and HIP spell it.
fn entry_points(text: &str) -> Vec<String> {
    let word = |rest: &str| rest.trim().split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default().to_string();
    let by_macro = |line: &str| line.strip_prefix("KERNEL(").or_else(|| line.strip_prefix("KERNEL_OCC(")).map(word);
    let plain = |line: &str| line.contains("__global__").then(|| line.split_once("void ").map(|(_, rest)| word(rest))).flatten();
    text.lines().filter_map(|l| by_macro(l).or_else(|| plain(l))).filter(|n| !n.is_empty()).collect()
}

/// # Safety
/// The arguments of nvrtcCreateProgram.
unsafe fn create(
    out: *mut u64,
    text: *const c_char,
    name: *const c_char,
    count: c_int,
    headers: *const *const c_char,
    names: *const *const c_char,
) -> Result<(), i32> {
    if text.is_null() {
        return Err(INVALID_INPUT);
    }
    // SAFETY: the caller's texts and lists.
    unsafe {
        let read = |t: *const c_char| CStr::from_ptr(t).to_string_lossy().into_owned();
        let name = if name.is_null() { "default_program".into() } else { read(name) };
        if texts(headers, count)?.iter().any(String::is_empty) {
            return Err(INVALID_INPUT);
        }
        let program = Program { name, text: read(text), headers: texts(names, count)?, output: Mutex::default() };
        put(out, programs().add(Arc::new(program)))
    }
}

/// # Safety
/// The arguments of nvrtcCompileProgram.
unsafe fn compile(vendor: Vendor, handle: u64, count: c_int, options: *const *const c_char) -> Result<(), i32> {
    let program = program(handle)?;
    // SAFETY: the caller's list.
    let options = unsafe { texts(options, count) }?;
    let mut output = lock(&program.output);
    *output = Output::default();
    match program.compile(vendor, &options) {
        Ok(code) => {
            output.code = code;
            Ok(())
        }
        Err((code, log)) => {
            output.log = log;
            Err(code)
        }
    }
}

/// # Safety
/// `handle` is null or a program's handle.
unsafe fn destroy(handle: *mut u64) -> Result<(), i32> {
    if handle.is_null() {
        return Err(INVALID_PROGRAM);
    }
    // SAFETY: the caller's handle.
    let program = unsafe { handle.read_unaligned() };
    programs().remove(program).map_err(|_| INVALID_PROGRAM)?;
    // SAFETY: as above.
    unsafe { put(handle, 0) }
}

/// # Safety
/// `to` has room for the bytes.
unsafe fn give(to: *mut c_char, bytes: &[u8]) -> Result<(), i32> {
    if to.is_null() {
        return Err(INVALID_INPUT);
    }
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.cast(), bytes.len()) };
    Ok(())
}

fn output(handle: u64) -> Result<Output, i32> {
    Ok(lock(&program(handle)?.output).clone())
}

fn log(handle: u64) -> Result<Vec<u8>, i32> {
    Ok([output(handle)?.log.as_bytes(), &[0]].concat())
}

/// The code, which is there only after a compilation that worked.
fn code(handle: u64) -> Result<Vec<u8>, i32> {
    let code = output(handle)?.code;
    if code.is_empty() { Err(INVALID_PROGRAM) } else { Ok(code) }
}

/// A text for a code of either library.
fn describe(error: c_int) -> *const c_char {
    match error {
        0 => c"RTC_SUCCESS",
        INVALID_INPUT => c"RTC_ERROR_INVALID_INPUT",
        INVALID_PROGRAM => c"RTC_ERROR_INVALID_PROGRAM",
        INVALID_OPTION => c"RTC_ERROR_INVALID_OPTION",
        COMPILATION => c"RTC_ERROR_COMPILATION",
        _ => c"RTC_ERROR unknown",
    }
    .as_ptr()
}

export! {
    fn nvrtcVersion(major: *mut c_int, minor: *mut c_int) {
        put(major, 12).and_then(|()| put(minor, 9))
    }
    fn hiprtcVersion(major: *mut c_int, minor: *mut c_int) {
        put(major, 9).and_then(|()| put(minor, 0))
    }
    fn nvrtcCreateProgram(
        out: *mut u64, text: *const c_char, name: *const c_char, count: c_int, headers: *const *const c_char, names: *const *const c_char,
    ) {
        create(out, text, name, count, headers, names)
    }
    fn hiprtcCreateProgram(
        out: *mut u64, text: *const c_char, name: *const c_char, count: c_int, headers: *const *const c_char, names: *const *const c_char,
    ) {
        create(out, text, name, count, headers, names)
    }
    fn nvrtcCompileProgram(program: u64, count: c_int, options: *const *const c_char) {
        compile(Nvidia, program, count, options)
    }
    fn hiprtcCompileProgram(program: u64, count: c_int, options: *const *const c_char) {
        compile(Amd, program, count, options)
    }
    fn nvrtcGetProgramLogSize(program: u64, bytes: *mut usize) {
        put(bytes, log(program)?.len())
    }
    fn hiprtcGetProgramLogSize(program: u64, bytes: *mut usize) {
        put(bytes, log(program)?.len())
    }
    fn nvrtcGetProgramLog(program: u64, to: *mut c_char) {
        give(to, &log(program)?)
    }
    fn hiprtcGetProgramLog(program: u64, to: *mut c_char) {
        give(to, &log(program)?)
    }
    fn nvrtcGetCUBINSize(program: u64, bytes: *mut usize) {
        put(bytes, code(program)?.len())
    }
    fn hiprtcGetCodeSize(program: u64, bytes: *mut usize) {
        put(bytes, code(program)?.len())
    }
    fn nvrtcGetCUBIN(program: u64, to: *mut c_char) {
        give(to, &code(program)?)
    }
    fn hiprtcGetCode(program: u64, to: *mut c_char) {
        give(to, &code(program)?)
    }
    fn nvrtcDestroyProgram(program: *mut u64) {
        destroy(program)
    }
    fn hiprtcDestroyProgram(program: *mut u64) {
        destroy(program)
    }
}

/// A text for a code.
#[unsafe(no_mangle)]
pub extern "C" fn nvrtcGetErrorString(error: c_int) -> *const c_char {
    describe(error)
}

/// A text for a code.
#[unsafe(no_mangle)]
pub extern "C" fn hiprtcGetErrorString(error: c_int) -> *const c_char {
    describe(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_found_in_texts() {
        let text =
            "KERNEL(add_f32, A, 256) { }\n  KERNEL(no, A)\nKERNEL_OCC(big, A, 128, 2) {\nextern \"C\" __global__ void plain(P p) {\n";
        assert_eq!(entry_points(text), ["add_f32", "big", "plain"]);
        for kernel in zrt_kernels::gpu::table::kernels() {
            let text = zrt_kernels::gpu::table::SOURCES.iter().find(|(n, _)| *n == kernel.source).map(|(_, t)| *t).unwrap_or_default();
            assert!(entry_points(text).iter().any(|n| n == kernel.name), "{}", kernel.name);
        }
    }
}
