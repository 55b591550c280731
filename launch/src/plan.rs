//! `zlaunch plan`: will it fit, how long and how much, on a machine that need not be here? From config.json alone.

use crate::choose;
use crate::fault::Fault;
use std::fmt::Write;
use std::path::PathBuf;
use zrt::auto::{self, Choice};
use zrt::config::Config;
use zrt::cost::answer::Wait;
use zrt::cost::predict::guesses;
use zrt::cost::{Cluster, Prediction, Predictor, Range};

/// `zlaunch plan`
#[derive(Debug, clap::Args)]
pub struct PlanArgs {
    /// The configuration to plan
    #[arg(value_name = "TRAIN.TOML")]
    file: PathBuf,
    /// The machine: 2xMI300X, H100x8, 16xH200, 1xH100,host_memory=256GB; default: this host
    #[arg(long, value_name = "SPEC")]
    machine: Option<String>,
    /// Hosts of that machine
    #[arg(long, value_name = "HOSTS")]
    nodes: Option<usize>,
    /// Ranks, on this host
    #[arg(short = 'n', long = "ranks", value_name = "RANKS", default_value = "1", conflicts_with = "machine")]
    ranks: std::num::NonZeroUsize,
    /// Folder of hardware files that add to the built-in ones or replace them; default: ~/.config/zlaunch/hw
    #[arg(long, value_name = "DIR")]
    hw: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Write the predicted step as a timeline (Chrome/Perfetto), as a run's --trace does
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Override a key
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
}

/// Plans and returns the text to print.
pub fn run(args: &PlanArgs) -> Result<String, Fault> {
    let mut config = Config::load(&args.file, &args.set)?;
    if args.machine.is_none() {
        zrt::device::resolve(&mut config, args.ranks.get())?;
    }
    let catalogue = choose::catalogue(args.hw.as_deref())?;
    let cluster = choose::cluster(&config, &catalogue, args.machine.as_deref(), args.nodes, args.ranks.get())?;
    let predictor = Predictor::default();
    let open = auto::open_keys(&config);
    let (config, plan) = if open.is_empty() {
        let best = predictor.predict(&config, &cluster)?;
        let (mut faster, mut advice) = (None, None);
        if best.memory.fits() {
            faster = auto::much_faster(&predictor, &catalogue, &config, &cluster, &best);
        } else {
            // With nothing left to choose this says what is missing, and the cheapest change that fits.
            advice = auto::choose(&predictor, &catalogue, &config, &cluster).err().map(|e| e.to_string());
        }
        (config, Plan { best, choice: None, faster, advice })
    } else {
        let choice = auto::choose(&predictor, &catalogue, &config, &cluster)?;
        (choice.config.clone(), Plan { best: choice.best.clone(), choice: Some(choice), faster: None, advice: None })
    };
    if let Some(path) = &args.trace {
        predictor.trace(&config, &cluster, path)?;
    }
    if args.json { json(&plan, &config) } else { Ok(text(&plan, &cluster, &config, &open)) }
}

/// What was predicted, and what it was compared with.
struct Plan {
    best: Prediction,
    choice: Option<Choice>,
    faster: Option<Choice>,
    /// What to do where it does not fit.
    advice: Option<String>,
}

fn json(plan: &Plan, config: &Config) -> Result<String, Fault> {
    let value = serde_json::json!({
        "plan": plan.best,
        "fits": plan.best.memory.fits(),
        "config": {
            "zero": config.zero,
            "activation_checkpoint": config.activation_checkpoint,
            "micro_batch_size": config.training.micro_batch_size,
            "micro_batch_group": config.training.micro_batch_group,
        },
        "runners_up": plan.choice.as_ref().map(|c| &c.runners_up),
        "advice": plan.advice,
        "much_faster": plan.faster.as_ref().map(|c| &c.best),
    });
    serde_json::to_string_pretty(&value).map_err(Fault::other)
}

fn gb(bytes: u64) -> String {
    format!("{:.2}", bytes as f64 / 1e9)
}

/// `8.58 (7.9 .. 9.9)`
fn range(r: Range, factor: f64) -> String {
    let digits = |v: f64| {
        let v = v * factor;
        if v >= 100.0 {
            format!("{v:.0}")
        } else if v >= 1.0 {
            format!("{v:.2}")
        } else {
            format!("{v:.4}")
        }
    };
    format!("{} ({} .. {})", digits(r.expected), digits(r.low), digits(r.high))
}

fn text(plan: &Plan, cluster: &Cluster, config: &Config, open: &[&str]) -> String {
    let p = &plan.best;
    let mut out = String::new();
    let _ = writeln!(
        out,
        "{:.2} G parameters, {:.1} M trained, on {}: {}",
        p.parameters.0 as f64 / 1e9,
        p.parameters.1 as f64 / 1e6,
        p.machine,
        p.shape.line()
    );
    if let Some(choice) = &plan.choice {
        let _ = writeln!(out, "{}", choose::reason(choice, open));
    }
    memory(&mut out, p);
    if let Some(advice) = &plan.advice {
        let _ = writeln!(out, "{advice}");
    }
    time(&mut out, p, config);
    if let Some(d) = &p.deepspeed {
        let _ = writeln!(
            out,
            "\nDeepSpeed's estimate for stage {} (model states only; it counts frozen weights as trained): {} GB a device, {} GB a host",
            p.shape.stage,
            gb(d.device_bytes as u64),
            gb(d.host_bytes as u64)
        );
    }
    if let Some(s) = &p.serial {
        let _ = writeln!(
            out,
            "the same gathered serially, without prefetch and apart for forward, recomputation and backward (what DeepSpeed's stock offload \
             configuration does): {} gathers x {:.2} s + {:.1} s of compute = {:.1} s a step",
            s.gathers, s.gather_secs, s.compute_secs, s.secs
        );
    }
    if let Some(faster) = &plan.faster {
        let _ = writeln!(out, "\n{}", choose::much_faster(&faster.best, p));
    }
    let guessed = guesses(cluster);
    if !guessed.is_empty() {
        let _ =
            writeln!(out, "guesses of the catalogue, not measurements: {}; give them with the machine or calibrate it", guessed.join(", "));
    }
    out
}

fn memory(out: &mut String, p: &Prediction) {
    let m = &p.memory;
    let (unit, name) = if m.device_bytes.max(m.host_bytes) < 2_000_000_000 { (1e6, "MB") } else { (1e9, "GB") };
    let _ = writeln!(out, "\n{:<14} {:>12} {:>12}   ({name})", "memory", "device", "host");
    let mut line = |what: &str, device: u64, host: u64| {
        let _ = writeln!(out, "{what:<14} {:>12.2} {:>12.2}", device as f64 / unit, host as f64 / unit);
    };
    for row in m.rows.iter().filter(|r| r.device_bytes + r.host_bytes > 0) {
        line(row.category, row.device_bytes, row.host_bytes);
    }
    line("sum", m.device_bytes, m.host_bytes);
    line("of", m.device_capacity, m.host_capacity);
    let (device, host) = m.missing();
    let (free, of) = if m.device_capacity > 0 { (m.margin_bytes, "device") } else { (m.host_margin_bytes, "host") };
    if m.fits() {
        let _ = writeln!(out, "it fits; {} GB of each {of} are kept free", gb(free));
    } else {
        let _ = writeln!(out, "it does NOT fit: {device} bytes are missing on each device, {host} on each host, margins included");
    }
}

fn time(out: &mut String, p: &Prediction, config: &Config) {
    let _ = writeln!(out, "\nstep            {} s, expected (low .. high)", range(p.secs, 1.0));
    let _ = writeln!(out, "tokens/s        {}; {} tokens a step", range(p.tokens_per_s, 1.0), p.tokens);
    let _ = writeln!(
        out,
        "useful FLOP/s   {} a device: {:.1} % of the data sheet's peak; with recomputation {:.1} % of the highest rate measured",
        if p.useful_flops >= 1e12 { format!("{:.1} T", p.useful_flops / 1e12) } else { format!("{:.1} G", p.useful_flops / 1e9) },
        100.0 * p.share_of_peak,
        100.0 * p.share_of_ceiling
    );
    let _ = writeln!(out, "decided by      {}", p.binding);
    let busy: Vec<String> =
        p.busy.iter().filter(|b| b.1 > 0.0).map(|(s, secs)| format!("{s} {:.0} %", 100.0 * secs / p.secs.expected)).collect();
    let _ = writeln!(out, "streams busy    {}", busy.join(", "));
    exposed(out, p);
    let _ = writeln!(out, "it rests on     (the three numbers of the catalogue that matter most)");
    for a in p.assumptions.iter().take(3) {
        let _ = writeln!(out, "  {}: decides {:.2} s, {:+.2} .. {:+.2} s", a.what, a.decides_secs, a.change_secs.0, a.change_secs.1);
    }
    if let Some(run) = &p.run {
        let money = run.dollars.map_or("no price in the catalogue".into(), |d| format!("${}", range(d, 1.0)));
        let _ = writeln!(out, "whole run       {} steps: {} h, {money}", run.steps, range(run.secs, 1.0 / 3600.0));
    } else if let Some(epochs) = config.training.epochs {
        let _ = writeln!(
            out,
            "whole run       {epochs} epochs: the number of steps depends on the data; set training.steps for hours and money"
        );
    }
}

/// By stream, each with the unit that is waited for longest.
fn exposed(out: &mut String, p: &Prediction) {
    let total: f64 = p.exposed.iter().map(|w| w.secs).sum();
    if total <= 1e-3 * p.secs.expected {
        let _ = writeln!(out, "exposed         nothing to speak of: compute waits for no other stream");
        return;
    }
    let mut streams: Vec<(&str, f64, &Wait, usize)> = Vec::new();
    for wait in &p.exposed {
        match streams.iter_mut().find(|s| s.0 == wait.stream) {
            Some(s) => (s.1, s.3) = (s.1 + wait.secs, s.3 + 1),
            None => streams.push((&wait.stream, wait.secs, wait, 1)),
        }
    }
    streams.sort_by(|a, b| b.1.total_cmp(&a.1));
    let each = streams.iter().filter(|s| s.1 > 1e-2 * total).map(|(stream, secs, most, units)| {
        let unit = if most.unit.is_empty() { "its own work" } else { &most.unit };
        format!("{stream} {secs:.3} s over {units} units, longest for {unit} ({:.3} s)", most.secs)
    });
    let _ = writeln!(out, "exposed         {total:.3} s in which compute waits: {}", each.collect::<Vec<_>>().join("; "));
}
