//! What do both vendors' drivers do, whatever they call it? Memory, copies, streams and events of the current device, with the codes
//! that the two share.

use crate::clock::{self, Kind};
use crate::device::{Device, Machine};
use crate::faults::{Kind as Fault, code};
use crate::memory::{Owner, Shared, lock};
use crate::stream::{Event, Stream, Task};
use std::borrow::Cow;
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use zrt_kernels::gpu::driver::Vendor;

pub type Outcome = Result<(), i32>;

static STARTED: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// The device that this thread's calls are for; CUDA has none at first, HIP the first.
    static CURRENT: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Opens the machine. Every driver's first call.
pub fn start() -> Outcome {
    let machine = Machine::open().map_err(|why| {
        eprintln!("emulated GPU: {why}");
        code::UNKNOWN
    })?;
    STARTED.store(true, Ordering::Release);
    if machine.devices.is_empty() { Err(code::NO_DEVICE) } else { Ok(()) }
}

/// The machine, for calls that need no device.
pub fn machine(vendor: Vendor) -> Result<&'static Machine, i32> {
    if !STARTED.load(Ordering::Acquire) {
        if vendor == Vendor::Nvidia {
            return Err(code::NOT_INITIALIZED);
        }
        start()?;
    }
    Ok(Machine::get())
}

/// The device of this number.
pub fn device(vendor: Vendor, index: i32) -> Result<&'static Device, i32> {
    let devices = &machine(vendor)?.devices;
    usize::try_from(index).ok().and_then(|i| devices.get(i)).ok_or(code::INVALID_DEVICE)
}

/// Makes a device this thread's; `None` takes it away.
pub fn set_current(index: Option<usize>) {
    CURRENT.set(index);
}

/// The number of this thread's device, the first if none was chosen.
pub fn current_index() -> usize {
    CURRENT.get().unwrap_or(0)
}

/// This thread's device, which has not failed.
pub fn current(vendor: Vendor) -> Result<&'static Device, i32> {
    let machine = machine(vendor)?;
    let index = CURRENT.get().or((vendor == Vendor::Amd).then_some(0)).ok_or(code::INVALID_CONTEXT)?;
    let device = &machine.devices[index];
    match device.error() {
        0 => Ok(device),
        error => Err(error),
    }
}

/// A stream of the current device.
pub fn stream(vendor: Vendor, handle: u64) -> Result<Arc<Stream>, i32> {
    let device = current(vendor)?;
    let stream = Machine::get().stream_of(device, handle)?;
    if std::ptr::eq(stream.device, device) { Ok(stream) } else { Err(code::INVALID_HANDLE) }
}

/// Free and all bytes of the current device.
pub fn memory_info(vendor: Vendor) -> Result<(u64, u64), i32> {
    let (device, memory) = (current(vendor)?, &Machine::get().memory);
    Ok((memory.free_bytes(device.index), memory.capacity()))
}

pub fn allocate(vendor: Vendor, bytes: usize) -> Result<u64, i32> {
    let (device, machine) = (current(vendor)?, Machine::get());
    if machine.faults.hit(|k| (*k == Fault::OutOfMemory).then_some(())).is_some() {
        return Err(code::OUT_OF_MEMORY);
    }
    machine.memory.allocate(device.index, bytes as u64)
}

/// Waits for the device, as the real drivers do, and gives memory back.
pub fn free(vendor: Vendor, at: u64) -> Outcome {
    if at == 0 {
        return Ok(());
    }
    let (device, machine) = (current(vendor)?, Machine::get());
    machine.synchronize(device);
    let freed = machine.memory.remove(at, |o| matches!(o, Owner::Device(_)), code::INVALID_VALUE);
    freed.map(|_| ())
}

pub fn host_allocate(vendor: Vendor, bytes: usize) -> Result<u64, i32> {
    current(vendor)?;
    Machine::get().memory.allocate_host(bytes as u64)
}

pub fn host_free(vendor: Vendor, at: u64) -> Outcome {
    let (device, machine) = (current(vendor)?, Machine::get());
    machine.synchronize(device);
    machine.memory.remove(at, |o| o == Owner::Host, code::INVALID_VALUE).map(|_| ())
}

pub fn register(vendor: Vendor, at: u64, bytes: usize) -> Outcome {
    current(vendor)?;
    Machine::get().memory.register(at, bytes as u64)
}

pub fn unregister(vendor: Vendor, at: u64) -> Outcome {
    let (device, machine) = (current(vendor)?, Machine::get());
    machine.synchronize(device);
    machine.memory.remove(at, |o| o == Owner::Registered, code::NOT_REGISTERED).map(|_| ())
}

/// Which way a copy goes, if the call says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    HostToDevice,
    DeviceToHost,
    DeviceToDevice,
    AsTheyAre,
}

/// The memory at one end of a copy: `None` is pageable.
fn end_of_copy(at: u64, bytes: u64) -> Result<Option<Owner>, i32> {
    let memory = &Machine::get().memory;
    match memory.find(at, bytes) {
        Some(owner) => Ok(Some(owner)),
        None if at == 0 || memory.begins_inside(at) => Err(code::INVALID_VALUE),
        None => Ok(None),
    }
}

fn on_device(owner: Option<Owner>) -> bool {
    matches!(owner, Some(Owner::Device(_) | Owner::Opened(_)))
}

/// Moves bytes between places that are held while they move.
fn move_bytes(to: u64, from: u64, bytes: usize) -> Outcome {
    let memory = &Machine::get().memory;
    let held = |at, owner: Option<Owner>| owner.is_none() || memory.hold(at, bytes as u64).is_some();
    let ends = (memory.find(to, 1), memory.find(from, 1));
    if !held(to, ends.0) || !held(from, ends.1) {
        return Err(code::ILLEGAL_ADDRESS);
    }
    let keep = (memory.hold(to, bytes as u64), memory.hold(from, bytes as u64));
    // SAFETY: whole allocations, held by `keep`, or pageable memory of a caller who waits for the copy.
    unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
    drop(keep);
    Ok(())
}

/// Enqueues a copy. Pageable sources are read now, pinned ones when it runs; pageable targets are waited for.
pub fn copy(vendor: Vendor, to: u64, from: u64, bytes: usize, stream_handle: u64, way: Way) -> Outcome {
    let stream = stream(vendor, stream_handle)?;
    if bytes == 0 {
        return Ok(());
    }
    let (target, source) = (end_of_copy(to, bytes as u64)?, end_of_copy(from, bytes as u64)?);
    let kind = match (on_device(target), on_device(source)) {
        (true, true) => Kind::D2d,
        (true, false) => Kind::H2d,
        (false, true) => Kind::D2h,
        (false, false) => return Err(code::INVALID_VALUE),
    };
    let said = match way {
        Way::HostToDevice => Kind::H2d,
        Way::DeviceToHost => Kind::D2h,
        Way::DeviceToDevice => Kind::D2d,
        Way::AsTheyAre => kind,
    };
    if said != kind {
        return Err(code::INVALID_VALUE);
    }
    let settings = &Machine::get().settings;
    // Between devices it goes over their link.
    let far = kind == Kind::D2d && target != source;
    let cost = if far { Kind::Collective.cost(bytes as u64, settings) } else { kind.cost(bytes as u64, settings) };
    let run: crate::stream::Action = if source.is_none() {
        // SAFETY: the caller says that so many bytes are there.
        let staged = unsafe { std::slice::from_raw_parts(from as *const u8, bytes) }.to_vec();
        Box::new(move |_| move_bytes(to, staged.as_ptr() as u64, bytes))
    } else {
        let pinned = kind != Kind::D2h || target.is_some();
        Box::new(move |_| {
            // What was checked may be gone.
            let gone = |at: u64| Machine::get().memory.hold(at, bytes as u64).is_none();
            if gone(from) || pinned && gone(to) { Err(code::ILLEGAL_ADDRESS) } else { move_bytes(to, from, bytes) }
        })
    };
    stream.task(Task { kind, name: Cow::Borrowed("copy"), bytes: bytes as u64, cost, run });
    if kind == Kind::D2h && target.is_none() {
        stream.synchronize();
        return healthy(stream.device);
    }
    Ok(())
}

/// Enqueues setting `count` elements to the bytes of `value`.
pub fn set<const N: usize>(vendor: Vendor, at: u64, value: [u8; N], count: usize, stream_handle: u64) -> Outcome {
    let stream = stream(vendor, stream_handle)?;
    let bytes = count.checked_mul(N).ok_or(code::INVALID_VALUE)?;
    if bytes == 0 {
        return Ok(());
    }
    let memory = &Machine::get().memory;
    if memory.find(at, bytes as u64).is_none() || !at.is_multiple_of(N as u64) {
        return Err(code::INVALID_VALUE);
    }
    let cost = Kind::Memset.cost(bytes as u64, &Machine::get().settings);
    let run = Box::new(move |_: &'static Device| {
        let _held = memory.hold(at, bytes as u64).ok_or(code::ILLEGAL_ADDRESS)?;
        // SAFETY: an allocation of at least so many bytes, held.
        let to = unsafe { std::slice::from_raw_parts_mut(at as *mut u8, bytes) };
        match value[..] {
            [byte] => to.fill(byte),
            _ => to.chunks_exact_mut(N).for_each(|c| c.copy_from_slice(&value)),
        }
        Ok(())
    });
    stream.task(Task { kind: Kind::Memset, name: Cow::Borrowed("memset"), bytes: bytes as u64, cost, run });
    Ok(())
}

/// The device's error, if it has one.
fn healthy(device: &Device) -> Outcome {
    match device.error() {
        0 => Ok(()),
        error => Err(error),
    }
}

pub fn create_stream(vendor: Vendor, flags: u32) -> Result<u64, i32> {
    let device = current(vendor)?;
    match flags {
        0 | 1 => Machine::get().stream(device, flags == 0).map(|s| s.id),
        _ => Err(code::INVALID_VALUE),
    }
}

pub fn destroy_stream(vendor: Vendor, handle: u64) -> Outcome {
    let machine = machine(vendor)?;
    machine.streams.remove(handle)?.close();
    Ok(())
}

pub fn synchronize_stream(vendor: Vendor, handle: u64) -> Outcome {
    let stream = stream(vendor, handle)?;
    stream.synchronize();
    healthy(stream.device)
}

pub fn query_stream(vendor: Vendor, handle: u64) -> Outcome {
    if stream(vendor, handle)?.query() { Ok(()) } else { Err(code::NOT_READY) }
}

/// Makes what follows in the stream wait for the event's latest record, if it has one.
pub fn wait_event(vendor: Vendor, stream_handle: u64, event: u64) -> Outcome {
    let stream = stream(vendor, stream_handle)?;
    let event = Machine::get().events.get(event)?;
    let latest = lock(&event.latest).clone();
    if let Some(point) = latest {
        stream.wait_for(point);
    }
    Ok(())
}

pub fn synchronize_device(vendor: Vendor) -> Outcome {
    let device = current(vendor)?;
    Machine::get().synchronize(device);
    healthy(device)
}

/// `flags`: 1 waits without spinning, 2 takes no times.
pub fn create_event(vendor: Vendor, flags: u32) -> Result<u64, i32> {
    let device = current(vendor)?;
    if flags & !3 != 0 {
        return Err(code::INVALID_VALUE);
    }
    Ok(Machine::get().events.add(Arc::new(Event { device, timed: flags & 2 == 0, latest: Default::default() })))
}

pub fn destroy_event(vendor: Vendor, event: u64) -> Outcome {
    machine(vendor)?.events.remove(event).map(|_| ())
}

pub fn record_event(vendor: Vendor, event: u64, stream_handle: u64) -> Outcome {
    let stream = stream(vendor, stream_handle)?;
    let event = Machine::get().events.get(event)?;
    if !std::ptr::eq(event.device, stream.device) {
        return Err(code::INVALID_HANDLE);
    }
    *lock(&event.latest) = Some(stream.record());
    Ok(())
}

/// Whether an event's latest record has passed; waits for it if wanted. One that was never recorded has.
pub fn event_passed(vendor: Vendor, event: u64, wait: bool) -> Outcome {
    let event = machine(vendor)?.events.get(event)?;
    healthy(event.device)?;
    let Some(point) = lock(&event.latest).clone() else { return Ok(()) };
    if wait {
        clock::host_waited(point.wait());
        return healthy(event.device);
    }
    let time = point.time().ok_or(code::NOT_READY)?;
    clock::host_waited(time);
    Ok(())
}

/// Milliseconds of virtual time between two records.
pub fn elapsed(vendor: Vendor, from: u64, to: u64) -> Result<f32, i32> {
    let events = &machine(vendor)?.events;
    let time = |handle: u64| {
        let event = events.get(handle)?;
        let point = lock(&event.latest).clone().filter(|_| event.timed).ok_or(code::INVALID_HANDLE)?;
        point.time().ok_or(code::NOT_READY)
    };
    let (from, to) = (time(from)?, time(to)?);
    Ok((to as f64 - from as f64) as f32 / 1e6)
}

/// A handle that another process can open, as drivers' 64 bytes.
pub fn share(vendor: Vendor, at: u64) -> Result<[u64; 8], i32> {
    current(vendor)?;
    let Shared { process, file, offset, bytes } = Machine::get().memory.share(at)?;
    Ok([SHARED, process, file, offset, bytes, 0, 0, 0])
}

const SHARED: u64 = 0x5a52_5453_4841_5245;

pub fn open_shared(vendor: Vendor, handle: [u64; 8]) -> Result<u64, i32> {
    let device = current(vendor)?;
    let [magic, process, file, offset, bytes, ..] = handle;
    // A process cannot open its own memory, as with the real drivers.
    if magic != SHARED || process == u64::from(std::process::id()) {
        return Err(code::INVALID_VALUE);
    }
    Machine::get().memory.open(device.index, Shared { process, file, offset, bytes })
}

pub fn close_shared(vendor: Vendor, at: u64) -> Outcome {
    let (device, machine) = (current(vendor)?, Machine::get());
    machine.synchronize(device);
    machine.memory.remove(at, |o| matches!(o, Owner::Opened(_)), code::INVALID_VALUE).map(|_| ())
}

/// Name and sentence of a code.
pub fn describe(code: i32) -> Option<(&'static std::ffi::CStr, &'static std::ffi::CStr, &'static std::ffi::CStr)> {
    Some(match code {
        0 => (c"CUDA_SUCCESS", c"hipSuccess", c"no error"),
        code::INVALID_VALUE => (c"CUDA_ERROR_INVALID_VALUE", c"hipErrorInvalidValue", c"invalid argument"),
        code::OUT_OF_MEMORY => (c"CUDA_ERROR_OUT_OF_MEMORY", c"hipErrorOutOfMemory", c"out of memory"),
        code::NOT_INITIALIZED => (c"CUDA_ERROR_NOT_INITIALIZED", c"hipErrorNotInitialized", c"initialization error"),
        code::NO_DEVICE => (c"CUDA_ERROR_NO_DEVICE", c"hipErrorNoDevice", c"no capable device is detected"),
        code::INVALID_DEVICE => (c"CUDA_ERROR_INVALID_DEVICE", c"hipErrorInvalidDevice", c"invalid device ordinal"),
        code::INVALID_IMAGE => (c"CUDA_ERROR_INVALID_IMAGE", c"hipErrorInvalidImage", c"device kernel image is invalid"),
        code::INVALID_CONTEXT => (c"CUDA_ERROR_INVALID_CONTEXT", c"hipErrorInvalidContext", c"invalid device context"),
        code::NO_BINARY => (c"CUDA_ERROR_NO_BINARY_FOR_GPU", c"hipErrorNoBinaryForGpu", c"no kernel image for this device"),
        code::INVALID_HANDLE => (c"CUDA_ERROR_INVALID_HANDLE", c"hipErrorInvalidHandle", c"invalid resource handle"),
        code::NOT_FOUND => (c"CUDA_ERROR_NOT_FOUND", c"hipErrorNotFound", c"named symbol not found"),
        code::NOT_READY => (c"CUDA_ERROR_NOT_READY", c"hipErrorNotReady", c"device not ready"),
        code::ILLEGAL_ADDRESS => (c"CUDA_ERROR_ILLEGAL_ADDRESS", c"hipErrorIllegalAddress", c"an illegal memory access"),
        code::ALREADY_REGISTERED => {
            (c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", c"hipErrorHostMemoryAlreadyRegistered", c"memory is registered already")
        }
        code::NOT_REGISTERED => (c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", c"hipErrorHostMemoryNotRegistered", c"memory is not registered"),
        code::MISALIGNED => (c"CUDA_ERROR_MISALIGNED_ADDRESS", c"hipErrorUnknown", c"misaligned address"),
        code::LAUNCH_FAILED => (c"CUDA_ERROR_LAUNCH_FAILED", c"hipErrorLaunchFailure", c"unspecified launch failure"),
        code::UNKNOWN => (c"CUDA_ERROR_UNKNOWN", c"hipErrorUnknown", c"unknown error"),
        _ => return None,
    })
}
