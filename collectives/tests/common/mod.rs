//! What the tests share: memory and streams of the CPU device, ranks as threads or as processes, and the body that
//! compares every collective with its definition, one element at a time.
#![allow(dead_code)]

use half::bf16;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use zrt_collectives::{Communicator, LocalComm, LocalGroup, LocalOptions, Secret, ServerOptions, TcpStore, TcpStoreServer};
use zrt_kernels::cpu::{CpuDevice, CpuOptions, Mode};
use zrt_kernels::{Buffer, Category, DType, Device, Place, Stream, View, ViewMut};

/// Far more than anything needs; a test that takes this long has hung.
pub const LONG: Duration = Duration::from_secs(120);

/// A CPU device with one thread.
pub fn device(mode: Mode) -> Arc<CpuDevice> {
    CpuDevice::new(CpuOptions { threads: 1, mode, ..CpuOptions::default() }).unwrap()
}

/// A stream that runs every task at once.
pub fn inline() -> Arc<dyn Stream> {
    device(Mode::Inline).stream("inline").unwrap()
}

/// Zeroed memory of `bytes`.
pub fn buffer(bytes: usize) -> Buffer {
    static DEVICE: OnceLock<Arc<CpuDevice>> = OnceLock::new();
    let device = DEVICE.get_or_init(|| device(Mode::Inline));
    device.alloc("test", bytes, Place::Device, Category::Workspace).unwrap()
}

/// An element as its 32 bits, so that one body serves all types.
pub type Bits = u32;

/// The value of `rank` at `index`: spread over magnitudes, so that another order of summing gives other bits.
pub fn value(dtype: DType, rank: usize, index: usize, salt: usize) -> Bits {
    let x = (rank as u32 + 1).wrapping_mul(2654435761).wrapping_add((index as u32 + salt as u32).wrapping_mul(40503)) ^ 0x5bd1e995;
    let x = (x ^ (x >> 15)).wrapping_mul(0x2c1b3c6d);
    let float = (x as f32 - 2e9) * f32::powi(2.0, (x % 20) as i32 - 30);
    match dtype {
        DType::F32 => float.to_bits(),
        DType::BF16 => bf16::from_f32(float).to_bits() as u32,
        DType::I32 => x,
        DType::U8 => x & 0xff,
    }
}

/// The tree sum of one element over ranks, level by level as the trait defines it.
pub fn tree_sum(dtype: DType, values: &[Bits]) -> Bits {
    fn tree<T: Copy>(mut level: Vec<T>, add: fn(T, T) -> T) -> T {
        while level.len() > 1 {
            level = level.chunks(2).map(|p| if p.len() == 2 { add(p[0], p[1]) } else { p[0] }).collect();
        }
        level[0]
    }
    let values = values.iter().copied();
    match dtype {
        DType::F32 => tree(values.map(f32::from_bits).collect(), |a, b| a + b).to_bits(),
        DType::BF16 => bf16::from_f32(tree(values.map(|v| bf16::from_bits(v as u16).to_f32()).collect(), |a, b| a + b)).to_bits() as u32,
        DType::I32 => tree(values.map(|v| v as i32).collect(), i32::wrapping_add) as u32,
        DType::U8 => unreachable!("u8 has no sum"),
    }
}

pub fn put(view: &ViewMut, values: impl Iterator<Item = Bits>) {
    // SAFETY: tests call this while nothing that uses the view is enqueued.
    unsafe {
        match view.dtype() {
            DType::F32 | DType::I32 => view.as_mut_slice::<u32>().unwrap().iter_mut().zip(values).for_each(|(o, v)| *o = v),
            DType::BF16 => view.as_mut_slice::<u16>().unwrap().iter_mut().zip(values).for_each(|(o, v)| *o = v as u16),
            DType::U8 => view.as_mut_slice::<u8>().unwrap().iter_mut().zip(values).for_each(|(o, v)| *o = v as u8),
        }
    }
}

pub fn get(view: &View) -> Vec<Bits> {
    // SAFETY: as in `put`.
    unsafe {
        match view.dtype() {
            DType::F32 | DType::I32 => view.as_slice::<u32>().unwrap().to_vec(),
            DType::BF16 => view.as_slice::<u16>().unwrap().iter().map(|v| *v as u32).collect(),
            DType::U8 => view.as_slice::<u8>().unwrap().iter().map(|v| *v as u32).collect(),
        }
    }
}

/// New memory of `elems` elements with `values`.
pub fn filled(dtype: DType, elems: usize, values: impl Iterator<Item = Bits>) -> ViewMut {
    let view = buffer(elems * dtype.bytes()).view_mut(dtype, 0, elems).unwrap();
    put(&view, values);
    view
}

/// Runs all collectives on parts of `part` elements and compares every element with the definition.
pub fn compare_all(comm: &dyn Communicator, s: &dyn Stream, dtype: DType, part: usize) {
    let (rank, ranks) = (comm.rank(), comm.ranks());
    let whole = part * ranks;
    let at = |r: usize, salt: usize| move |i: usize| value(dtype, r, i, salt);
    let note = format!("rank {rank} of {ranks}, {dtype}[{part}]");

    let gathered: Vec<Bits> = (0..ranks).flat_map(|r| (0..part).map(at(r, 1))).collect();
    let dst = filled(dtype, whole, std::iter::empty());
    comm.all_gather(&dst, &filled(dtype, part, (0..part).map(at(rank, 1))), "apart", s).unwrap();
    s.sync().unwrap();
    assert_eq!(get(&dst), gathered, "all_gather: {note}");

    let dst = filled(dtype, whole, std::iter::empty());
    let own = dst.slice(rank * part, part).unwrap();
    put(&own, (0..part).map(at(rank, 1)));
    comm.all_gather(&dst, &own, "in place", s).unwrap();
    s.sync().unwrap();
    assert_eq!(get(&dst), gathered, "all_gather in place: {note}");

    let parts: Vec<Bits> = (0..ranks).flat_map(|r| (0..part).map(move |i| value(dtype, r, rank * part + i, 2))).collect();
    let dst = filled(dtype, whole, std::iter::empty());
    comm.all_to_all(&dst, &filled(dtype, whole, (0..whole).map(at(rank, 2))), "apart", s).unwrap();
    s.sync().unwrap();
    assert_eq!(get(&dst), parts, "all_to_all: {note}");
    let data = filled(dtype, whole, (0..whole).map(at(rank, 2)));
    comm.all_to_all(&data, &data, "in place", s).unwrap();
    s.sync().unwrap();
    assert_eq!(get(&data), parts, "all_to_all in place: {note}");

    for root in [0, ranks - 1] {
        let data = filled(dtype, part, (0..part).map(at(rank, 3)));
        comm.broadcast(&data, root, "from root", s).unwrap();
        s.sync().unwrap();
        assert_eq!(get(&data), (0..part).map(at(root, 3)).collect::<Vec<_>>(), "broadcast from {root}: {note}");
    }
    comm.barrier("meet", s).unwrap();
    if dtype == DType::U8 {
        let data = filled(dtype, part, std::iter::empty());
        assert!(comm.all_reduce(&data, "u8", s).unwrap_err().to_string().contains("u8 has no sum"));
        return;
    }

    let sums: Vec<Bits> = (0..whole).map(|i| tree_sum(dtype, &(0..ranks).map(|r| value(dtype, r, i, 4)).collect::<Vec<_>>())).collect();
    let mine = &sums[rank * part..(rank + 1) * part];
    let dst = filled(dtype, part, std::iter::empty());
    let src = filled(dtype, whole, (0..whole).map(at(rank, 4)));
    comm.reduce_scatter(&dst, &src, "apart", s).unwrap();
    s.sync().unwrap();
    assert_eq!(get(&dst), mine, "reduce_scatter: {note}");
    assert_eq!(get(&src), (0..whole).map(at(rank, 4)).collect::<Vec<_>>(), "reduce_scatter keeps its source: {note}");
    let own = src.slice(rank * part, part).unwrap();
    comm.reduce_scatter(&own, &src, "in place", s).unwrap();
    s.sync().unwrap();
    assert_eq!(get(&own), mine, "reduce_scatter in place: {note}");

    // Also a length that ranks do not divide.
    for elems in [whole, whole + 1] {
        let sums: Vec<Bits> = (0..elems).map(|i| tree_sum(dtype, &(0..ranks).map(|r| value(dtype, r, i, 4)).collect::<Vec<_>>())).collect();
        let data = filled(dtype, elems, (0..elems).map(at(rank, 4)));
        comm.all_reduce(&data, "sum", s).unwrap();
        s.sync().unwrap();
        assert_eq!(get(&data), sums, "all_reduce of {elems}: {note}");
    }
}

/// Runs `body` for every rank on its own thread.
pub fn threads(ranks: usize, options: LocalOptions, body: impl Fn(Arc<LocalComm>) + Sync) {
    let comms = LocalGroup::threads(ranks, options).unwrap();
    std::thread::scope(|scope| {
        let body = &body;
        let handles: Vec<_> = comms.into_iter().map(|comm| scope.spawn(move || body(comm))).collect();
        handles.into_iter().for_each(|h| h.join().unwrap());
    });
}

/// Ranks as processes: this test binary again, told by its environment to run its hidden test `child_rank`.
pub struct Processes {
    pub server: TcpStoreServer,
    pub children: Vec<Child>,
    _folder: tempfile::TempDir,
}

impl Processes {
    pub fn start(case: &str, ranks: usize) -> Processes {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("job");
        let server = TcpStoreServer::start(Secret::create(&file).unwrap(), ServerOptions::default()).unwrap();
        let spawn = |rank: usize| {
            Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "child_rank", "--ignored", "--nocapture", "--test-threads", "1"])
                .env("ZRT_TEST_CASE", case)
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", ranks.to_string())
                .env("MASTER_PORT", server.address().port().to_string())
                .env("ZLAUNCH_JOB", &file)
                .stdout(Stdio::null())
                .spawn()
                .unwrap()
        };
        let children = (0..ranks).map(spawn).collect();
        Processes { server, children, _folder: folder }
    }

    /// Waits for all; each must have passed.
    pub fn pass(mut self) {
        for (rank, child) in self.children.iter_mut().enumerate() {
            assert!(child.wait().unwrap().success(), "rank {rank} failed; its message is above");
        }
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// What a child was told: (case, rank, ranks, store); `None` when nobody told it anything.
pub fn told() -> Option<(String, usize, usize, TcpStore)> {
    let case = std::env::var("ZRT_TEST_CASE").ok()?;
    let number = |name: &str| std::env::var(name).unwrap().parse::<usize>().unwrap();
    let secret = Secret::read(std::env::var("ZLAUNCH_JOB").unwrap().as_ref()).unwrap();
    let address = ([127, 0, 0, 1], number("MASTER_PORT") as u16).into();
    let store = TcpStore::connect(address, secret, LONG).unwrap();
    Some((case, number("RANK"), number("WORLD_SIZE"), store))
}
