//! The functions of a driver, once for both vendors: every signature is the same in CUDA's driver interface and in HIP, but for the
//! types' names. Results are integers: a code that this build does not know is a number, not undefined behaviour.
#![allow(unsafe_code)]

use super::Vendor;
use super::library::Symbols;
use crate::Result;
use std::ffi::{c_char, c_int, c_uchar, c_uint, c_void};

/// `CUresult`, `hipError_t`.
pub(super) type Code = c_int;
/// `CUstream`, `CUevent`, `CUmodule`, `CUfunction` and HIP's: opaque pointers.
pub(super) type Handle = *mut c_void;

/// `cuLaunchKernel`.
pub(super) type LaunchKernel =
    unsafe extern "C" fn(Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut Handle, *mut Handle) -> Code;

/// Declares the table and how it is filled: field, name in CUDA, name in HIP, arguments.
macro_rules! functions {
    ($($field:ident: $cuda:literal, $hip:literal, ($($arg:ty),*);)*) => {
        /// See the module documentation.
        pub(super) struct Functions {
            $(pub $field: unsafe extern "C" fn($($arg),*) -> Code,)*
            pub launch: LaunchKernel,
        }

        impl Functions {
            /// Finds every function.
            ///
            /// # Errors
            /// [`crate::Error::Library`] names the first that is missing.
            pub fn load(vendor: Vendor, symbols: &Symbols) -> Result<Functions> {
                let nvidia = vendor == Vendor::Nvidia;
                // SAFETY: the fields have the signatures that both vendors document under these names.
                unsafe {
                    Ok(Functions {
                        $($field: symbols.get(if nvidia { $cuda } else { $hip })?,)*
                        launch: symbols.get(if nvidia { "cuLaunchKernel" } else { "hipModuleLaunchKernel" })?,
                    })
                }
            }
        }

        /// What each field is called, for errors: CUDA, HIP.
        pub(super) mod names {
            $(#[allow(non_upper_case_globals)] pub const $field: [&str; 2] = [$cuda, $hip];)*
            #[allow(non_upper_case_globals)]
            pub const launch: [&str; 2] = ["cuLaunchKernel", "hipModuleLaunchKernel"];
        }
    };
}

functions! {
    driver_version: "cuDriverGetVersion", "hipDriverGetVersion", (*mut c_int);
    device_get: "cuDeviceGet", "hipDeviceGet", (*mut c_int, c_int);
    device_name: "cuDeviceGetName", "hipDeviceGetName", (*mut c_char, c_int, c_int);
    device_attribute: "cuDeviceGetAttribute", "hipDeviceGetAttribute", (*mut c_int, c_int, c_int);
    device_memory: "cuDeviceTotalMem_v2", "hipDeviceTotalMem", (*mut usize, c_int);
    pci_bus_id: "cuDeviceGetPCIBusId", "hipDeviceGetPCIBusId", (*mut c_char, c_int, c_int);
    memory_info: "cuMemGetInfo_v2", "hipMemGetInfo", (*mut usize, *mut usize);
    alloc: "cuMemAlloc_v2", "hipMalloc", (*mut u64, usize);
    free: "cuMemFree_v2", "hipFree", (u64);
    register: "cuMemHostRegister_v2", "hipHostRegister", (*mut c_void, usize, c_uint);
    unregister: "cuMemHostUnregister", "hipHostUnregister", (*mut c_void);
    to_device: "cuMemcpyHtoDAsync_v2", "hipMemcpyHtoDAsync", (u64, *const c_void, usize, Handle);
    to_host: "cuMemcpyDtoHAsync_v2", "hipMemcpyDtoHAsync", (*mut c_void, u64, usize, Handle);
    on_device: "cuMemcpyDtoDAsync_v2", "hipMemcpyDtoDAsync", (u64, u64, usize, Handle);
    set_bytes: "cuMemsetD8Async", "hipMemsetD8Async", (u64, c_uchar, usize, Handle);
    set_words: "cuMemsetD32Async", "hipMemsetD32Async", (u64, c_uint, usize, Handle);
    stream_create: "cuStreamCreate", "hipStreamCreateWithFlags", (*mut Handle, c_uint);
    stream_destroy: "cuStreamDestroy_v2", "hipStreamDestroy", (Handle);
    stream_wait: "cuStreamWaitEvent", "hipStreamWaitEvent", (Handle, Handle, c_uint);
    event_create: "cuEventCreate", "hipEventCreateWithFlags", (*mut Handle, c_uint);
    event_destroy: "cuEventDestroy_v2", "hipEventDestroy", (Handle);
    event_record: "cuEventRecord", "hipEventRecord", (Handle, Handle);
    event_query: "cuEventQuery", "hipEventQuery", (Handle);
    event_elapsed: "cuEventElapsedTime", "hipEventElapsedTime", (*mut f32, Handle, Handle);
    module_load: "cuModuleLoadData", "hipModuleLoadData", (*mut Handle, *const c_void);
    module_unload: "cuModuleUnload", "hipModuleUnload", (Handle);
    module_function: "cuModuleGetFunction", "hipModuleGetFunction", (*mut Handle, Handle, *const c_char);
}
