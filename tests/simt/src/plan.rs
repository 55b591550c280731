//! What would a call launch on a machine that is not here? Operands without memory, the GPU's operations, and a launcher that
//! writes down: grids, threads, shared memory and workspace are the very ones that a device would get. Arithmetic and the
//! least bytes, each operand once, are counted by the simulated device.

use crate::shapes::{Case, Fill, Memory};
use std::sync::{Arc, Mutex};
use zrt_kernels::gpu::launch::{Address, Arch, Launch, Launcher, Work};
use zrt_kernels::gpu::{GpuOps, workspace_bytes};
use zrt_kernels::sim::{SimDevice, SimOptions};
use zrt_kernels::{Category, DType, Device, OpShape, Place, Result, Stream, View, ViewMut};

/// Keeps work instead of doing it.
struct Recorder {
    arch: Arch,
    works: Mutex<Vec<Work>>,
}

/// Allocations are this far apart, more than any has bytes.
const APART: u64 = 1 << 44;

impl Launcher for Recorder {
    fn arch(&self) -> &Arch {
        &self.arch
    }

    fn address(&self, _op: &'static str, view: &View) -> Result<Address> {
        let (id, start, _) = view.span();
        Ok(Address(id * APART + start as u64))
    }

    fn run(&self, work: Work, _s: &dyn Stream) -> Result<()> {
        self.works.lock().unwrap_or_else(|e| e.into_inner()).push(work);
        Ok(())
    }
}

struct NoMemory {
    device: Arc<SimDevice>,
    arch: Arch,
}

impl Memory for NoMemory {
    fn tensor(&self, elems: usize, dtype: DType, _fill: Fill) -> Result<ViewMut> {
        self.device.alloc("operand", elems * dtype.bytes(), Place::Device, Category::Workspace)?.all(dtype)
    }

    fn workspace_bytes(&self, shape: OpShape) -> usize {
        workspace_bytes(&self.arch, shape)
    }
}

/// What a call does on one machine.
pub struct Plan {
    /// Launches in order.
    pub launches: Vec<Launch>,
    /// Floating-point operations.
    pub flops: u64,
    /// Bytes of operands, each read or written once.
    pub least_bytes: u64,
    /// Bytes of the workspace that are used: partial sums, which are written once and read once.
    pub workspace_bytes: u64,
}

impl Plan {
    /// Bytes that pass through device memory.
    pub fn moved_bytes(&self) -> u64 {
        self.least_bytes + 2 * self.workspace_bytes
    }

    /// The launch of the most threads, aside from those that only add partial sums or prepare.
    pub fn main(&self) -> Option<&Launch> {
        self.launches.iter().max_by_key(|l| (!ASIDE.iter().any(|a| l.kernel.starts_with(a)), blocks(l) * u64::from(l.threads)))
    }
}

/// What the kernels begin with that do little but have many blocks.
const ASIDE: [&str; 4] = ["lora_sum", "column_sum", "attention_boundaries", "attention_delta"];

/// Blocks of a launch.
pub fn blocks(launch: &Launch) -> u64 {
    launch.grid.iter().map(|n| u64::from(*n)).product()
}

/// Bytes of the workspace, the one operand of bytes, from the first that a launch is told of.
fn used_workspace(recorder: &Recorder, work: &Work) -> Result<u64> {
    let Some(ws) = work.writes.iter().find(|v| v.dtype() == DType::U8 && v.elems() > 0) else { return Ok(0) };
    let start = recorder.address(work.op, ws)?.0;
    let end = start + ws.bytes() as u64;
    let words = work.launches.iter().flat_map(|l| l.params.chunks_exact(8)).filter_map(|c| c.try_into().ok().map(u64::from_le_bytes));
    Ok(words.filter(|w| (start..end).contains(w)).min().map_or(0, |first| end - first))
}

/// What this call does on this machine.
///
/// # Errors
/// An operation that refuses the sizes.
pub fn plan(case: &Case, arch: &Arch) -> Result<Plan> {
    let sizes = arch.clone();
    let device = SimDevice::with_sizes(SimOptions { threads: 1 }, move |shape| workspace_bytes(&sizes, shape))?;
    let stream = device.stream("plan")?;
    let call = (case.prepare)(&NoMemory { device: device.clone(), arch: arch.clone() })?;
    let ops = GpuOps::new(Recorder { arch: arch.clone(), works: Mutex::default() });
    (call.run)(&ops, &*stream)?;
    (call.run)(device.ops(), &*stream)?;
    let (mut flops, mut least_bytes) = (0, 0);
    for count in device.counts().ops.values() {
        flops += count.flops;
        least_bytes += count.bytes;
    }
    let recorder = ops.launcher();
    let works = std::mem::take(&mut *recorder.works.lock().unwrap_or_else(|e| e.into_inner()));
    let mut out = Plan { launches: Vec::new(), flops, least_bytes, workspace_bytes: 0 };
    for work in works {
        out.workspace_bytes += used_workspace(recorder, &work)?;
        out.launches.extend(work.launches);
    }
    Ok(out)
}
