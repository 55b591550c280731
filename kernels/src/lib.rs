//! Devices and operations: what the runtime computes with.
//!
//! * [`memory`] what a buffer and a view are; who owns bytes and when they are freed.
//! * [`device`] the contract of a device: allocate, streams, events. Implemented by [`cpu`] and [`sim`].
//! * [`ops`] the contract of the maths: every operation of a decoder, forward beside backward.
//! * [`checks`] whether a call of an operation is well-formed; used by every device.
//! * [`gpu`] GPUs: the device over a vendor's driver, and the operations, whoever launches their kernels.
//! * [`host`] own operations of embedders, as host code over slices.
//! * [`rate`] how fast operations are, beside what the processor can do.
//! * [`philox`] the counter-based random numbers that dropout and initialization use.
//!
//! Everything that takes time is an operation on a [`device::Stream`]; calling one only enqueues it.
#![deny(unsafe_code)]

pub mod checks;
pub mod cpu;
pub mod device;
pub mod dtype;
pub mod error;
pub mod gpu;
pub mod host;
pub mod memory;
pub mod ops;
pub mod philox;
pub mod rate;
pub mod sim;

pub use device::{Device, DeviceInfo, Event, HostTask, NativeStream, NativeTask, Readback, Stream};
pub use dtype::DType;
pub use error::{Error, Result};
pub use memory::{Buffer, Category, MemoryUse, Place, View, ViewMut};
pub use ops::{AdamW, AdaptedLinear, Attention, Dropout, LoraBackward, LoraForward, OpShape, Ops, Weight, Write};
