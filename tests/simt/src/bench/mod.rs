//! The bench of kernels on a real GPU: `benches/gpu.sh`. Every call of training is checked against the CPU, then timed beside
//! what the machine's own copy and product reach.
//!
//! * [`gpu`] the first GPU, through the product's own device.
//! * [`checks`] any device against the CPU: also the emulator, which proves the checks themselves without a GPU.
//! * [`times`] the table.

pub mod checks;
pub mod gpu;
pub mod times;

use crate::shapes::Memory;
use zrt_kernels::{Ops, Result, Stream, View};

/// A device that calls can be made on.
pub trait Target: Memory {
    /// Its operations.
    fn ops(&self) -> &dyn Ops;
    /// The stream to pass.
    fn stream(&self) -> &dyn Stream;
    /// The bytes of an operand, when all calls have run.
    ///
    /// # Errors
    /// A call that failed.
    fn read(&self, view: &View) -> Result<Vec<u8>>;
}
