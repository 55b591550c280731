//! The simulated device.
