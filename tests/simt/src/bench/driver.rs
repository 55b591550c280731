//! The few driver calls that a bench needs, of CUDA or HIP, loaded at run time: memory, modules, launches and events, all
//! on the default stream and waited for at once. The two APIs have the same calls under two sets of names, so there is one table.
//! This is the bench's own: small and synchronous.
#![allow(unsafe_code)]

use libloading::Library;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};

type Code = c_int;
type Ptr = *mut c_void;

/// Whose driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vendor {
    /// `libcuda`.
    Nvidia,
    /// `libamdhip64`.
    Amd,
}

/// Names of the table's functions, CUDA's and HIP's.
const NAMES: [(&str, &str); 17] = [
    ("cuInit", "hipInit"),
    ("cuDeviceGetCount", "hipGetDeviceCount"),
    ("cuDeviceGetName", "hipDeviceGetName"),
    ("cuDriverGetVersion", "hipDriverGetVersion"),
    ("cuDeviceGetAttribute", "hipDeviceGetAttribute"),
    ("cuMemAlloc_v2", "hipMalloc"),
    ("cuMemFree_v2", "hipFree"),
    ("cuMemcpyHtoD_v2", "hipMemcpyHtoD"),
    ("cuMemcpyDtoH_v2", "hipMemcpyDtoH"),
    ("cuMemcpyDtoD_v2", "hipMemcpyDtoD"),
    ("cuModuleLoadData", "hipModuleLoadData"),
    ("cuModuleGetFunction", "hipModuleGetFunction"),
    ("cuLaunchKernel", "hipModuleLaunchKernel"),
    ("cuCtxSynchronize", "hipDeviceSynchronize"),
    ("cuEventCreate", "hipEventCreateWithFlags"),
    ("cuEventRecord", "hipEventRecord"),
    ("cuEventElapsedTime", "hipEventElapsedTime"),
];

/// Positions in [`NAMES`].
mod at {
    pub const INIT: usize = 0;
    pub const COUNT: usize = 1;
    pub const NAME: usize = 2;
    pub const VERSION: usize = 3;
    pub const ATTRIBUTE: usize = 4;
    pub const ALLOC: usize = 5;
    pub const FREE: usize = 6;
    pub const TO_DEVICE: usize = 7;
    pub const TO_HOST: usize = 8;
    pub const COPY: usize = 9;
    pub const MODULE: usize = 10;
    pub const FUNCTION: usize = 11;
    pub const LAUNCH: usize = 12;
    pub const SYNC: usize = 13;
    pub const EVENT: usize = 14;
    pub const RECORD: usize = 15;
    pub const ELAPSED: usize = 16;
}

/// A loaded driver with its first device in use.
pub struct Driver {
    vendor: Vendor,
    functions: Vec<Ptr>,
    /// `cuFuncSetAttribute`, to allow more shared memory than 48 KiB, static memory too; HIP needs no leave.
    more_shared: Option<Ptr>,
    error_name: Ptr,
    /// The device's name, and the driver's version.
    pub name: String,
    /// As the compiler names the machine.
    pub arch: String,
    /// Compute units.
    pub units: u32,
    /// Shared memory that a block may have.
    pub shared_bytes: u32,
    // Behind the functions that it owns.
    library: Library,
}

// SAFETY: the functions may be called from any thread; the bench uses one.
unsafe impl Send for Driver {}
// SAFETY: as above.
unsafe impl Sync for Driver {}

/// Calls an entry of the table as a function of these types.
macro_rules! call {
    ($driver:expr, $what:expr, $pointer:expr, ($($type:ty),*), ($($arg:expr),*)) => {{
        // SAFETY: the pointer came from the library under the name whose documented signature these types are; arguments live across the call.
        let code = unsafe { std::mem::transmute::<Ptr, unsafe extern "C" fn($($type),*) -> Code>($pointer)($($arg),*) };
        $driver.check($what, code)
    }};
}

/// A kernel that can be launched.
#[derive(Clone, Copy)]
pub struct Function(Ptr);
// SAFETY: a handle of the driver.
unsafe impl Send for Function {}

/// A point in time of the device.
pub struct Event(Ptr);

impl Driver {
    /// The first device of this vendor; `None`: no driver, or one that finds no device.
    ///
    /// # Errors
    /// A driver that lacks a function or fails, which is not the same as none.
    pub fn open(vendor: Vendor) -> Result<Option<Driver>, String> {
        let libraries: &[&str] = match vendor {
            Vendor::Nvidia => &["libcuda.so.1", "libcuda.so"],
            Vendor::Amd => &["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so"],
        };
        // SAFETY: the vendor's library; its initializers have no demands on us.
        let Some(library) = libraries.iter().find_map(|name| unsafe { Library::new(name) }.ok()) else { return Ok(None) };
        let symbol = |name: &str| -> Result<Ptr, String> {
            // SAFETY: an address, which is only called as what its name says.
            unsafe { library.get::<Ptr>(name.as_bytes()) }.map(|s| *s).map_err(|e| format!("{name}: {e}"))
        };
        let name = |(cuda, hip): &(&'static str, &'static str)| if vendor == Vendor::Nvidia { *cuda } else { *hip };
        let functions = NAMES.iter().map(|n| symbol(name(n))).collect::<Result<Vec<_>, _>>()?;
        let error_name = symbol(name(&("cuGetErrorName", "hipGetErrorName")))?;
        let more_shared = (vendor == Vendor::Nvidia).then(|| symbol("cuFuncSetAttribute")).transpose()?;
        let mut driver = Driver {
            vendor,
            functions,
            more_shared,
            error_name,
            name: String::new(),
            arch: String::new(),
            units: 0,
            shared_bytes: 0,
            library,
        };
        Ok(driver.start()?.then_some(driver))
    }

    /// The address of a function.
    fn symbol(&self, name: &str) -> Result<Ptr, String> {
        // SAFETY: an address, which is only called as what its name says.
        unsafe { self.library.get::<Ptr>(name.as_bytes()) }.map(|s| *s).map_err(|e| format!("{name}: {e}"))
    }

    /// Makes device 0 current and asks what it is; false: there is none.
    fn start(&mut self) -> Result<bool, String> {
        let f = &self.functions;
        let mut count: c_int = 0;
        let found = call!(self, "init", f[at::INIT], (c_uint), (0))
            .and_then(|()| call!(self, "device count", f[at::COUNT], (*mut c_int), (&mut count)));
        match found {
            // "No device", and how old versions of HIP say it.
            Err(e) if e.ends_with("(100)") || e.ends_with("(101)") => return Ok(false),
            Ok(()) if count == 0 => return Ok(false),
            other => other?,
        }
        if self.vendor == Vendor::Nvidia {
            let mut context: Ptr = std::ptr::null_mut();
            call!(self, "context", self.symbol("cuDevicePrimaryCtxRetain")?, (*mut Ptr, c_int), (&mut context, 0))?;
            call!(self, "context", self.symbol("cuCtxSetCurrent")?, (Ptr), (context))?;
        } else {
            call!(self, "device", self.symbol("hipSetDevice")?, (c_int), (0))?;
        }
        let mut text = [0 as c_char; 256];
        call!(self, "device name", f[at::NAME], (*mut c_char, c_int, c_int), (text.as_mut_ptr(), 255, 0))?;
        let mut version: c_int = 0;
        call!(self, "driver version", f[at::VERSION], (*mut c_int), (&mut version))?;
        let name = format!("{}, driver API {version}", c_text(text.as_ptr()));
        let attribute = |number: c_int| -> Result<u32, String> {
            let mut value: c_int = 0;
            call!(self, "attribute", f[at::ATTRIBUTE], (*mut c_int, c_int, c_int), (&mut value, number, 0))?;
            Ok(value as u32)
        };
        // Numbers of the attributes in cuda.h, and in hip_runtime_api.h since 5.2.
        if self.vendor == Vendor::Nvidia {
            let (major, minor) = (attribute(75)?, attribute(76)?);
            let (units, shared_bytes) = (attribute(16)?, attribute(97)?);
            (self.name, self.arch, self.units, self.shared_bytes) = (name, format!("sm_{major}{minor}"), units, shared_bytes);
            return Ok(true);
        }
        // The name of the machine is only in the properties, at byte 1160 since HIP 6.0.
        let mut properties = [0u64; 512];
        let get = self.symbol("hipGetDevicePropertiesR0600")?;
        call!(self, "properties", get, (*mut u64, c_int), (properties.as_mut_ptr(), 0))?;
        let arch = c_text(properties[1160 / 8..].as_ptr().cast());
        let arch = arch.split(':').next().unwrap_or_default().to_string();
        let (units, shared_bytes) = (attribute(63)?, attribute(74)?);
        (self.name, self.arch, self.units, self.shared_bytes) = (name, arch, units, shared_bytes);
        Ok(true)
    }

    fn check(&self, what: &str, code: Code) -> Result<(), String> {
        if code == 0 {
            return Ok(());
        }
        let mut text: *const c_char = std::ptr::null();
        // SAFETY: the documented signatures: CUDA writes a static text, HIP returns one.
        unsafe {
            match self.vendor {
                Vendor::Nvidia => {
                    std::mem::transmute::<Ptr, unsafe extern "C" fn(Code, *mut *const c_char) -> Code>(self.error_name)(code, &mut text);
                }
                Vendor::Amd => text = std::mem::transmute::<Ptr, unsafe extern "C" fn(Code) -> *const c_char>(self.error_name)(code),
            }
        }
        Err(format!("{what}: {} ({code})", c_text(text)))
    }

    /// Whose it is.
    pub fn vendor(&self) -> Vendor {
        self.vendor
    }

    /// Device memory.
    pub fn alloc(&self, bytes: usize) -> Result<u64, String> {
        let mut out = 0u64;
        call!(self, "allocation", self.functions[at::ALLOC], (*mut u64, usize), (&mut out, bytes.max(1)))
            .map_err(|e| format!("{e} of {bytes} bytes"))?;
        Ok(out)
    }

    /// Gives memory back.
    pub fn free(&self, address: u64) -> Result<(), String> {
        call!(self, "free", self.functions[at::FREE], (u64), (address))
    }

    /// Host to device.
    pub fn upload(&self, to: u64, bytes: &[u8]) -> Result<(), String> {
        if bytes.is_empty() {
            return Ok(());
        }
        call!(self, "upload", self.functions[at::TO_DEVICE], (u64, *const u8, usize), (to, bytes.as_ptr(), bytes.len()))
    }

    /// Device to host.
    pub fn download(&self, from: u64, bytes: usize) -> Result<Vec<u8>, String> {
        let mut out = vec![0u8; bytes];
        if bytes > 0 {
            call!(self, "download", self.functions[at::TO_HOST], (*mut u8, u64, usize), (out.as_mut_ptr(), from, bytes))?;
        }
        Ok(out)
    }

    /// Device to device.
    pub fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<(), String> {
        call!(self, "copy", self.functions[at::COPY], (u64, u64, usize), (to, from, bytes))
    }

    /// The kernels of these names in compiled code.
    pub fn load(&self, code: &[u8], kernels: &[&str]) -> Result<Vec<Function>, String> {
        let mut module: Ptr = std::ptr::null_mut();
        call!(self, "load module", self.functions[at::MODULE], (*mut Ptr, *const u8), (&mut module, code.as_ptr()))?;
        let function = |name: &&str| {
            let c = CString::new(*name).map_err(|e| e.to_string())?;
            let mut out: Ptr = std::ptr::null_mut();
            call!(self, name, self.functions[at::FUNCTION], (*mut Ptr, Ptr, *const c_char), (&mut out, module, c.as_ptr()))?;
            Ok(Function(out))
        };
        kernels.iter().map(function).collect()
    }

    /// Launches a kernel, whose one parameter is the struct in `params`.
    pub fn launch(&self, f: Function, grid: [u32; 3], threads: u32, shared_bytes: u32, params: &[u8]) -> Result<(), String> {
        if let Some(set) = self.more_shared.filter(|_| shared_bytes > 40 << 10) {
            // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES.
            call!(self, "shared memory", set, (Ptr, c_int, c_int), (f.0, 8, shared_bytes as c_int))?;
        }
        let mut aligned = aligned(params);
        let mut pointers: [Ptr; 1] = [aligned.as_mut_ptr().cast()];
        let [x, y, z] = grid;
        let none: Ptr = std::ptr::null_mut();
        call!(
            self,
            "launch",
            self.functions[at::LAUNCH],
            (Ptr, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Ptr, *mut Ptr, *mut Ptr),
            (f.0, x, y, z, threads, 1, 1, shared_bytes, none, pointers.as_mut_ptr(), std::ptr::null_mut())
        )
    }

    /// Waits for all launches.
    pub fn sync(&self) -> Result<(), String> {
        call!(self, "synchronize", self.functions[at::SYNC], (), ())
    }

    /// An event of the default stream.
    pub fn event(&self) -> Result<Event, String> {
        let mut out: Ptr = std::ptr::null_mut();
        call!(self, "event", self.functions[at::EVENT], (*mut Ptr, c_uint), (&mut out, 0))?;
        Ok(Event(out))
    }

    /// Marks the point behind what was launched so far.
    pub fn record(&self, event: &Event) -> Result<(), String> {
        call!(self, "record", self.functions[at::RECORD], (Ptr, Ptr), (event.0, std::ptr::null_mut()))
    }

    /// Seconds between two points that have passed.
    pub fn secs(&self, from: &Event, to: &Event) -> Result<f64, String> {
        let mut ms = 0f32;
        call!(self, "elapsed time", self.functions[at::ELAPSED], (*mut f32, Ptr, Ptr), (&mut ms, from.0, to.0))?;
        Ok(f64::from(ms) / 1e3)
    }
}

/// A C text, also none.
fn c_text(text: *const c_char) -> String {
    if text.is_null() {
        return "unknown".into();
    }
    // SAFETY: the driver's texts end by 0.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// The bytes of a struct at an address that any of its fields may have.
fn aligned(params: &[u8]) -> Vec<u64> {
    let word = |bytes: &[u8]| {
        let mut whole = [0u8; 8];
        whole[..bytes.len()].copy_from_slice(bytes);
        u64::from_ne_bytes(whole)
    };
    params.chunks(8).map(word).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_each_function_at_its_place() {
        let cuda = |at: usize| NAMES[at].0;
        assert_eq!((cuda(at::INIT), cuda(at::ATTRIBUTE), cuda(at::ALLOC)), ("cuInit", "cuDeviceGetAttribute", "cuMemAlloc_v2"));
        assert_eq!((cuda(at::COPY), cuda(at::LAUNCH), cuda(at::SYNC)), ("cuMemcpyDtoD_v2", "cuLaunchKernel", "cuCtxSynchronize"));
        assert_eq!((cuda(at::RECORD), cuda(at::ELAPSED), at::ELAPSED + 1), ("cuEventRecord", "cuEventElapsedTime", NAMES.len()));
    }

    #[test]
    fn parameters_keep_their_bytes() {
        let params: Vec<u8> = (0..20).collect();
        let words = aligned(&params);
        assert_eq!(words.len(), 3);
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_ne_bytes()).collect();
        assert_eq!((&bytes[..20], &bytes[20..]), (&params[..], &[0u8; 4][..]));
    }

    #[test]
    fn a_machine_without_a_driver_is_no_error() {
        for vendor in [Vendor::Nvidia, Vendor::Amd] {
            if let Some(driver) = Driver::open(vendor).expect("a driver that works, or none") {
                println!("this machine has {}", driver.name);
            }
        }
    }
}
