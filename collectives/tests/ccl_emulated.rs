//! The communicator of GPUs as the product runs it, on emulated GPUs of both vendors: ranks as processes, the library loaded by its path,
//! every collective against its definition, and every fault of a rank as a named error.

use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use zrt_collectives::ccl::{CopyOptions, CopyWhen, GpuMemory};
use zrt_collectives::{CclComm, CclOptions, Communicator, Counts, Error, Health, Secret, ServerOptions, TcpStore, TcpStoreServer};
use zrt_kernels::cpu::Mode;
use zrt_kernels::gpu::driver::{Libraries, Vendor, find};
use zrt_kernels::gpu::{CodeOptions, GpuDevice, GpuOptions};
use zrt_kernels::{Category, DType, Device, Place, Stream, View, ViewMut};

/// Far more than anything needs; a test that takes this long has hung.
const LONG: Duration = Duration::from_secs(120);
/// A fault is an error by then; a silent rank's is known `SILENT` later.
const SOON: Duration = Duration::from_secs(5);
const SILENT: Duration = Duration::from_secs(3);
/// Processes start within this time on any machine.
const INIT: Duration = Duration::from_secs(20);

/// What a child process was told.
struct Told {
    case: String,
    rank: usize,
    ranks: usize,
    vendor: Vendor,
    store: Arc<TcpStore>,
}

/// Runs `case` in a process per rank, which is this test's program again; returns whether each passed, and what it printed.
fn processes(case: &str, vendor: Vendor, ranks: usize, settings: &str) -> Vec<(bool, String)> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("job");
    let server = TcpStoreServer::start(Secret::create(&file).unwrap(), ServerOptions::default()).unwrap();
    let spawn = |rank: usize| {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child_rank", "--ignored", "--nocapture", "--test-threads", "1"])
            .env("ZRT_TEST_CASE", case)
            .env("ZRT_TEST_VENDOR", vendor.kind())
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", ranks.to_string())
            .env("MASTER_PORT", server.address().port().to_string())
            .env("ZLAUNCH_JOB", &file)
            .env(zrt_driver::VARIABLE, format!("devices={ranks};memory=256MiB;{settings}"))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let children: Vec<Child> = (0..ranks).map(spawn).collect();
    let end = |(rank, mut child): (usize, Child)| {
        if case == "stops" && rank == 1 {
            // It does not end by itself.
            child.kill().unwrap();
        }
        let out = child.wait_with_output().unwrap();
        (out.status.success(), format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr)))
    };
    children.into_iter().enumerate().map(end).collect()
}

fn told() -> Option<Told> {
    let case = std::env::var("ZRT_TEST_CASE").ok()?;
    let number = |name: &str| std::env::var(name).unwrap().parse::<usize>().unwrap();
    let secret = Secret::read(std::env::var("ZLAUNCH_JOB").unwrap().as_ref()).unwrap();
    let address = ([127, 0, 0, 1], number("MASTER_PORT") as u16).into();
    let store = Arc::new(TcpStore::connect(address, secret, LONG).unwrap());
    let vendor = Vendor::ALL.into_iter().find(|v| std::env::var("ZRT_TEST_VENDOR").is_ok_and(|kind| kind == v.kind())).unwrap();
    Some(Told { case, rank: number("RANK"), ranks: number("WORLD_SIZE"), vendor, store })
}

/// A rank's device, a stream of it, and its communicator.
struct Rank {
    comm: CclComm,
    stream: Arc<dyn Stream>,
    device: Arc<GpuDevice>,
}

fn join(told: &Told, options: CclOptions) -> zrt_collectives::Result<Rank> {
    let path = Some(zrt_driver::library().unwrap());
    let libraries = Libraries { driver: path.clone(), compiler: path.clone(), blas: None, collectives: path.clone() };
    let found = find(told.vendor, &libraries)?.expect("emulated devices");
    let code = CodeOptions { folder: None, libraries };
    let options_of_device = GpuOptions { ordinal: told.rank, mode: Mode::Threaded, trace: false, host_threads: 1, code };
    let device = GpuDevice::open(found, options_of_device)?;
    let stream = device.stream("comm")?;
    let options = CclOptions { library: path, scratch_bytes: 0, ..options };
    let comm = CclComm::join(told.store.clone(), told.rank, told.ranks, device.clone(), options)?;
    Ok(Rank { comm, stream, device })
}

impl Rank {
    fn zeros(&self, dtype: DType, elems: usize) -> ViewMut {
        self.device.alloc("test", elems * dtype.bytes(), Place::Device, Category::Workspace).unwrap().view_mut(dtype, 0, elems).unwrap()
    }

    fn with(&self, values: &[f32]) -> ViewMut {
        let view = self.zeros(DType::F32, values.len());
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let source = Box::new(move |to: &mut [u8]| {
            to.copy_from_slice(&bytes);
            Ok(())
        });
        self.stream.write(&view, "test", source).unwrap();
        view
    }

    fn read(&self, view: &View) -> Vec<f32> {
        self.stream.read(view).unwrap().f32s(LONG).unwrap()
    }

    /// Waits until the group is lost, and says why and after how long.
    fn lost(&self) -> (Error, Duration) {
        let begun = Instant::now();
        loop {
            if let Health::Lost(error) = self.comm.health() {
                return (error, begun.elapsed());
            }
            assert!(begun.elapsed() < LONG, "rank {} waits for ever", self.comm.rank());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Spread over magnitudes, so that another order of summing gives other bits.
fn value(rank: usize, index: usize) -> f32 {
    let x = (rank as u32 + 1).wrapping_mul(2654435761).wrapping_add((index as u32).wrapping_mul(40503)) ^ 0x5bd1e995;
    (x as f32 - 2e9) * f32::powi(2.0, (x % 20) as i32 - 30)
}

fn tree(mut level: Vec<f32>) -> f32 {
    while level.len() > 1 {
        level = level.chunks(2).map(|pair| if let [a, b] = pair { a + b } else { pair[0] }).collect();
    }
    level[0]
}

/// Sums in the order of the tree, and all that moves.
fn every_collective(told: &Told) {
    let mut rank = join(told, CclOptions::new(told.vendor)).unwrap();
    if told.case == "copies" {
        // Several rounds, and slots are used again.
        let options = CopyOptions { when: CopyWhen::Possible, slot_bytes: 8192, least_bytes: 1000 };
        let memory = GpuMemory::of(rank.device.clone()).unwrap();
        assert!(rank.comm.use_copies(&*told.store, &memory, &options).unwrap());
    }
    let (comm, s, n, me) = (&rank.comm, &*rank.stream, told.ranks, told.rank);
    for part in [3, 1000, 20_000] {
        let whole = part * n;
        let values = |r: usize| (0..whole).map(|i| value(r, i)).collect::<Vec<f32>>();
        let sums: Vec<f32> = (0..whole).map(|i| tree((0..n).map(|r| value(r, i)).collect())).collect();
        let (src, dst) = (rank.with(&values(me)), rank.zeros(DType::F32, part));
        comm.reduce_scatter(&dst, &src, "sums", s).unwrap();
        assert_eq!(rank.read(&dst), sums[me * part..(me + 1) * part]);
        comm.all_reduce(&src, "sums", s).unwrap();
        assert_eq!(rank.read(&src), sums);

        let all = rank.zeros(DType::F32, whole);
        comm.all_gather(&all, &rank.with(&values(me)[..part]), "parts", s).unwrap();
        assert_eq!(rank.read(&all), (0..n).flat_map(|r| values(r)[..part].to_vec()).collect::<Vec<_>>());

        let swapped: Vec<f32> = (0..n).flat_map(|r| values(r)[me * part..(me + 1) * part].to_vec()).collect();
        let data = rank.with(&values(me));
        comm.all_to_all(&all, &data, "apart", s).unwrap();
        assert_eq!(rank.read(&all), swapped);
        comm.all_to_all(&data, &data, "in place", s).unwrap();
        assert_eq!(rank.read(&data), swapped);

        comm.broadcast(&all, n - 1, "root", s).unwrap();
        let last = n - 1;
        let theirs: Vec<f32> = (0..n).flat_map(|r| values(r)[last * part..(last + 1) * part].to_vec()).collect();
        assert_eq!(rank.read(&all), theirs);
        comm.barrier("end", s).unwrap();
    }
    s.sync().unwrap();
    assert_eq!(comm.health(), Health::Good);
    let Counts { all_gather: 3, reduce_scatter: 3, all_reduce: 3, all_to_all: 6, broadcast: 3, barrier: 3, .. } = comm.counts() else {
        panic!("{:?}", comm.counts())
    };
}

/// Sums until the group is lost, and prints why.
fn until_lost(told: &Told) {
    // Each kind of silence is found by its own deadline; the other one is far off.
    let by_heartbeat = ["stops", "stalls"].contains(&told.case.as_str());
    let (train_timeout, heartbeat_timeout) = if by_heartbeat { (LONG, SILENT) } else { (SILENT, LONG) };
    let init_timeout = if told.case == "joins" { SOON } else { INIT };
    let options = CclOptions { init_timeout, train_timeout, heartbeat_timeout, ..CclOptions::new(told.vendor) };
    let rank = match join(told, options) {
        Ok(rank) => rank,
        Err(error) => return println!("LOST {error}"),
    };
    let data = rank.zeros(DType::F32, 1000);
    for step in 0..20 {
        let tag = if told.case == "another" && told.rank == 1 && step == 5 { "other".to_string() } else { format!("step {step}") };
        if told.case == "stops" && told.rank == 1 && step == 5 {
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::STOP).unwrap();
        }
        let summed = |rank: &Rank| -> Result<Vec<f32>, Box<dyn std::error::Error>> {
            rank.stream.fill(&data, 1.0)?;
            rank.comm.all_reduce(&data, &tag, &*rank.stream)?;
            Ok(rank.stream.read(&data)?.f32s(LONG)?)
        };
        let read = summed(&rank);
        // What a lost peer left unwritten is not taken for a sum.
        match (read, rank.comm.health()) {
            (Ok(read), Health::Good) => assert_eq!(read, [told.ranks as f32; 1000], "step {step}"),
            _ => break,
        }
    }
    let (error, after) = rank.lost();
    assert!(after < SOON + SILENT, "{after:?}: {error}");
    println!("LOST {error}");
}

#[test]
#[ignore = "the body of a rank"]
fn child_rank() {
    let Some(told) = told() else { return };
    match &told.case[..] {
        "every" | "copies" => every_collective(&told),
        _ => until_lost(&told),
    }
}

fn pass(case: &str, vendor: Vendor, ranks: usize, settings: &str) {
    for (rank, (passed, printed)) in processes(case, vendor, ranks, settings).into_iter().enumerate() {
        assert!(passed, "rank {rank} of {ranks}, {settings}: {printed}");
    }
}

#[test]
fn every_collective_equals_its_definition() {
    for vendor in Vendor::ALL {
        // The order in which the library adds, and how it answers, do not matter.
        pass("every", vendor, 2, "reduce_seed=7");
        pass("every", vendor, 3, "reduce_seed=8;in_progress=1;jitter=5");
    }
    pass("every", Vendor::Amd, 4, "reduce_seed=9");
}

#[test]
fn gathers_by_copies_equal_their_definition() {
    pass("copies", Vendor::Amd, 2, "jitter=3");
    pass("copies", Vendor::Nvidia, 3, "jitter=4");
}

/// What each rank that lived reports when the group is lost.
fn losses(case: &str, settings: &str) -> Vec<(usize, String)> {
    let ended = processes(case, Vendor::Amd, 2, settings).into_iter().enumerate();
    let loss = |(rank, (passed, printed)): (usize, (bool, String))| {
        let said = printed.lines().find_map(|line| line.split_once("LOST ")).map(|(_, text)| text.to_string());
        assert!(passed || said.is_none(), "rank {rank}: {printed}");
        said.map(|text| (rank, text))
    };
    ended.filter_map(loss).collect()
}

#[test]
fn a_rank_that_dies_is_named() {
    for settings in ["fault=dead:1:8", "fault=dead:1:8;dead_peer=hang", "fault=dead:1:0"] {
        let losses = losses("faults", settings);
        let [(0, error)] = &losses[..] else { panic!("{settings}: {losses:?}") };
        assert!(error.contains("waited") && error.contains("rank 1") && error.contains("is gone"), "{settings}: {error}");
    }
}

#[test]
fn a_rank_that_is_stopped_is_named() {
    let losses = losses("stops", "");
    let [(0, error)] = &losses[..] else { panic!("{losses:?}") };
    assert!(error.contains("for rank 1 (no heartbeat for") && error.contains("is stopped"), "{error}");
}

#[test]
fn different_collectives_are_named() {
    let losses = losses("another", "");
    assert_eq!(losses.len(), 2, "{losses:?}");
    for (_, error) in losses {
        assert!(error.contains("'step 5'") && error.contains("'other'"), "{error}");
    }
}

#[test]
fn a_collective_that_does_not_end_is_named() {
    // One that takes part in nothing, and one whose library does something else than it was asked for.
    // Found by how long a rank may be late, and, once all ranks have come to it, by the shorter time that the library may take.
    for (case, settings) in [("faults", "fault=silent:1:8"), ("faults", "fault=mismatch:1:8"), ("stalls", "fault=silent:1:8")] {
        let losses = losses(case, settings);
        assert_eq!(losses.len(), 2, "{case} {settings}: {losses:?}");
        for (_, error) in losses {
            assert!(error.contains("all_reduce f32[1000] 'step 7'") && error.contains("waited"), "{settings}: {error}");
        }
    }
}

#[test]
fn a_rank_that_never_joins_ends_init() {
    let losses = losses("joins", "fault=silent:1:0");
    assert_eq!(losses.len(), 2, "{losses:?}");
    for (_, error) in losses {
        assert!(error.contains("init") && error.contains("deadline"), "{error}");
    }
}

#[test]
fn an_unknown_result_is_an_error_with_its_number() {
    let losses = losses("faults", "fault=call:ncclAllReduce:5:12345@1");
    assert_eq!(losses.len(), 2, "{losses:?}");
    for (_, error) in losses {
        assert!(error.contains("ncclAllReduce returned 12345 (unknown result code)"), "{error}");
    }
}

#[test]
fn a_slow_rank_is_no_fault() {
    pass("every", Vendor::Nvidia, 2, "fault=slow:1:20");
}
