//! Whose GPU is it, and where are the vendor's libraries? They are loaded at run time, by name or by the path that the configuration
//! gives; a library, a function or a result code that is missing or unknown is an error value.

use std::path::PathBuf;

/// Who made the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Vendor {
    /// CUDA: `libcuda`, NVRTC, cuBLASLt, NCCL.
    Nvidia,
    /// HIP: `libamdhip64`, hipRTC, hipBLASLt, RCCL.
    Amd,
}

impl Vendor {
    /// As [`crate::DeviceInfo::kind`] and `device.kind` in the configuration say it.
    pub fn kind(self) -> &'static str {
        match self {
            Vendor::Nvidia => "cuda",
            Vendor::Amd => "hip",
        }
    }
}

/// Paths to use in place of the vendor's usual library names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Libraries {
    /// `libcuda.so.1`, `libamdhip64.so.6`.
    pub driver: Option<PathBuf>,
    /// `libnvrtc.so.12`, `libhiprtc.so.6`.
    pub compiler: Option<PathBuf>,
    /// `libcublasLt.so.12`, `libhipblaslt.so.0`.
    pub blas: Option<PathBuf>,
    /// `libnccl.so.2`, `librccl.so.1`.
    pub collectives: Option<PathBuf>,
}
