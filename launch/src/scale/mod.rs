//! `zlaunch scale`: a configuration over many sizes and choices, each predicted by the trainer's own code on a simulated device (or, with
//! `--measure`, run on this machine beside its prediction), as a table for programs and a report for people.
//!
//! At the smallest size the step is as configured. At larger ones it is looked at twice: with the same global batch (strong scaling),
//! and with one that grows with the devices (weak scaling).

mod measure;
mod report;
mod sizes;
mod study;

use crate::fault::Fault;
use sizes::Sweep;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use study::{Found, Row, Scaling, Study};
use zrt::config::{Config, ConfigErrors};
use zrt::cost::predict::Ask;
use zrt::cost::{Catalogue, Cluster, Prediction, Predictor};

/// `zlaunch scale`
#[derive(Debug, clap::Args)]
pub struct ScaleArgs {
    /// The configuration; its model needs config.json only
    #[arg(value_name = "TRAIN.TOML")]
    pub file: PathBuf,
    /// One host of the machine: 'H100x8', 2xMI300X [default: this one]
    #[arg(long, value_name = "SPEC")]
    pub machine: Option<String>,
    /// Hosts: 1,2,4,...,128
    #[arg(long, value_name = "LIST", requires = "machine")]
    pub nodes: Option<String>,
    /// Ranks on this machine: 1,2,4
    #[arg(short = 'n', long = "ranks", value_name = "LIST", conflicts_with = "machine")]
    pub ranks: Option<String>,
    /// A key and the values it takes: zero.stage=0,3; several are multiplied
    #[arg(long, value_name = "KEY=V,V,...")]
    pub sweep: Vec<String>,
    /// Override a key in all of them
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Run each configuration on this machine too
    #[arg(long, conflicts_with = "machine")]
    pub measure: bool,
    /// Steps of a real run; the first is not counted
    #[arg(long, default_value = "4", requires = "measure")]
    pub steps: std::num::NonZeroU64,
    /// Folder for study.csv and report.html
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Folder of hardware files beside the built-in ones [default: the user's]
    #[arg(long, value_name = "DIR")]
    pub hw: Option<PathBuf>,
}

/// One configuration to look at.
struct Point {
    cluster: Cluster,
    scaling: Scaling,
    choice: Vec<(String, String)>,
    /// The configuration, or why there is none.
    config: Result<Config, String>,
    global_batch: usize,
}

/// Studies, and writes `study.csv` and `report.html`.
pub fn run(args: &ScaleArgs) -> Result<u8, Fault> {
    let catalogue = Catalogue::load(args.hw.as_deref())?;
    let list = args.nodes.as_deref().or(args.ranks.as_deref()).unwrap_or("1");
    let sizes = sizes::expand(list).map_err(Fault::user)?;
    let clusters: Vec<Cluster> = match &args.machine {
        Some(spec) => {
            let host = catalogue.cluster(spec)?;
            sizes.iter().map(|hosts| host.with_hosts(*hosts)).collect::<Result<_, _>>()?
        }
        None => sizes.iter().map(|ranks| Cluster::this_host(&catalogue, *ranks)).collect::<Result<_, _>>()?,
    };
    let sweeps = args.sweep.iter().map(|s| Sweep::parse(s)).collect::<Result<Vec<_>, _>>().map_err(Fault::user)?;
    let out = std::path::absolute(&args.out).unwrap_or_else(|_| args.out.clone());
    std::fs::create_dir_all(&out).map_err(|e| Fault::user(format!("--out {}: {e}", out.display())))?;
    let points = points(args, &clusters, &sweeps)?;
    let mut rows = predict(&catalogue, &points);
    if args.measure {
        measure::measure(&out, args.steps.get(), &points, &mut rows)?;
    }
    let machine = clusters.first().map_or(String::new(), |c| Cluster { hosts: 1, ..c.clone() }.name());
    let price = clusters.first().and_then(|c| c.machine.price.as_ref()).map_or(String::new(), |p| p.date.clone());
    let study = Study { file: args.file.display().to_string(), machine, price, rows };
    let write = |name: &str, text: String| -> Result<PathBuf, Fault> {
        let path = out.join(name);
        std::fs::write(&path, text).map_err(|e| Fault::other(format!("{}: {e}", path.display())))?;
        Ok(path)
    };
    let paths = [write("study.csv", report::csv(&study))?, write("report.html", report::html(&study))?];
    let can = study.rows.iter().filter(|r| r.predicted.is_ok()).count();
    let plural = if study.rows.len() == 1 { "" } else { "s" };
    let mut said = vec![format!("{} configuration{plural}, {can} can run", study.rows.len())];
    if let Some((row, found)) = study.fastest() {
        said.push(format!(
            "fastest of the largest size, {} devices: {}, {} ({:.0} tokens/s)",
            row.devices,
            row.choice_name(),
            found.plan,
            found.tokens_per_s()
        ));
    }
    let errors: Vec<f64> = study.rows.iter().filter_map(report::error_percent).collect();
    if !errors.is_empty() {
        let mut sizes: Vec<f64> = errors.iter().map(|e| e.abs()).collect();
        sizes.sort_by(f64::total_cmp);
        let worst = sizes.last().copied().unwrap_or(0.0);
        said.push(format!(
            "predicted against measured: median {:.1} %, worst {worst:.1} % over {} runs",
            sizes[sizes.len() / 2],
            sizes.len()
        ));
    }
    said.extend(paths.map(|p| format!("written: {}", p.display())));
    crate::print(said.join("\n"))
}

/// All sizes of all choices, in that order.
fn points(args: &ScaleArgs, clusters: &[Cluster], sweeps: &[Sweep]) -> Result<Vec<Point>, Fault> {
    // The file itself must be right before anything is made of it.
    let base = Config::load(&args.file, &args.set)?;
    for sweep in sweeps {
        // A key that takes none of its values is a wrong command, not a point of the study.
        let with = |value: &String| Config::load(&args.file, &[&args.set[..], &[format!("{}={value}", sweep.key)]].concat());
        let mut loaded: Vec<_> = sweep.values.iter().map(with).collect();
        if loaded.iter().all(Result::is_err)
            && let Err(e) = loaded.swap_remove(0)
        {
            return Err(e.into());
        }
    }
    let swept = |keys: &[&str]| sweeps.iter().any(|s| keys.contains(&s.key.as_str()));
    let smallest = clusters.first().map_or(1, Cluster::ranks);
    let mut points = Vec::new();
    for choice in sizes::choices(sweeps) {
        let set = args.set.iter().cloned().chain(choice.iter().map(|(k, v)| format!("{k}={v}")));
        let config = Config::load(&args.file, &set.collect::<Vec<_>>());
        let config = config.map_err(|e| reason(&e));
        // What is swept counts; otherwise the batch of the file holds for all choices, or no two could be compared.
        let of =
            if swept(&["training.global_batch_size", "training.gradient_accumulation_steps"]) { config.as_ref().ok() } else { Some(&base) };
        let batch = |c: &Config| c.training.global_batch_size.or_else(|| c.resolve(smallest).ok().map(|b| b.global_batch_size));
        let start = of.and_then(batch).unwrap_or(0);
        for (i, cluster) in clusters.iter().enumerate() {
            let scalings: &[Scaling] = if i == 0 { &[Scaling::Base] } else { &[Scaling::Strong, Scaling::Weak] };
            for &scaling in scalings {
                let global_batch = if scaling == Scaling::Weak { start * cluster.ranks() / smallest } else { start };
                let mut config = config.clone();
                if let (Ok(c), true) = (&mut config, global_batch > 0) {
                    c.training.global_batch_size = Some(global_batch);
                    c.training.gradient_accumulation_steps = None;
                }
                points.push(Point { cluster: cluster.clone(), scaling, choice: choice.clone(), config, global_batch });
            }
        }
    }
    Ok(points)
}

/// The problems of a configuration in one line.
fn reason(e: &ConfigErrors) -> String {
    e.problems.iter().map(|p| p.what.clone()).collect::<Vec<_>>().join("; ")
}

/// Predicts all points, on all cores.
fn predict(catalogue: &Catalogue, points: &[Point]) -> Vec<Row> {
    let predictor = Predictor::default();
    let next = AtomicUsize::new(0);
    let rows: Mutex<Vec<(usize, Row)>> = Mutex::default();
    let work = || {
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            let Some(point) = points.get(i) else { return };
            let row = Row {
                nodes: point.cluster.hosts,
                devices: point.cluster.ranks(),
                scaling: point.scaling,
                global_batch: point.global_batch,
                choice: point.choice.clone(),
                predicted: predict_one(&predictor, catalogue, point),
                measured: None,
            };
            rows.lock().unwrap_or_else(|e| e.into_inner()).push((i, row));
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, |n| n.get()) {
            scope.spawn(work);
        }
    });
    let mut rows = rows.into_inner().unwrap_or_else(|e| e.into_inner());
    rows.sort_by_key(|r| r.0);
    rows.into_iter().map(|r| r.1).collect()
}

fn predict_one(predictor: &Predictor, catalogue: &Catalogue, point: &Point) -> Result<Found, String> {
    let config = point.config.as_ref().map_err(Clone::clone)?;
    let text = |e: zrt::Error| e.to_string();
    if !zrt::auto::open_keys(config).is_empty() {
        return Ok(found(&zrt::auto::choose(predictor, catalogue, config, &point.cluster).map_err(text)?.best, &point.cluster));
    }
    // What does not fit needs no time.
    let memory = predictor.ask(config, &point.cluster, Ask::Memory).map_err(text)?.memory;
    for (missing, used, capacity, whose) in [
        (memory.missing().0, memory.device_bytes, memory.device_capacity, "a device"),
        (memory.missing().1, memory.host_bytes, memory.host_capacity, "a host"),
    ] {
        if missing > 0 {
            let (used, capacity) = (used as f64 / 1e9, capacity as f64 / 1e9);
            return Err(format!("does not fit: {missing} bytes too many on {whose}: {used:.1} GB and margin of {capacity:.1} GB"));
        }
    }
    let p = predictor.predict(config, &point.cluster).map_err(text)?;
    Ok(found(&p, &point.cluster))
}

fn found(p: &Prediction, cluster: &Cluster) -> Found {
    let hour = cluster.machine.price.as_ref().map(|price| price.per_device_hour.value * cluster.ranks() as f64);
    Found {
        secs: [p.secs.low, p.secs.expected, p.secs.high],
        tokens: p.tokens as f64,
        share_of_peak: p.share_of_peak,
        device_bytes: p.memory.device_bytes as f64,
        device_capacity: p.memory.device_capacity as f64,
        host_bytes: p.memory.host_bytes as f64,
        exposed_secs: p.exposed.iter().map(|w| w.secs).sum(),
        usd_per_mtoken: hour.map(|h| h / 3600.0 * p.secs.expected / p.tokens as f64 * 1e6),
        hours: p.run.as_ref().map(|r| r.secs.expected / 3600.0),
        bound: p.binding.clone(),
        plan: p.shape.line(),
    }
}

/// Where a real run of point `index` keeps its folder.
fn run_folder(out: &Path, index: usize) -> PathBuf {
    out.join("runs").join(format!("{index:04}"))
}
