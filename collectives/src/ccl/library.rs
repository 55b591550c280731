//! Where do the vendor's functions come from? NCCL or RCCL is loaded at run time and its functions are found by name in one table; what is
//! missing is an error value, and so is every result code but success, known to us or not.
#![allow(unsafe_code)]

use super::sys;
use std::ffi::{CStr, OsStr};
use std::path::Path;
use std::sync::Arc;
use zrt_kernels::Error;
use zrt_kernels::gpu::driver::Vendor;

/// A call and what it returned.
pub(super) type Outcome = (&'static str, sys::ncclResult_t);

/// Calls a function of the table and pairs its name with its result.
macro_rules! call {
    ($api:expr, $name:ident $(, $argument:expr)*) => {
        (stringify!($name), ($api.$name)($($argument),*))
    };
}
pub(super) use call;

macro_rules! table {
    (required: $($required:ident)*; optional: $($optional:ident)*) => {
        /// The functions, by their names.
        #[derive(Clone, Copy)]
        #[allow(missing_docs, non_snake_case)]
        pub struct Api {
            $(pub $required: sys::$required,)*
            $(pub $optional: Option<sys::$optional>,)*
        }

        impl Api {
            /// Finds them.
            ///
            /// # Safety
            /// What the library exports under these names must be what NCCL's header declares.
            unsafe fn find(library: &libloading::Library) -> Result<Api, String> {
                // SAFETY: by the contract, each symbol is a function of the type that was generated from its declaration.
                unsafe {
                    Ok(Api {
                        $($required: function::<sys::$required>(library, stringify!($required))?,)*
                        $($optional: function::<sys::$optional>(library, stringify!($optional)).ok(),)*
                    })
                }
            }
        }
    };
}

/// What the system says; the error itself only says which of its functions failed.
fn cause(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), |source| source.to_string())
}

/// # Safety
/// `F` must be the type of the function of this name.
pub(super) unsafe fn function<F: Copy>(library: &libloading::Library, name: &str) -> Result<F, String> {
    // SAFETY: by the contract.
    let found = unsafe { library.get::<F>(name.as_bytes()) };
    found.map(|f| *f).map_err(|e| format!("it has no {name}: {}", cause(&e)))
}

table! {
    required: ncclGetVersion ncclGetUniqueId ncclCommInitRank ncclCommGetAsyncError ncclCommDestroy ncclCommAbort ncclCommCount
        ncclAllGather ncclReduceScatter ncclAllReduce ncclBroadcast ncclSend ncclRecv ncclGroupStart ncclGroupEnd ncclGetErrorString;
    // Older than NCCL 2.14, and than RCCL of the same number.
    optional: ncclCommInitRankConfig ncclCommFinalize ncclGetLastError
}

/// A loaded library.
pub struct Library {
    pub(super) api: Api,
    /// What was loaded, and its version: `libnccl.so.2 2.18.3`.
    name: String,
}

impl Library {
    /// The library of `vendor`, or the one at `path`. It stays loaded: its threads may outlive every communicator.
    ///
    /// # Errors
    /// [`Error::Library`] names what was tried and what is missing.
    pub fn load(vendor: Vendor, path: Option<&Path>) -> Result<Arc<Library>, Error> {
        let usual = match vendor {
            Vendor::Nvidia => "libnccl.so.2",
            Vendor::Amd => "librccl.so.1",
        };
        let name: &OsStr = path.map_or(OsStr::new(usual), Path::as_os_str);
        let shown = name.to_string_lossy().into_owned();
        let missing = |why: String| Error::Library {
            library: shown.clone(),
            why: format!("{why}; install it, or give its path as device.libraries.collectives"),
        };
        // SAFETY: loading runs the library's initializers: it is the vendor's, or the one that the user named.
        let library = unsafe { libloading::Library::new(name) }.map_err(|e| missing(cause(&e)))?;
        // SAFETY: a library of this name has NCCL's interface; RCCL keeps it.
        let api = unsafe { Api::find(&library) }.map_err(missing)?;
        std::mem::forget(library);
        Library::from_table(api, &shown)
    }

    /// Functions that are there already, under the name that messages use.
    #[doc(hidden)]
    pub fn from_table(api: Api, name: &str) -> Result<Arc<Library>, Error> {
        let mut library = Library { api, name: name.to_string() };
        let mut version = 0;
        // SAFETY: writes one int.
        let code = unsafe { (api.ncclGetVersion)(&mut version) };
        library.check("loading", ("ncclGetVersion", code), std::ptr::null_mut())?;
        library.name = format!("{name} {}", version_text(version));
        Ok(Arc::new(library))
    }

    /// What was loaded, and its version: `libnccl.so.2 2.18.3`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Success, or an error with the number and what the library says of it. `comm` may be null.
    pub(super) fn check(&self, what: &str, (call, code): Outcome, comm: sys::ncclComm_t) -> Result<(), Error> {
        if code == sys::ncclSuccess {
            return Ok(());
        }
        // SAFETY: both return texts that the library owns, or null; the first takes any number, the second takes null.
        let texts = unsafe {
            let detail = self.api.ncclGetLastError.map_or(std::ptr::null(), |last| last(comm));
            [(self.api.ncclGetErrorString)(code), detail]
        };
        let said: Vec<String> = texts.iter().filter_map(|text| text_of(*text)).collect();
        let text = if said.is_empty() { "the library says nothing".to_string() } else { said.join(": ") };
        Err(Error::Driver { what: format!("{}: {what}", self.name), call, code: code as i32, text })
    }
}

fn text_of(text: *const std::ffi::c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: the library's texts end with a zero and live as long as it.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_string();
    (!text.is_empty()).then_some(text)
}

/// `21803` is 2.18.3; up to 2.8 there was one digit for the minor number.
fn version_text(code: i32) -> String {
    let scale = if code < 10_000 { 10 } else { 100 };
    format!("{}.{}.{}", code / (100 * scale), code / 100 % scale, code % 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_read_as_the_library_prints_them() {
        assert_eq!([2804, 21304, 21803, 23203].map(version_text), ["2.8.4", "2.13.4", "2.18.3", "2.32.3"]);
    }

    #[test]
    fn a_missing_library_and_a_missing_function_are_errors_that_name_them() {
        let why = Library::load(Vendor::Nvidia, Some(Path::new("/nowhere/libnccl.so.2"))).err().unwrap().to_string();
        assert!(why.contains("/nowhere/libnccl.so.2") && why.contains("device.libraries.collectives"), "{why}");
        let why = Library::load(Vendor::Amd, Some(Path::new("libc.so.6"))).err().unwrap().to_string();
        assert!(why.contains("ncclGetVersion"), "{why}");
    }
}
