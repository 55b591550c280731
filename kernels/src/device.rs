//! The contract of a device: allocate memory, make streams and events. No tensor type and no generics: `Arc<dyn Device>`.

use crate::{Buffer, Category, DType, MemoryUse, Ops, Place, Result, View, ViewMut};
use std::any::Any;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What a device is.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// `"cpu"`, `"sim"`, later `"cuda"` and `"hip"`.
    pub kind: &'static str,
    /// Name for people: processor and instruction set.
    pub name: String,
    /// Worker threads (CPU).
    pub threads: usize,
    /// Usable bytes of memory.
    pub memory_bytes: u64,
    /// Estimated peak of dense matmul in FLOP/s for f32 inputs, all threads; 0 when unknown.
    pub peak_flops_f32: f64,
    /// The same for bf16 inputs.
    pub peak_flops_bf16: f64,
}

/// A processor with its own memory and asynchronous, ordered queues.
pub trait Device: Send + Sync {
    /// What it is.
    fn info(&self) -> DeviceInfo;
    /// Allocates `bytes` (zeroed on the CPU, NaN-filled in chaos mode), counted under `category`.
    /// Errors name the allocation and the bytes.
    fn alloc(&self, name: &str, bytes: usize, place: Place, category: Category) -> Result<Buffer>;
    /// Counts memory that someone else mapped (shared pages) as held by this device, until the buffer is dropped.
    fn adopt(&self, buffer: Buffer, category: Category) -> Result<Buffer>;
    /// A new FIFO queue. `name` appears in traces and errors.
    fn stream(&self, name: &str) -> Result<Arc<dyn Stream>>;
    /// A new event, not yet recorded.
    fn event(&self) -> Result<Arc<dyn Event>>;
    /// Memory held now and at most, by place and category. Only rows that were ever used.
    fn memory(&self) -> Vec<(Place, Category, MemoryUse)>;
    /// The operations.
    fn ops(&self) -> &dyn Ops;
}

/// A point in a stream's order. Recording again moves it; a wait takes the latest record made before the wait was called.
/// Waiting for an event that was never recorded returns at once.
pub trait Event: Send + Sync {
    /// True when the recorded point has been passed (or nothing was recorded).
    fn query(&self) -> bool;
    /// Blocks the calling host thread until the point has been passed, at most `deadline`.
    /// Returns the stream's error if the stream failed before the point.
    fn sync(&self, deadline: Duration) -> Result<()>;
    /// For the implementing device.
    fn as_any(&self) -> &dyn Any;
}

/// Host code that runs in a stream's order, with the memory it touches declared.
/// On the CPU device every operation is one of these; elsewhere it is a host callback.
pub struct HostTask {
    /// Name for traces and errors, such as `"rmsnorm"` or `"all_gather layers.3"`.
    pub name: std::borrow::Cow<'static, str>,
    /// Views read.
    pub reads: Vec<View>,
    /// Views written.
    pub writes: Vec<ViewMut>,
    /// The work.
    pub run: Box<dyn FnOnce() -> Result<()> + Send>,
}

/// A driver's own queue, as its libraries take it: `CUstream`, `hipStream_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NativeStream(pub u64);

/// Work that enqueues itself on the driver's queue: a collective of a vendor library, a copy between devices. It runs on the
/// thread that issues the stream's work, with the device current, once everything before it has been issued; it must not wait for the device.
pub struct NativeTask {
    /// Name for traces and errors.
    pub name: std::borrow::Cow<'static, str>,
    /// Views read. They are held until the queue has passed what was enqueued.
    pub reads: Vec<View>,
    /// Views written.
    pub writes: Vec<ViewMut>,
    /// Enqueues.
    pub run: Box<dyn FnOnce(NativeStream) -> Result<()> + Send>,
}

/// Writes bytes from the host into device memory: gets the destination's bytes, fills all of them.
/// On the CPU the slice is the destination itself, so that files are read straight into place.
/// An error text becomes [`crate::Error::Task`].
pub type HostSource = Box<dyn FnOnce(&mut [u8]) -> std::result::Result<(), String> + Send>;

/// A FIFO queue of work. Calls enqueue and return; an error of a task is kept and returned by every later call.
pub trait Stream: Send + Sync {
    /// The name it was made with.
    fn name(&self) -> &str;
    /// Number of this queue on a device that keeps one timeline of all its queues (the simulated one); else 0.
    fn index(&self) -> usize {
        0
    }
    /// For the implementing device.
    fn as_any(&self) -> Option<&dyn Any> {
        None
    }
    /// Records the point after all work enqueued so far.
    fn record(&self, event: &Arc<dyn Event>) -> Result<()>;
    /// Makes later work of this stream wait for the event's latest record.
    /// If the recording stream failed, this stream fails with the same error.
    fn wait(&self, event: &Arc<dyn Event>) -> Result<()>;
    /// Copies `src` to `dst`: same element type and count.
    fn copy(&self, dst: &ViewMut, src: &View) -> Result<()>;
    /// Sets every element to `value` (converted to the view's type).
    fn fill(&self, dst: &ViewMut, value: f32) -> Result<()>;
    /// Fills `dst` from host data. Not run by the simulated device, which only counts the bytes.
    fn write(&self, dst: &ViewMut, what: &str, source: HostSource) -> Result<()>;
    /// Copies `src` to the host; the bytes arrive in the returned [`Readback`]. The simulated device fills it with zeros.
    fn read(&self, src: &View) -> Result<Readback>;
    /// Runs host code in order. The simulated device counts it and does not run it.
    fn host(&self, task: HostTask) -> Result<()>;
    /// Lets `task` enqueue on the driver's queue. [`crate::Error::NotNative`] where there is none: only GPUs have one.
    fn native(&self, task: NativeTask) -> Result<()> {
        Err(crate::Error::NotNative { stream: self.name().to_string(), task: task.name.into_owned() })
    }
    /// Blocks until all work enqueued so far has run.
    fn sync(&self) -> Result<()>;
}

/// Bytes on their way to the host.
#[derive(Clone)]
pub struct Readback {
    event: Arc<dyn Event>,
    bytes: Arc<Mutex<Vec<u8>>>,
}

impl Readback {
    /// For devices: `bytes` holds the data once `event` has passed.
    pub fn new(event: Arc<dyn Event>, bytes: Arc<Mutex<Vec<u8>>>) -> Readback {
        Readback { event, bytes }
    }

    /// Waits at most `deadline` and returns the bytes.
    pub fn bytes(&self, deadline: Duration) -> Result<Vec<u8>> {
        self.event.sync(deadline)?;
        Ok(self.bytes.lock().unwrap_or_else(|e| e.into_inner()).clone())
    }

    /// Waits and returns the elements as `f32` (the view must have been `F32`).
    pub fn f32s(&self, deadline: Duration) -> Result<Vec<f32>> {
        let bytes = self.bytes(deadline)?;
        Ok(bytes.chunks_exact(DType::F32.bytes()).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    }
}
