//! Under which names and with which arguments is it called? One file per library, with the exact symbols that its real counterpart
//! exports; all they do is to check pointers and to call what the vendors share.
//! One function is no vendor's: `zrtEmulatedHold(1)` stops all streams before their next operation, `zrtEmulatedHold(0)` lets them go on.
#![allow(non_snake_case)]

use zrt_kernels::gpu::driver::Vendor;

mod ccl;
mod cuda;
mod hip;
mod lt;
mod rtc;

/// Exports functions that return a code: 0 where the body returns `Ok`. A fault ordered for the function comes first.
macro_rules! export {
    ($(fn $name:ident($($arg:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> i32 {
            if let Some(code) = $crate::abi::fault(stringify!($name)) {
                return code;
            }
            // SAFETY: the caller keeps to the function's documentation, which says what its pointers are.
            #[allow(unused_unsafe)]
            let run = || -> Result<(), i32> { unsafe { $body } };
            run().err().unwrap_or(0)
        }
    )*};
}
pub(crate) use export;

/// The code that a call must return by order of the settings.
fn fault(function: &str) -> Option<i32> {
    crate::device::Machine::open().ok().and_then(|m| m.call_fault(function))
}

/// Writes a result to where the caller wants it.
///
/// # Safety
/// `to` is null or has room for a `T`.
unsafe fn put<T>(to: *mut T, value: T) -> Result<(), i32> {
    if to.is_null() {
        return Err(crate::faults::code::INVALID_VALUE);
    }
    // SAFETY: the caller's promise.
    unsafe { to.write_unaligned(value) };
    Ok(())
}

/// Writes a text and its end, as much as there is room for.
///
/// # Safety
/// `to` is null or has room for `room` bytes.
unsafe fn put_text(to: *mut std::ffi::c_char, room: usize, text: &str) -> Result<(), i32> {
    if to.is_null() || room == 0 {
        return Err(crate::faults::code::INVALID_VALUE);
    }
    let bytes = &text.as_bytes()[..text.len().min(room - 1)];
    // SAFETY: at most `room` bytes.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.cast(), bytes.len());
        to.add(bytes.len()).write(0);
    }
    Ok(())
}

/// A device's name, by which a program can tell that nothing here is real.
fn device_name(vendor: Vendor, index: usize) -> String {
    let arch = crate::device::Machine::open().map(|m| m.arch(vendor).name).unwrap_or_default();
    format!("Emulated {arch} {index}")
}

/// Where a device would be plugged in.
fn bus_id(index: usize) -> String {
    format!("0000:{:02x}:00.0", 0x10 + index)
}

export! {
    fn zrtEmulatedHold(held: i32) {
        crate::device::Machine::open().map_err(|_| crate::faults::code::UNKNOWN)?.gate.close(held != 0);
        Ok(())
    }
}

/// The 64 bytes that stand for memory in another process; passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct IpcHandle(pub [u64; 8]);
