//! A CPU device whose streams take work of a vendor's library: it runs in the stream's order, on the stream's thread.

use std::sync::Arc;
use zrt_collectives::ccl::{HANDLE_BYTES, PeerMemory};
use zrt_kernels::cpu::CpuDevice;
use zrt_kernels::device::HostSource;
use zrt_kernels::memory::Mapping;
use zrt_kernels::*;

pub struct NativeDevice(pub Arc<CpuDevice>);

impl Device for NativeDevice {
    fn info(&self) -> DeviceInfo {
        self.0.info()
    }
    fn alloc(&self, name: &str, bytes: usize, place: Place, category: Category) -> Result<Buffer> {
        self.0.alloc(name, bytes, place, category)
    }
    fn adopt(&self, buffer: Buffer, category: Category) -> Result<Buffer> {
        self.0.adopt(buffer, category)
    }
    fn stream(&self, name: &str) -> Result<Arc<dyn Stream>> {
        Ok(Arc::new(NativeQueue(self.0.stream(name)?)))
    }
    fn event(&self) -> Result<Arc<dyn Event>> {
        self.0.event()
    }
    fn memory(&self) -> Vec<(Place, Category, MemoryUse)> {
        self.0.memory()
    }
    fn ops(&self) -> &dyn Ops {
        self.0.ops()
    }
}

struct NativeQueue(Arc<dyn Stream>);

impl Stream for NativeQueue {
    fn name(&self) -> &str {
        self.0.name()
    }
    fn record(&self, event: &Arc<dyn Event>) -> Result<()> {
        self.0.record(event)
    }
    fn wait(&self, event: &Arc<dyn Event>) -> Result<()> {
        self.0.wait(event)
    }
    fn copy(&self, dst: &ViewMut, src: &View) -> Result<()> {
        self.0.copy(dst, src)
    }
    fn fill(&self, dst: &ViewMut, value: f32) -> Result<()> {
        self.0.fill(dst, value)
    }
    fn write(&self, dst: &ViewMut, what: &str, source: HostSource) -> Result<()> {
        self.0.write(dst, what, source)
    }
    fn read(&self, src: &View) -> Result<Readback> {
        self.0.read(src)
    }
    fn host(&self, task: HostTask) -> Result<()> {
        self.0.host(task)
    }
    fn native(&self, task: NativeTask) -> Result<()> {
        let NativeTask { name, reads, writes, run } = task;
        self.0.host(HostTask { name, reads, writes, run: Box::new(move || run(NativeStream(0))) })
    }
    fn sync(&self) -> Result<()> {
        self.0.sync()
    }
}

/// Memory of this process, which all ranks have: a handle is its address.
pub struct Mapped;

/// Someone else's memory.
struct Elsewhere(usize, usize);

// SAFETY: the test keeps the exporting communicator until all are done with it.
unsafe impl Mapping for Elsewhere {
    fn base(&self) -> *mut u8 {
        self.0 as *mut u8
    }
    fn bytes(&self) -> usize {
        self.1
    }
}

impl PeerMemory for Mapped {
    fn export(&self, buffer: &Buffer) -> Result<[u8; HANDLE_BYTES]> {
        let mut handle = [0; HANDLE_BYTES];
        handle[..8].copy_from_slice(&buffer.all(DType::U8)?.address().unwrap().to_le_bytes());
        Ok(handle)
    }
    fn import(&self, name: &str, handle: [u8; HANDLE_BYTES], bytes: usize) -> Result<Buffer> {
        let address = u64::from_le_bytes(handle[..8].try_into().unwrap());
        Ok(Buffer::from_mapping(name, Place::Device, Box::new(Elsewhere(address as usize, bytes))))
    }
}

/// Memory that nobody else can map.
pub struct Unmapped;

impl PeerMemory for Unmapped {
    fn export(&self, buffer: &Buffer) -> Result<[u8; HANDLE_BYTES]> {
        Mapped.export(buffer)
    }
    fn import(&self, name: &str, _: [u8; HANDLE_BYTES], _: usize) -> Result<Buffer> {
        Err(Error::Library { library: name.to_string(), why: "no peer access".to_string() })
    }
}
