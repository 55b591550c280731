//! Do the GPU kernels compute what they should, on a machine without a GPU? Their very sources are compiled for the host by a C++
//! compiler, once for 32 and once for 64 lanes, and run under an emulator that knows what each thread does (`emu/*.h`).
//!
//! * [`build`] compiles and loads them, once per text and flags; texts can be changed to see that a test would notice.
//! * [`launcher`] runs the launches of [`zrt_kernels::gpu::GpuOps`] in the order of a stream, and counts.
//! * [`cases`] one small case of every operation, for what runs over all kernels.
//! * [`device`] a whole device, so that the unchanged trainer runs on emulated GPUs.
//! * [`gates`] what real compilers make of the same sources, by the product's run-time compiler and others.
//! * [`page`] what calls should cost on real GPUs: [`shapes`] the calls of training, [`plan`] their launches.
//! * [`mod@bench`] the same calls on a real GPU.
#![deny(unsafe_code)]

pub mod bench;
pub mod build;
pub mod cases;
pub mod device;
pub mod gates;
pub mod launcher;
pub mod page;
pub mod plan;
pub mod shapes;
pub mod testing;

pub use build::{Build, Mutation, Sanitizer};
pub use device::{SimtDevice, SimtOptions};
pub use launcher::{Counters, Order};
