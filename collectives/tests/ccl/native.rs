//! A CPU device whose streams take work of a vendor's library: it runs in the stream's order, on the stream's thread.

use std::sync::Arc;
use zrt_kernels::cpu::CpuDevice;
use zrt_kernels::device::HostSource;
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
