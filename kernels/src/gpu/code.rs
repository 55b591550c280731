//! How do kernels get onto a device? Sources are compiled for it when the first of their kernels is launched, by the run-time compiler found
//! there, and kept on disk; code made ahead (`zlaunch kernels build`) needs no compiler at all.
//!
//! A file is named after the source, the machine and a hash of source, headers, options, machine and compiler; it starts with a hash of
//! its content, so that a file that was cut short is compiled again and not loaded.

use super::driver::rtc::Rtc;
use super::driver::{Driver, Libraries, RawFunction, Vendor};
use super::table;
use crate::{Error, Result};
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Hash of a file's content, in front of it.
const SEAL_BYTES: usize = 32;
/// The name of code that was made ahead, in place of a compiler's version.
const AHEAD: &str = "ahead";

/// How a driver says that code is not for it: invalid image, no binary for this machine, invalid PTX or source, no such kernel.
const REFUSED: [i32; 5] = [200, 209, 218, 300, 500];

/// Where compiled code is kept: `ZRT`'s folder in the user's cache, or what the configuration says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CodeOptions {
    /// The folder; `None`: nothing is kept.
    pub folder: Option<PathBuf>,
    /// The vendor's libraries.
    pub libraries: Libraries,
}

/// The kernels of one device.
pub(super) struct Code {
    driver: Arc<Driver>,
    options: CodeOptions,
    compiler: OnceLock<Result<Rtc>>,
    functions: Mutex<HashMap<&'static str, Kernel>>,
}

/// A kernel that is loaded, and the shared memory it may have by now.
#[derive(Clone, Copy)]
struct Kernel {
    function: RawFunction,
    shared_bytes: u32,
}

/// Dynamic shared memory that needs no leave: static memory counts too, so a little less than the 48 KiB of the documentation.
const FREE_SHARED_BYTES: u32 = 40 << 10;

impl Code {
    pub fn new(driver: Arc<Driver>, options: CodeOptions) -> Code {
        Code { driver, options, compiler: OnceLock::new(), functions: Mutex::default() }
    }

    /// The function to launch as kernel `name` with this much dynamic shared memory. The device is current in this thread.
    pub fn function(&self, name: &'static str, shared_bytes: u32) -> Result<RawFunction> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        if !functions.contains_key(name) {
            let source = table::kernel(name).ok_or_else(|| shape(format!("{name} is in no table")))?.source;
            let names: Vec<&'static str> = table::kernels().filter(|k| k.source == source).map(|k| k.name).collect();
            let loaded = self.load(source, &names)?;
            functions.extend(names.into_iter().zip(loaded).map(|(n, function)| (n, Kernel { function, shared_bytes: FREE_SHARED_BYTES })));
        }
        let kernel = functions.get_mut(name).ok_or_else(|| shape(format!("{name} is in no source")))?;
        if shared_bytes > kernel.shared_bytes {
            self.driver.allow_shared(kernel.function, shared_bytes)?;
            kernel.shared_bytes = shared_bytes;
        }
        Ok(kernel.function)
    }

    /// Loads the kernels of a source: from what was made ahead, or is kept, or from the compiler. Kept code that the device refuses (of
    /// another machine, or damaged where its seal does not tell) is made again.
    fn load(&self, source: &str, names: &[&'static str]) -> Result<Vec<RawFunction>> {
        let arch = &self.driver.facts().arch.name;
        let kept = |compiler: &str| self.options.folder.as_ref().map(|folder| path(folder, source, arch, compiler));
        let mut refused = None;
        let mut try_kept = |path: &Option<PathBuf>| -> Result<Option<Vec<RawFunction>>> {
            let Some((path, code)) = path.as_ref().and_then(|p| Some((p, read(p)?))) else { return Ok(None) };
            match self.driver.load(source, &code, names) {
                Err(Error::Driver { what, call, code, text }) if REFUSED.contains(&code) => {
                    refused = Some(Error::Driver { what: format!("{what} from {}", path.display()), call, code, text });
                    Ok(None)
                }
                loaded => loaded.map(Some),
            }
        };
        if let Some(loaded) = try_kept(&kept(AHEAD))? {
            return Ok(loaded);
        }
        let compiler = self.compiler.get_or_init(|| Rtc::open(self.driver.vendor(), self.options.libraries.compiler.as_deref()));
        let compiler = match compiler {
            Ok(compiler) => compiler,
            // The file is the news: without it no compiler was needed.
            Err(e) => return Err(refused.unwrap_or_else(|| e.clone())),
        };
        let path = kept(&compiler.version());
        if let Some(loaded) = try_kept(&path)? {
            return Ok(loaded);
        }
        let code = compiler.compile(source, arch)?.code;
        let loaded = self.driver.load(source, &code, names)?;
        if let Some(path) = path {
            // A cache that cannot be written costs time, not the run.
            let _ = write(&path, &code);
        }
        Ok(loaded)
    }
}

fn shape(what: String) -> Error {
    Error::Shape { op: "kernel code", what }
}

/// The text that a source is compiled of: its own and all headers', which are few.
fn path(folder: &Path, source: &str, arch: &str, compiler: &str) -> PathBuf {
    let mut hash = Sha256::new();
    for (name, text) in table::SOURCES.iter().filter(|(name, _)| *name == source || !name.ends_with(".cu")) {
        for part in [name.as_bytes(), text.as_bytes()] {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
    }
    hash.update(compiler.as_bytes());
    let hex: String = hash.finalize()[..8].iter().map(|b| format!("{b:02x}")).collect();
    folder.join(format!("{}-{arch}-{hex}.bin", source.trim_end_matches(".cu")))
}

fn read(path: &Path) -> Option<Vec<u8>> {
    let mut bytes = std::fs::read(path).ok()?;
    let code = bytes.split_off(SEAL_BYTES.min(bytes.len()));
    (bytes == Sha256::digest(&code)[..] && !code.is_empty()).then_some(code)
}

fn write(path: &Path, code: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    // Ranks write the same file at the same time: each its own, and the last rename stays.
    let fresh = path.with_extension(format!("{}.tmp", std::process::id()));
    std::fs::write(&fresh, [&Sha256::digest(code)[..], code].concat())?;
    std::fs::rename(&fresh, path)
}

/// Compiles every source for `arch` with the run-time compiler of its vendor and puts the code into `folder`, where devices find it
/// without a compiler. Returns what was written and its bytes.
///
/// # Errors
/// No compiler, what it says, or a folder that cannot be written.
pub fn build_ahead(folder: &Path, arch: &str, libraries: &Libraries) -> Result<Vec<(PathBuf, usize)>> {
    let vendor = match arch {
        a if a.starts_with("sm_") => Vendor::Nvidia,
        a if a.starts_with("gfx9") => Vendor::Amd,
        _ => {
            return Err(shape(format!(
                "{arch} is no machine that kernels are for; expected sm_80, sm_90, gfx90a, gfx942, gfx950, or another sm_XX"
            )));
        }
    };
    let compiler = Rtc::open(vendor, libraries.compiler.as_deref())?;
    let sources = table::SOURCES.iter().map(|(name, _)| *name).filter(|name| name.ends_with(".cu"));
    let made = sources.map(|source| {
        let (path, code) = (path(folder, source, arch, AHEAD), compiler.compile(source, arch)?.code);
        write(&path, &code).map_err(|e| shape(format!("{}: {e}", path.display())))?;
        Ok((path, code.len()))
    });
    made.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_cut_short_is_not_read() {
        let folder = std::env::temp_dir().join(format!("zrt-code-{}", std::process::id()));
        let at = path(&folder, "adamw.cu", "sm_90", "NVRTC 12.9");
        write(&at, b"code").unwrap();
        assert_eq!(read(&at).unwrap(), b"code");
        let bytes = std::fs::read(&at).unwrap();
        for cut in [0, 10, SEAL_BYTES, bytes.len() - 1] {
            std::fs::write(&at, &bytes[..cut]).unwrap();
            assert!(read(&at).is_none(), "{cut} bytes");
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn names_differ_by_all_that_matters() {
        let names = [("adamw.cu", "sm_90", "a"), ("rope.cu", "sm_90", "a"), ("adamw.cu", "sm_80", "a"), ("adamw.cu", "sm_90", "b")];
        let paths: std::collections::HashSet<_> = names.iter().map(|(s, a, c)| path(Path::new("x"), s, a, c)).collect();
        assert_eq!(paths.len(), names.len());
    }
}
