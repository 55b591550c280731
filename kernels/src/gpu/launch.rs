//! What passes between an operation's host side and the machine that runs its kernels? A [`Work`]: launches in order, the memory
//! they touch, and what a fault in the data means. A [`Launcher`] puts it on a stream: a driver on a GPU, the emulator in tests.
//! Operations build it by [`Call`], so that all of them declare their operands the same way.

use crate::{DType, Error, Result, Stream, View, ViewMut};
use bytemuck::{Pod, Zeroable};

/// The machine that kernels are compiled for, as far as their host side must know it to choose tiles.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arch {
    /// Compiler's name: `sm_90`, `gfx942`.
    pub name: String,
    /// Lanes of a warp: 32 or 64.
    pub lanes: u32,
    /// Shared memory that one block may have, in bytes.
    pub shared_bytes: u32,
    /// Compute units (streaming multiprocessors).
    pub units: u32,
}

impl Arch {
    /// The machines that kernels are tuned for: name, lanes, shared memory of a block, compute units of the usual part.
    pub fn known(name: &str) -> Option<Arch> {
        let (lanes, shared_kib, units) = match name {
            "sm_80" => (32, 163, 108),
            "sm_90" => (32, 227, 132),
            "gfx90a" => (64, 64, 110),
            "gfx942" => (64, 64, 304),
            "gfx950" => (64, 160, 256),
            _ => return None,
        };
        Some(Arch { name: name.into(), lanes, shared_bytes: shared_kib << 10, units })
    }
}

/// An address in device memory, as kernels get it; 0 is "not wanted".
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Address(pub u64);

impl Address {
    /// The address `bytes` further on.
    pub fn offset(self, bytes: usize) -> Address {
        Address(self.0 + bytes as u64)
    }
}

/// A kernel: its entry point, the file it is in, and the bytes of the one struct it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// Entry point.
    pub name: &'static str,
    /// File in `kernels/gpu`.
    pub source: &'static str,
    /// Bytes of its parameters.
    pub params_bytes: usize,
}

impl Kernel {
    /// The kernel `name` of `source`, which takes a `P`.
    pub const fn new<P>(name: &'static str, source: &'static str) -> Kernel {
        Kernel { name, source, params_bytes: size_of::<P>() }
    }
}

/// How the operands of a product lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    /// a `[M,K]`, b `[N,K]`.
    Nt,
    /// a `[M,K]`, b `[K,N]`.
    Nn,
    /// a `[K,M]`, b `[K,N]`.
    Tn,
}

impl Form {
    /// Elements of a row of b, of a product with `n` columns and sums of `k` terms.
    pub fn row_of_b(self, n: usize, k: usize) -> usize {
        if self == Form::Nt { k } else { n }
    }
}

/// A dense product of row-major matrices, `c [M,N] (+)= a b + bias`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dense {
    /// How a and b lie.
    pub form: Form,
    /// Storage type of a, b and bias.
    pub dtype: DType,
    /// Storage type of c: that, or f32.
    pub c_dtype: DType,
    /// Result.
    pub c: Address,
    /// Left operand.
    pub a: Address,
    /// Right operand.
    pub b: Address,
    /// `[N]`; 0: none.
    pub bias: Address,
    /// Rows of the result.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// Terms of each sum.
    pub k: usize,
    /// Elements between rows of a; behind the columns there may be anything that is finite, as in c.
    pub lda: usize,
    /// Elements between rows of b.
    pub ldb: usize,
    /// Elements between rows of c.
    pub ldc: usize,
    /// Adds to c.
    pub add: bool,
}

/// One launch of a kernel.
#[derive(Clone, Debug)]
pub struct Launch {
    /// Entry point.
    pub kernel: &'static str,
    /// Blocks in three dimensions, none of them 0.
    pub grid: [u32; 3],
    /// Threads of a block, whole warps.
    pub threads: u32,
    /// Bytes of dynamic shared memory.
    pub shared_bytes: u32,
    /// The kernel's struct.
    pub params: Vec<u8>,
    /// Where in `params` the address of the fault cell goes, if the kernel reports faults.
    pub fault_at: Option<usize>,
    /// Bytes that the kernel reads besides, made by the host for this launch, a multiple of 8: the launcher puts them into device
    /// memory, in the stream's order, and their address at this place of `params`.
    pub data: Option<(usize, Vec<u8>)>,
    /// What the launch computes, if that is one whole product: a launcher may let the vendor's library do it.
    pub dense: Option<Dense>,
}

/// What it means when a kernel reports a fault, which it does as (row, value): "`what` `value` at row `row` is out of 0..`limit`".
/// The cell is one `u64`, all ones before the launches; the kernel leaves the least `row << 32 | value`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// What the list holds: `"id"`, `"position"`.
    pub what: &'static str,
    /// Values must be in `0..limit`.
    pub limit: usize,
}

/// [`Fault::what`] of boundaries of documents, whose rule is another one.
const BOUNDARIES: &str = "cu_seqlens";

impl Fault {
    /// Row `i` of the list is the first boundary that is not 0 at the beginning, not below the one before it, and `tokens` at the end.
    pub fn boundaries(tokens: usize) -> Fault {
        Fault { what: BOUNDARIES, limit: tokens }
    }

    /// The error that a cell's content means, if any.
    pub fn check(&self, op: &'static str, cell: u64) -> Result<()> {
        if cell == u64::MAX {
            return Ok(());
        }
        let (row, value) = (cell >> 32, cell as u32 as i32);
        if self.what == BOUNDARIES {
            let what =
                format!("cu_seqlens[{row}] is {value}, expected boundaries that ascend from 0 to the number of tokens, {}", self.limit);
            return Err(Error::Shape { op, what });
        }
        let what = format!(
            "{} {value} at row {row} is out of 0..{}; check that the tokenizer and the model belong together",
            self.what, self.limit
        );
        Err(Error::Shape { op, what })
    }
}

/// An operation, ready to run.
pub struct Work {
    /// Name of the operation.
    pub op: &'static str,
    /// Launches, each after the one before it.
    pub launches: Vec<Launch>,
    /// Memory read.
    pub reads: Vec<View>,
    /// Memory written.
    pub writes: Vec<ViewMut>,
    /// What faults mean, if any launch reports them.
    pub fault: Option<Fault>,
}

/// Runs kernels on a stream.
pub trait Launcher: Send + Sync {
    /// The machine.
    fn arch(&self) -> &Arch;
    /// Device address of a view's first element; [`Error::NotHost`] where the memory is another device's.
    fn address(&self, op: &'static str, view: &View) -> Result<Address>;
    /// Whether the vendor's library does dense products, so that long sums need not be cut into parts.
    fn has_blas(&self) -> bool {
        false
    }
    /// Enqueues the work; its memory is held until it has run. A fault fails the stream.
    fn run(&self, work: Work, s: &dyn Stream) -> Result<()>;
}

/// Alignment of parts of a workspace: whole lines of any cache.
pub(super) const ALIGN: usize = 256;

/// Bytes to ask for, for parts of these bytes: each begins at a multiple of [`ALIGN`], wherever the workspace begins.
pub(super) fn workspace_of(parts: &[usize]) -> usize {
    let bytes: usize = parts.iter().map(|b| b.next_multiple_of(ALIGN)).sum();
    if bytes == 0 { 0 } else { bytes + ALIGN }
}

/// Builds the [`Work`] of one operation.
pub(super) struct Call<'a, L: Launcher> {
    launcher: &'a L,
    work: Work,
    scratch: Option<(u64, u64)>,
}

impl<'a, L: Launcher> Call<'a, L> {
    /// Nothing yet, of operation `op`.
    pub fn new(launcher: &'a L, op: &'static str) -> Self {
        let work = Work { op, launches: Vec::new(), reads: Vec::new(), writes: Vec::new(), fault: None };
        Call { launcher, work, scratch: None }
    }

    /// Declares an operand that is read.
    pub fn read(&mut self, view: &View) -> Result<Address> {
        self.work.reads.push(view.clone());
        self.launcher.address(self.work.op, view)
    }

    /// Declares an operand that is written, and perhaps read.
    pub fn write(&mut self, view: &ViewMut) -> Result<Address> {
        self.work.writes.push(view.clone());
        self.launcher.address(self.work.op, view)
    }

    /// As [`Call::write`], of an operand that may be left out: then 0.
    pub fn write_some(&mut self, view: Option<&ViewMut>) -> Result<Address> {
        view.map_or(Ok(Address(0)), |v| self.write(v))
    }

    /// As [`Call::read`], of an operand that may be left out: then 0.
    pub fn read_some(&mut self, view: Option<&View>) -> Result<Address> {
        view.map_or(Ok(Address(0)), |v| self.read(v))
    }

    /// Declares the workspace, before [`Call::part`] cuts it.
    pub fn workspace(&mut self, view: &ViewMut) -> Result<()> {
        if view.elems() > 0 {
            let start = self.write(view)?.0;
            self.scratch = Some((start.next_multiple_of(ALIGN as u64), start + view.bytes() as u64));
        }
        Ok(())
    }

    /// The next `bytes` of the workspace, aligned. Its size was checked, by [`workspace_of`] of the same parts.
    pub fn part(&mut self, bytes: usize) -> Result<Address> {
        let size = bytes.next_multiple_of(ALIGN) as u64;
        match &mut self.scratch {
            _ if bytes == 0 => Ok(Address(0)),
            Some((next, end)) if *next + size <= *end => {
                *next += size;
                Ok(Address(*next - size))
            }
            _ => Err(Error::Shape { op: self.work.op, what: format!("{bytes} more bytes of workspace are needed than were planned") }),
        }
    }

    /// Adds a launch; an empty grid is left out.
    pub fn launch<P: Pod>(&mut self, kernel: &'static str, grid: [usize; 3], threads: u32, shared_bytes: usize, params: &P) -> Result<()> {
        self.push(kernel, grid, threads, shared_bytes, params)?;
        Ok(())
    }

    /// As [`Call::launch`], of a kernel whose parameters begin with the address of the fault cell.
    pub fn launch_with_fault<P: Pod>(
        &mut self,
        kernel: &'static str,
        grid: [usize; 3],
        threads: u32,
        params: &P,
        fault: Fault,
    ) -> Result<()> {
        if let Some(launch) = self.push(kernel, grid, threads, 0, params)? {
            launch.fault_at = Some(0);
            self.work.fault = Some(fault);
        }
        Ok(())
    }

    /// As [`Call::launch`], of a kernel whose parameters begin with the address of `data`.
    pub fn launch_with_data<P: Pod>(
        &mut self,
        kernel: &'static str,
        grid: [usize; 3],
        threads: u32,
        params: &P,
        data: &[u64],
    ) -> Result<()> {
        if let Some(launch) = self.push(kernel, grid, threads, 0, params)? {
            launch.data = Some((0, bytemuck::cast_slice(data).to_vec()));
        }
        Ok(())
    }

    /// As [`Call::launch`], of a kernel that computes `dense` and nothing else.
    pub fn launch_dense<P: Pod>(
        &mut self,
        kernel: &'static str,
        grid: [usize; 3],
        threads: u32,
        shared_bytes: usize,
        params: &P,
        dense: Dense,
    ) -> Result<()> {
        if let Some(launch) = self.push(kernel, grid, threads, shared_bytes, params)? {
            launch.dense = Some(dense);
        }
        Ok(())
    }

    fn push<P: Pod>(
        &mut self,
        kernel: &'static str,
        grid: [usize; 3],
        threads: u32,
        shared: usize,
        params: &P,
    ) -> Result<Option<&mut Launch>> {
        if grid.contains(&0) {
            return Ok(None);
        }
        // The limits of both vendors: 2^31 - 1 blocks along x, 65,535 along the others.
        if grid[0] > i32::MAX as usize || grid[1] > 65_535 || grid[2] > 65_535 || shared > self.launcher.arch().shared_bytes as usize {
            let what =
                format!("{kernel}: a grid of {grid:?} with {shared} bytes of shared memory is more than {} has", self.launcher.arch().name);
            return Err(Error::Shape { op: self.work.op, what });
        }
        let grid = grid.map(|n| n as u32);
        let params = bytemuck::bytes_of(params).to_vec();
        self.work.launches.push(Launch {
            kernel,
            grid,
            threads,
            shared_bytes: shared as u32,
            params,
            fault_at: None,
            data: None,
            dense: None,
        });
        Ok(self.work.launches.last_mut())
    }

    /// Enqueues what was built.
    pub fn run(self, s: &dyn Stream) -> Result<()> {
        self.launcher.run(self.work, s)
    }
}

/// The one of two entry points that is for this storage type.
pub(super) fn by_type(dtype: DType, f32: &'static str, bf16: &'static str) -> &'static str {
    if dtype == DType::BF16 { bf16 } else { f32 }
}

/// A number as the kernels' `i32`.
pub(super) fn int(op: &'static str, name: &str, n: usize) -> Result<i32> {
    i32::try_from(n).map_err(|_| Error::Shape { op, what: format!("{name} is {n}, kernels count it in i32") })
}

/// Whether all of these are multiples of 16: addresses and bytes of rows that are read 16 bytes at a time.
pub(super) fn whole_16(numbers: &[u64]) -> bool {
    numbers.iter().all(|n| n % 16 == 0)
}
