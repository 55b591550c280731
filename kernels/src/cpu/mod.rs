//! The CPU device.

pub mod float;
pub mod pool;
pub mod simd;
