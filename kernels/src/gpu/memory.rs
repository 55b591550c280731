//! Memory of a GPU, and host memory that it copies from and to without the processor's help.
#![allow(unsafe_code)]

use super::driver::Driver;
use crate::cpu::heap::Pages;
use crate::memory::Mapping;
use crate::{Error, Result};
use std::sync::Arc;

/// Device memory, which the host cannot touch.
pub(super) struct OnDevice {
    driver: Arc<Driver>,
    address: u64,
    bytes: usize,
}

impl OnDevice {
    pub fn new(driver: &Arc<Driver>, name: &str, bytes: usize) -> Result<OnDevice> {
        driver.enter()?;
        Ok(OnDevice { address: driver.alloc(name, bytes)?, driver: driver.clone(), bytes })
    }
}

// SAFETY: the base is null: the host cannot touch it.
unsafe impl Mapping for OnDevice {
    fn base(&self) -> *mut u8 {
        std::ptr::null_mut()
    }
    fn bytes(&self) -> usize {
        self.bytes
    }
    fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for OnDevice {
    fn drop(&mut self) {
        // A device that failed has said so already.
        if self.driver.enter().is_ok() {
            // SAFETY: streams hold what they use until the device has passed it.
            let _ = unsafe { self.driver.free(self.address) };
        }
    }
}

/// What every note about memory that could not be locked names.
pub(super) const LOCKED: &str = "RLIMIT_MEMLOCK";

/// Host memory of exact size, locked for the device where that is allowed.
pub(super) struct Pinned {
    pages: Pages,
    /// `None`: not locked; copies then go through the driver's own staging memory.
    driver: Option<Arc<Driver>>,
}

impl Pinned {
    /// Maps and locks. The text says why it could not be locked, and what to do.
    pub fn new(driver: &Arc<Driver>, name: &str, bytes: usize, poison: bool) -> Result<(Pinned, Option<String>)> {
        let pages = Pages::map(name, bytes, poison)?;
        if bytes == 0 {
            return Ok((Pinned { pages, driver: None }, None));
        }
        driver.enter()?;
        // SAFETY: the pages stay mapped until this value is dropped, which unregisters them first.
        match unsafe { driver.register(pages.base(), bytes) } {
            Ok(()) => Ok((Pinned { pages, driver: Some(driver.clone()) }, None)),
            Err(e @ (Error::Driver { .. } | Error::OutOfMemory { .. })) => {
                let note = format!(
                    "host memory for '{name}' is not locked, so copies are slower and wait for the host ({e}); raise the limit of locked memory (`ulimit -l unlimited`; {LOCKED} is {})",
                    locked_limit()
                );
                Ok((Pinned { pages, driver: None }, Some(note)))
            }
            Err(e) => Err(e),
        }
    }
}

fn locked_limit() -> String {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a struct to write to.
    match unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit) } {
        0 if limit.rlim_cur == libc::RLIM_INFINITY => "unlimited".into(),
        0 => format!("{} bytes", limit.rlim_cur),
        _ => "unknown".into(),
    }
}

// SAFETY: mapped until drop.
unsafe impl Mapping for Pinned {
    fn base(&self) -> *mut u8 {
        self.pages.base()
    }
    fn bytes(&self) -> usize {
        self.pages.bytes()
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Some(driver) = self.driver.take()
            && driver.enter().is_ok()
        {
            // SAFETY: streams hold what they use until the device has passed it. A device that failed has said so already.
            let _ = unsafe { driver.unregister(self.pages.base()) };
        }
    }
}
