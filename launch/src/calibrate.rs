//! `zlaunch calibrate`: measures this machine in about a minute and writes a file of the hardware catalogue, so that plans and studies
//! of runs on it rest on its own figures.
//!
//! Every operation of a training step is called in the sizes of a small and of a larger model ([`zrt_kernels::rate::drill`]), once by one
//! rank on all cores and once by a rank on each core, since runs are of both kinds: the file has the rates of the whole processor,
//! the mean of the two. A rate is fitted to several sizes as `overhead + work / rate`.

use crate::fault::Fault;
use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;
use zrt::cost::catalogue::user_folder;
use zrt::cost::sheet::{
    AttentionRates, CollectivePoint, Graph, Host, Links, Machine, Matmul, MatmulForm, MatmulPoint, Nvme, OpRate, Overlap, Part, PartKind,
    PartMemory, Sheet, op_key,
};
use zrt::cost::{How, Number};
use zrt_collectives::bench::{Size, measure_on_threads};
use zrt_kernels::rate::{self, Bench, Sizes, Updates, drill};
use zrt_kernels::{DType, Device};

/// `zlaunch calibrate`
#[derive(Debug, clap::Args)]
pub struct CalibrateArgs {
    /// The file to write [default: local.toml in the user's hardware folder, which plans of this machine read]
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Name of the machine and of its part; `local` is this machine to `plan` and `scale`
    #[arg(long, default_value = "local")]
    pub name: String,
    /// Tiny sizes: a file of the right form in a second, whose figures mean little
    #[arg(long, hide = true)]
    pub quick: bool,
}

/// One call of an operation by the whole processor.
#[derive(Clone, Debug)]
struct Sample {
    op: &'static str,
    dtype: DType,
    shape: [usize; 3],
    flops: f64,
    bytes: f64,
    secs: f64,
    /// Of which by one rank on all cores, and by as many ranks as cores.
    ways: [f64; 2],
}

/// What is measured, at which sizes.
struct Effort {
    sizes: Vec<Sizes>,
    budget: Duration,
    adam_params: usize,
    collective_bytes: Vec<usize>,
    file_bytes: usize,
}

impl Effort {
    fn new(quick: bool) -> Effort {
        let small = |tokens, documents| Sizes {
            tokens,
            documents,
            hidden: 576,
            heads: 9,
            kv_heads: 3,
            head_dim: 64,
            mlp: 1536,
            vocab: 49_152,
            rank: 16,
            dtype: DType::BF16,
        };
        let large = Sizes { hidden: 2048, heads: 32, kv_heads: 8, mlp: 8192, vocab: 32_000, ..small(256, 1) };
        if quick {
            let tiny = |tokens| Sizes { hidden: 32, heads: 2, kv_heads: 1, head_dim: 16, mlp: 64, vocab: 128, rank: 4, ..small(tokens, 1) };
            let sizes = vec![tiny(8), tiny(32)];
            return Effort { sizes, budget: Duration::ZERO, adam_params: 5000, collective_bytes: vec![64, 1 << 14], file_bytes: 1 << 16 };
        }
        Effort {
            sizes: vec![small(256, 1), small(1024, 2), large],
            budget: Duration::from_millis(1500),
            adam_params: 16 << 20,
            collective_bytes: vec![256, 16 << 10, 256 << 10, 4 << 20, 64 << 20],
            file_bytes: 256 << 20,
        }
    }
}

/// Measures, writes the file, and says what was found.
pub fn run(args: &CalibrateArgs) -> Result<u8, Fault> {
    let path = match (&args.out, user_folder()) {
        (Some(out), _) => out.clone(),
        (None, Some(folder)) => folder.join(format!("{}.toml", args.name)),
        (None, None) => return Err(Fault::user("no HOME to keep the file in: give --out FILE")),
    };
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // Before a minute is spent.
    std::fs::create_dir_all(parent).map_err(|e| Fault::user(format!("{}: {e}", parent.display())))?;
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let effort = Effort::new(args.quick);
    eprintln!("measuring {cores} core{}: other work on this machine makes the figures too low", if cores == 1 { "" } else { "s" });
    let samples = samples(&effort, cores)?;
    let sheet = sheet(&args.name, &effort, cores, &samples, parent)?;
    let text = sheet.to_toml()?;
    // What cannot be read back is not worth keeping.
    Sheet::parse(&text, &path.display().to_string())?;
    let mut file = tempfile::NamedTempFile::new_in(parent).map_err(|e| Fault::user(format!("{}: {e}", parent.display())))?;
    file.write_all(text.as_bytes()).map_err(|e| Fault::other(format!("{}: {e}", path.display())))?;
    file.persist(&path).map_err(|e| Fault::other(format!("{}: {}", path.display(), e.error)))?;
    crate::print(summary(&sheet, &path))
}

/// Every operation in both types, by one rank on all cores and by a rank on each.
fn samples(effort: &Effort, cores: usize) -> Result<Vec<Sample>, Fault> {
    let mut samples = Vec::new();
    for sizes in &effort.sizes {
        for dtype in [DType::BF16, DType::F32] {
            let sizes = Sizes { dtype, ..*sizes };
            let whole = drill(sizes, 1, cores, effort.budget)?;
            let each = if cores > 1 { drill(sizes, cores, 1, effort.budget)? } else { whole.clone() };
            samples.extend(whole.into_iter().zip(each).map(|(w, e)| Sample {
                op: w.op,
                dtype,
                shape: w.shape,
                flops: w.flops,
                bytes: w.bytes,
                // As many calls as ranks in the time of one.
                secs: (w.secs + e.secs / cores as f64) / 2.0,
                ways: [w.secs, e.secs / cores as f64],
            }));
        }
    }
    Ok(samples)
}

/// `secs = overhead + work / rate` through points of several sizes: least squares of relative errors, no overhead below zero.
/// Returns (overhead, rate, mean relative error).
fn fit(points: &[(f64, f64)]) -> Option<(f64, f64, f64)> {
    let points: Vec<(f64, f64)> = points.iter().copied().filter(|(work, secs)| *work > 0.0 && *secs > 0.0).collect();
    if points.is_empty() {
        return None;
    }
    // Divided by secs, both sides: 1 = overhead / secs + (work / secs) / rate.
    let (mut aa, mut ab, mut bb, mut a1, mut b1) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for (work, secs) in &points {
        let (a, b) = (1.0 / secs, work / secs);
        (aa, ab, bb, a1, b1) = (aa + a * a, ab + a * b, bb + b * b, a1 + a, b1 + b);
    }
    let det = aa * bb - ab * ab;
    let (overhead, per_work) = ((a1 * bb - b1 * ab) / det, (b1 * aa - a1 * ab) / det);
    let (overhead, per_work) =
        if det > 1e-9 * aa * bb && overhead >= 0.0 && per_work > 0.0 { (overhead, per_work) } else { (0.0, b1 / bb) };
    let error = points.iter().map(|(work, secs)| ((overhead + work * per_work) / secs - 1.0).abs()).sum::<f64>() / points.len() as f64;
    Some((overhead, 1.0 / per_work, error))
}

fn today() -> String {
    let secs = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs());
    // Civil date of a day number (Howard Hinnant's algorithm, proleptic Gregorian).
    let z = (secs / 86_400) as i64 + 719_468;
    let (era, doe) = (z / 146_097, z % 146_097);
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let month = if mp < 10 { mp + 3 } else { mp - 9 };
    format!("{:04}-{month:02}-{:02}", yoe + era * 400 + i64::from(month <= 2), doy - (153 * mp + 2) / 5 + 1)
}

fn sheet(name: &str, effort: &Effort, cores: usize, samples: &[Sample], folder: &Path) -> Result<Sheet, Fault> {
    let source = format!("zlaunch calibrate, {}", today());
    let number = |value: f64| Number::new(value, How::Measured, source.clone());
    let bench = Bench::new(cores)?;
    let updates = bench.updates(effort.adam_params, 7)?;
    let device = zrt_kernels::cpu::CpuDevice::new(zrt_kernels::cpu::CpuOptions {
        threads: 1,
        mode: zrt_kernels::cpu::Mode::Inline,
        ..zrt_kernels::cpu::CpuOptions::default()
    })?;
    let memory_bytes = device.info().memory_bytes as f64;
    let bandwidth = 28.0 * effort.adam_params as f64 / updates.plain_limit;
    let ops = op_rates(samples, &updates, effort.adam_params, &number);
    let streaming: Vec<f64> = ["add_into", "cast", "copy", "rmsnorm", "swiglu"]
        .iter()
        .filter_map(|op| ops.get(*op)?.bytes_per_s.as_ref().map(|n| n.value / bandwidth))
        .collect();
    let efficiency = streaming.iter().sum::<f64>() / streaming.len().max(1) as f64;
    let mut matmul = BTreeMap::new();
    for dtype in [DType::BF16, DType::F32] {
        matmul.insert(dtype.name().to_string(), products(samples, dtype, bench.peak_flops(dtype), &number));
    }
    let ceiling = matmul.get(DType::BF16.name()).map_or(1.0, |m| m.ceiling.value);
    let share = |op: &str| ops.get(op).and_then(|r| r.flops_per_s.as_ref()).map_or(0.3, |n| n.value / ceiling);
    let part = Part {
        name: name.into(),
        aliases: Vec::new(),
        kind: PartKind::Cpu,
        arch: String::new(),
        memory: PartMemory {
            bytes: Number { source: "reported by the system".into(), ..number(memory_bytes) },
            bandwidth: number(bandwidth),
            efficiency: number(efficiency),
            reserved: Number::new(0.0, How::Guess, "code, tokens and small data are not counted"),
        },
        attention: AttentionRates { forward: number(share("attention")), backward: number(share("attention_backward")) },
        matmul,
        ops,
        op_overhead: number(rate::task_secs()?),
        overlap: Overlap::SharedCores,
        rank_per_core: Some(number(rank_per_core(samples))),
        host_link: None,
    };
    let machine = Machine {
        name: name.into(),
        aliases: Vec::new(),
        part: name.into(),
        devices: 64,
        links: links(effort, cores, &number)?,
        host: Host {
            memory: Number { source: "reported by the system".into(), ..number(memory_bytes) },
            bandwidth: number(bandwidth),
            adam_efficiency: number((updates.copy_limit / updates.copy).min(1.0)),
            numa_nodes: 1,
            cores,
        },
        network: None,
        nvme: Some(disk(effort, folder, &number)?),
        price: None,
    };
    Ok(Sheet { part: Some(part), machine: Some(machine) })
}

/// How much faster a rank on each core is than one on all: the time of all operations one way, over that the other way.
fn rank_per_core(samples: &[Sample]) -> f64 {
    let total = |way: usize| samples.iter().map(|s| s.ways[way]).sum::<f64>();
    let ratio = total(0) / total(1);
    if ratio.is_finite() && ratio > 0.0 { ratio } else { 1.0 }
}

/// Products by shape. The ceiling is the highest rate seen, in registers or in a product.
fn products(samples: &[Sample], dtype: DType, peak: f64, number: &dyn Fn(f64) -> Number) -> Matmul {
    let forms = [("linear", MatmulForm::Forward), ("linear_dgrad", MatmulForm::Dx), ("linear_wgrad", MatmulForm::Dw)];
    let mut points = Vec::new();
    for s in samples.iter().filter(|s| s.dtype == dtype) {
        if let Some((_, form)) = forms.iter().find(|(op, _)| *op == s.op) {
            let [m, n, k] = s.shape.map(|v| v as f64);
            points.push(MatmulPoint { m, n, k, flops: s.flops / s.secs, form: Some(*form) });
        }
    }
    let best = points.iter().map(|p| p.flops).fold(0.0, f64::max);
    let mean = points.iter().map(|p| p.flops).sum::<f64>() / points.len().max(1) as f64;
    let peak = peak.max(best);
    Matmul { peak: number(peak), ceiling: number(peak), share: number(mean / peak), by_flops: Vec::new(), points }
}

/// Operations that are not plain products: fitted to bytes, or to FLOPs where that explains their time better.
fn op_rates(samples: &[Sample], updates: &Updates, adam_params: usize, number: &dyn Fn(f64) -> Number) -> BTreeMap<String, OpRate> {
    let mut of: BTreeMap<(&str, DType), Vec<&Sample>> = BTreeMap::new();
    let product = |op: &str| matches!(op, "linear" | "linear_dgrad" | "linear_wgrad");
    for s in samples.iter().filter(|s| !product(s.op)) {
        of.entry((s.op, s.dtype)).or_default().push(s);
    }
    let mut rates = BTreeMap::new();
    for ((op, dtype), list) in of {
        let by = |work: &dyn Fn(&Sample) -> f64| fit(&list.iter().map(|s| (work(s), s.secs)).collect::<Vec<_>>());
        let (bytes, flops) = (by(&|s| s.bytes), by(&|s| s.flops));
        let error = |f: &Option<(f64, f64, f64)>| f.map_or(f64::INFINITY, |f| f.2);
        // Few FLOPs a byte: the bytes, whatever fits by chance.
        let dense = list.iter().all(|s| s.flops > 8.0 * s.bytes);
        let by_flops = dense && error(&flops) < error(&bytes);
        let Some((overhead, rate, _)) = (if by_flops { flops } else { bytes }) else { continue };
        let (flops_per_s, bytes_per_s) = if by_flops { (Some(number(rate)), None) } else { (None, Some(number(rate))) };
        rates.insert(op_key(op, dtype), OpRate { flops_per_s, bytes_per_s, overhead: Some(number(overhead)) });
    }
    let adam = OpRate { bytes_per_s: Some(number(30.0 * adam_params as f64 / updates.copy)), ..OpRate::default() };
    rates.insert("adamw_host".into(), adam);
    rates
}

fn links(effort: &Effort, cores: usize, number: &dyn Fn(f64) -> Number) -> Result<Links, Fault> {
    let mut collectives = Vec::new();
    let mut counts = vec![2, 4, cores];
    counts.retain(|n| (2..=16).contains(n));
    counts.sort_unstable();
    counts.dedup();
    for ranks in counts {
        let size = |&bytes: &usize| Size {
            bytes: bytes.next_multiple_of(4 * ranks),
            samples: ((64 << 20) / bytes).clamp(5, 100),
            burst: ((1 << 20) / bytes).clamp(1, 50),
        };
        let sizes: Vec<Size> = effort.collective_bytes.iter().map(size).collect();
        for r in measure_on_threads(ranks, DType::F32, &sizes).map_err(Fault::other)? {
            collectives.push(CollectivePoint { op: r.op.into(), ranks, bytes: r.bytes as f64, secs: 1e-6 * r.stream_us });
        }
        let least = collectives.iter().filter(|c| c.ranks == ranks).map(|c| c.secs).fold(f64::INFINITY, f64::min);
        collectives.push(CollectivePoint { op: "barrier".into(), ranks, bytes: 0.0, secs: least });
    }
    let gathers = || collectives.iter().filter(|c| c.op == "all_gather" && c.ranks == 2);
    let largest = gathers().max_by(|a, b| a.bytes.total_cmp(&b.bytes));
    let latency = gathers().map(|c| c.secs).fold(f64::INFINITY, f64::min);
    // Half of an all_gather over two ranks comes from the other one.
    let bandwidth = largest.map_or(1e9, |c| c.bytes / 2.0 / c.secs);
    Ok(Links {
        graph: Graph::Host,
        bandwidth: number(bandwidth),
        together: None,
        bus: Vec::new(),
        latency: number(latency),
        half_bytes: number(latency * bandwidth),
        collectives,
    })
}

/// The disk under `folder`, by a file that is read after the kernel dropped it.
fn disk(effort: &Effort, folder: &Path, number: &dyn Fn(f64) -> Number) -> Result<Nvme, Fault> {
    let io = |e: std::io::Error| Fault::other(format!("{}: {e}", folder.display()));
    let mut file = tempfile::NamedTempFile::new_in(folder).map_err(io)?;
    let chunk = vec![0x5a_u8; 1 << 16];
    for _ in 0..effort.file_bytes.div_ceil(chunk.len()) {
        file.write_all(&chunk).map_err(io)?;
    }
    // What is not on the disk yet cannot be dropped.
    file.as_file().sync_all().map_err(io)?;
    let secs = zrt::rate::cold_read_secs(&[file.path().to_path_buf()])?;
    let stat = rustix::fs::statvfs(folder).map_err(|e| io(e.into()))?;
    Ok(Nvme {
        bytes: Number { source: "free bytes of the file's folder".into(), ..number((stat.f_bavail * stat.f_frsize) as f64) },
        read: number(effort.file_bytes as f64 / secs),
    })
}

fn summary(sheet: &Sheet, path: &Path) -> String {
    let mut out = vec![format!("written: {}", path.display())];
    if let Some(part) = &sheet.part {
        for (dtype, m) in &part.matmul {
            let share = 100.0 * m.share.value;
            out.push(format!(
                "products, {dtype}: {:.1} GFLOP/s, {share:.0} % of the peak in registers",
                m.share.value * m.peak.value / 1e9
            ));
        }
        let shares = (100.0 * part.memory.efficiency.value, 1e6 * part.op_overhead.value);
        out.push(format!(
            "memory: {:.1} GB/s, simple operations {:.0} % of it; {:.1} us a task; a rank on each core is {:.2} times as fast as one on all",
            part.memory.bandwidth.value / 1e9,
            shares.0,
            shares.1,
            part.rank_per_core.as_ref().map_or(1.0, |n| n.value)
        ));
    }
    if let Some(m) = &sheet.machine {
        let read = m.nvme.as_ref().map_or(0.0, |d| d.read.value / 1e9);
        let links = (m.links.bandwidth.value / 1e9, 1e6 * m.links.latency.value);
        out.push(format!("ranks: {:.1} GB/s, {:.1} us; disk {read:.2} GB/s", links.0, links.1));
    }
    out.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_through_exact_points_is_found() {
        let points = [1e3, 1e5, 1e7].map(|work| (work, 2e-6 + work / 5e9));
        let (overhead, rate, error) = fit(&points).unwrap();
        // Sums of a few f64.
        assert!((overhead / 2e-6 - 1.0).abs() < 1e-6 && (rate / 5e9 - 1.0).abs() < 1e-6 && error < 1e-9);
        // One size, or a negative overhead: the rate alone.
        assert_eq!(fit(&[(10.0, 2.0)]).unwrap(), (0.0, 5.0, 0.0));
        assert_eq!(fit(&[(10.0, 1.0), (20.0, 3.0)]).unwrap().0, 0.0);
        assert!(fit(&[(0.0, 1.0)]).is_none());
    }
}
