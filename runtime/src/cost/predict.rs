//! Memory, time and money of a job on a machine: a recorded step, played at the machine's speed.

use super::answer::{Assumption, Prediction, Range, Serial, Shape, Wait, memory, run_total};
use super::catalogue::Cluster;
use super::deepspeed;
use super::number::{Case, How, Number};
use super::rates::{Limit, Rates};
use super::record::{Recording, Sizes, record};
use super::sheet::PartKind;
use crate::config::{Config, Resolved};
use crate::engine::EngineOptions;
use crate::error::Result;
use crate::job::{ModelPart, engine_options, input};
use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use zrt_kernels::cpu::trace::{TraceEvent, TraceKind};
use zrt_kernels::sim::clock::{Played, Span, Speeds, play};
use zrt_kernels::sim::tape::What;

/// Opens models once and records each configuration once, whatever machines it is played on.
#[derive(Default)]
pub struct Predictor {
    models: Mutex<HashMap<String, Arc<ModelPart>>>,
    recordings: Mutex<HashMap<String, Arc<Recording>>>,
}

/// What is predicted of a configuration: everything, or memory alone (which is faster).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// Memory and time.
    All,
    /// Memory.
    Memory,
}

/// The same for one configuration.
pub fn predict(config: &Config, cluster: &Cluster) -> Result<Prediction> {
    Predictor::default().predict(config, cluster)
}

fn lock<T>(m: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    m.lock().unwrap_or_else(|e| e.into_inner())
}

impl Predictor {
    /// Predicts `config`, with nothing left `"auto"`, one rank on each device of `cluster`.
    pub fn predict(&self, config: &Config, cluster: &Cluster) -> Result<Prediction> {
        self.ask(config, cluster, Ask::All)
    }

    /// The model of `config`, opened once.
    pub fn model(&self, config: &Config) -> Result<Arc<ModelPart>> {
        let key = format!("{:?} {:?} {}", config.model, config.lora, config.training.seq_len);
        if let Some(part) = lock(&self.models).get(&key) {
            return Ok(part.clone());
        }
        let part = Arc::new(ModelPart::open(config)?);
        lock(&self.models).insert(key, part.clone());
        Ok(part)
    }

    fn options(config: &Config, batch: &Resolved, cluster: &Cluster) -> Result<EngineOptions> {
        let mut options = engine_options(config, batch)?;
        // Pages are shared by ranks whose devices are the host itself.
        options.share_pages &= cluster.part.kind == PartKind::Cpu && cluster.hosts == 1;
        Ok(options)
    }

    fn sizes(config: &Config, cluster: &Cluster) -> (Sizes, usize) {
        match cluster.part.kind {
            PartKind::Cpu => {
                let cores = cluster.machine.host.cores;
                let threads = if config.device.threads > 0 { config.device.threads } else { (cores / cluster.devices).max(1) };
                (Sizes::Cpu { threads }, threads)
            }
            PartKind::Gpu => (Sizes::Gpu { arch: cluster.part.arch.clone() }, 1),
        }
    }

    fn recording(&self, config: &Config, options: &EngineOptions, ranks: usize, sizes: &Sizes, ask: Ask) -> Result<Arc<Recording>> {
        let model = self.model(config)?;
        let key = format!("{:p} {ranks} {sizes:?} {options:?}", Arc::as_ptr(&model));
        let known = lock(&self.recordings).get(&key).filter(|r| ask == Ask::Memory || !r.tape.items.is_empty()).cloned();
        if let Some(recording) = known {
            return Ok(recording);
        }
        let recording = Arc::new(record(model.model.clone(), options, ranks, sizes, ask == Ask::All)?);
        let mut all = lock(&self.recordings);
        // Tapes are large: a study over thousands of configurations must not keep them all.
        if all.len() >= 64 {
            all.clear();
        }
        all.insert(key, recording.clone());
        Ok(recording)
    }

    /// As [`Predictor::predict`]; with [`Ask::Memory`] times are zero.
    pub fn ask(&self, config: &Config, cluster: &Cluster, ask: Ask) -> Result<Prediction> {
        let ranks = cluster.ranks();
        let batch = config.resolve(ranks).map_err(input)?;
        let options = Self::options(config, &batch, cluster)?;
        let (sizes, threads) = Self::sizes(config, cluster);
        let recording = self.recording(config, &options, ranks, &sizes, ask)?;
        let shape = Shape {
            stage: options.stage,
            offload_param: options.offload_param,
            offload_optimizer: options.offload_optimizer,
            micro_batch_size: batch.micro_batch_size,
            accumulation: batch.accumulation,
            group: batch.group,
            recomputed: options.recompute.min(recording.recomputable),
            recomputable: recording.recomputable,
            resident_bytes: options.resident_bytes,
            prefetch_depth: options.prefetch_depth,
        };
        let memory = memory(&recording, cluster, config.zero.memory_margin_bytes);
        let nothing = Range { low: 0.0, expected: 0.0, high: 0.0 };
        let mut prediction = Prediction {
            machine: cluster.name(),
            ranks,
            parameters: recording.parameters,
            memory,
            secs: nothing,
            tokens: (batch.global_batch_size * config.training.seq_len) as u64,
            tokens_per_s: nothing,
            useful_flops: 0.0,
            share_of_peak: 0.0,
            share_of_ceiling: 0.0,
            busy: Vec::new(),
            exposed: Vec::new(),
            binding: String::new(),
            assumptions: Vec::new(),
            run: None,
            deepspeed: deepspeed::estimate(deepspeed::Question {
                stage: options.stage,
                parameters: recording.parameters.0 as f64,
                largest: recording.largest as f64,
                devices: cluster.devices as f64,
                hosts: cluster.hosts as f64,
                offload_param: options.offload_param,
                offload_optimizer: options.offload_optimizer,
            }),
            serial: None,
            shape,
        };
        if ask == Ask::All {
            let step = Step { cluster, threads, options: &options, batch: &batch, recording: &recording };
            step.time(&mut prediction)?;
            prediction.run = config.training.steps.map(|steps| run_total(steps, prediction.secs, cluster));
        }
        Ok(prediction)
    }

    /// Writes the expected step as a timeline, in the format of a real run's `--trace`.
    pub fn trace(&self, config: &Config, cluster: &Cluster, path: &Path) -> Result<()> {
        let ranks = cluster.ranks();
        let batch = config.resolve(ranks).map_err(input)?;
        let options = Self::options(config, &batch, cluster)?;
        let (sizes, threads) = Self::sizes(config, cluster);
        let recording = self.recording(config, &options, ranks, &sizes, Ask::All)?;
        let step = Step { cluster, threads, options: &options, batch: &batch, recording: &recording };
        zrt_kernels::cpu::trace::write_chrome(path, 0, &step.events()?)
            .map_err(|source| crate::Error::Io { path: path.display().to_string(), source })
    }
}

/// A recorded step on a machine.
struct Step<'a> {
    cluster: &'a Cluster,
    threads: usize,
    options: &'a EngineOptions,
    batch: &'a Resolved,
    recording: &'a Recording,
}

impl Step<'_> {
    fn play(&self, rates: &Rates, spans: Option<&mut Vec<Span>>) -> Result<(Played, Vec<super::rates::Cost>)> {
        let works = &self.recording.tape.works;
        let costs: Vec<_> = works.iter().map(|w| rates.cost(w)).collect();
        let secs: Vec<f64> = costs.iter().map(|c| c.secs).collect();
        let class: Vec<_> = works.iter().map(|w| rates.class(w)).collect();
        let speeds = Speeds { secs: &secs, class: &class, sharing: rates.sharing() };
        let played = play(&self.recording.tape, &speeds, spans).map_err(crate::Error::Model)?;
        Ok((played, costs))
    }

    fn time(&self, out: &mut Prediction) -> Result<()> {
        let tape = &self.recording.tape;
        let rates = Rates::new(self.cluster, self.threads, Case::Expected);
        let (played, costs) = self.play(&rates, None)?;
        let class: Vec<_> = tape.works.iter().map(|w| rates.class(w)).collect();

        // Seconds of the step by what decides them: compute as it runs, other streams where they are exposed.
        let mut decides = [0.0; Limit::ALL.len()];
        let mut alone = 0.0;
        for ((cost, secs), _) in
            costs.iter().zip(&played.by_work).zip(&class).filter(|(_, c)| **c == zrt_kernels::sim::clock::Class::Compute)
        {
            let overhead = if cost.secs > 0.0 { secs * cost.overhead / cost.secs } else { 0.0 };
            decides[cost.limit as usize] += secs - overhead;
            decides[Limit::Overhead as usize] += overhead;
            alone += secs;
        }
        decides[Limit::Overlap as usize] += (played.busy.first().copied().unwrap_or(0.0) - alone).max(0.0);
        let limits = self.limits(&costs);
        for wait in &played.exposed {
            let limit = limits.get(&(wait.lane, wait.tag)).copied().unwrap_or(Limit::Overhead);
            decides[limit as usize] += wait.secs;
        }
        let mut assumptions: Vec<Assumption> =
            Limit::ALL.iter().filter(|l| decides[**l as usize] > 0.0).map(|&l| self.assumption(l, decides[l as usize])).collect();
        let spread = |pick: fn(&Assumption) -> f64| assumptions.iter().map(|a| pick(a).powi(2)).sum::<f64>().sqrt();
        let (down, up) = (spread(|a| a.change_secs.0), spread(|a| a.change_secs.1));
        assumptions.sort_by(|a, b| (b.change_secs.1 - b.change_secs.0).total_cmp(&(a.change_secs.1 - a.change_secs.0)));
        out.secs = Range { low: (played.secs - down).max(0.0), expected: played.secs, high: played.secs + up };
        let tokens = out.tokens as f64;
        out.tokens_per_s = Range { low: tokens / out.secs.high, expected: tokens / played.secs, high: tokens / out.secs.low };

        let useful = self.recording.flops_per_micro_batch * self.batch.accumulation as f64;
        let matmul = self.cluster.part.matmul.get(self.options.shape.compute.name()).or_else(|| self.cluster.part.matmul.get("bf16"));
        out.useful_flops = useful / played.secs;
        let whole = |n: &Number| n.value * if self.cluster.part.kind == PartKind::Cpu { 1.0 / self.cluster.devices as f64 } else { 1.0 };
        if let Some(m) = matmul {
            let forward = useful / if out.parameters.1 == out.parameters.0 { 3.0 } else { 2.0 };
            let again = forward * out.shape.recomputed as f64 / out.shape.recomputable.max(1) as f64;
            out.share_of_peak = out.useful_flops / whole(&m.peak);
            out.share_of_ceiling = (useful + again) / played.secs / whole(&m.ceiling);
        }
        out.busy = tape.lanes.iter().cloned().zip(played.busy.iter().copied()).collect();
        out.exposed = played
            .exposed
            .iter()
            .map(|e| Wait { stream: tape.lanes[e.lane].clone(), unit: tape.names[e.tag as usize].clone(), secs: e.secs })
            .collect();
        let most =
            Limit::ALL.iter().max_by(|a, b| decides[**a as usize].total_cmp(&decides[**b as usize])).copied().unwrap_or(Limit::Matmul);
        let share = decides[most as usize] / played.secs.max(f64::MIN_POSITIVE);
        out.binding = format!("{}: {:.0} % of the step", self.describe(most), 100.0 * share);
        out.assumptions = assumptions;
        out.serial = self.serial(&rates, alone, out);
        Ok(())
    }

    /// Which number decides what is exposed: per (stream, tag), that of the first work there.
    fn limits(&self, costs: &[super::rates::Cost]) -> HashMap<(usize, u32), Limit> {
        let mut out = HashMap::new();
        for item in &self.recording.tape.items {
            if let What::Work { work, tag } = item.what
                && item.lane > 0
            {
                out.entry((usize::from(item.lane), tag)).or_insert(costs[work as usize].limit);
            }
        }
        out
    }

    /// The numbers behind a limit: those whose product is the rate.
    fn numbers(&self, limit: Limit) -> Vec<(&'static str, &Number)> {
        let (part, machine) = (&self.cluster.part, &self.cluster.machine);
        let matmul = part.matmul.get(self.options.shape.compute.name()).or_else(|| part.matmul.values().next());
        match limit {
            Limit::Matmul => {
                matmul.map_or(Vec::new(), |m| vec![("matrix products reach at most", &m.ceiling), ("large products reach of it", &m.share)])
            }
            Limit::Attention => vec![("attention reaches of the product rate", &part.attention.forward)],
            Limit::Memory => vec![("device memory", &part.memory.bandwidth), ("share of it reached", &part.memory.efficiency)],
            Limit::Overhead => vec![("cost of a call", &part.op_overhead)],
            Limit::Overlap => match &part.overlap {
                super::sheet::Overlap::Factors { compute, .. } => vec![("slowdown while collectives run", compute)],
                super::sheet::Overlap::SharedCores => Vec::new(),
            },
            Limit::Links => {
                let bus = machine.links.bus.iter().find(|b| b.ranks == self.cluster.devices).map(|b| &b.bandwidth);
                vec![("links between devices", bus.unwrap_or(&machine.links.bandwidth))]
            }
            Limit::Network => {
                machine.network.as_ref().map_or(Vec::new(), |n| vec![("network", &n.bandwidth), ("share of it reached", &n.efficiency)])
            }
            Limit::HostLink => part.host_link.as_ref().map_or(Vec::new(), |l| vec![("host link", &l.to_device)]),
            Limit::HostMemory => vec![("host memory", &machine.host.bandwidth), ("share of it reached", &machine.host.adam_efficiency)],
        }
    }

    fn describe(&self, limit: Limit) -> String {
        let numbers = self.numbers(limit);
        let each = numbers.iter().map(|(what, n)| format!("{what} {}", amount(limit, n.value)));
        if numbers.is_empty() { "cores shared by streams".into() } else { each.collect::<Vec<_>>().join(", ") }
    }

    fn assumption(&self, limit: Limit, secs: f64) -> Assumption {
        let numbers = self.numbers(limit);
        let costs = matches!(limit, Limit::Overhead | Limit::Overlap);
        let all = |case: Case| -> f64 {
            let factor = |n: &Number| {
                if limit == Limit::Overlap {
                    // Only what exceeds 1 is a slowdown.
                    (n.cost(case) - 1.0).max(0.0) / (n.value - 1.0).max(1e-9)
                } else if costs {
                    n.cost(case) / n.value.max(f64::MIN_POSITIVE)
                } else {
                    n.value / n.rate(case)
                }
            };
            numbers.iter().map(|(_, n)| factor(n)).product()
        };
        let what = numbers.iter().map(|(what, n)| {
            let origin = if n.source.is_empty() { n.how.name().to_string() } else { format!("{}: {}", n.how.name(), n.source) };
            format!("{what} {} ({origin})", amount(limit, n.value))
        });
        let what = if numbers.is_empty() { "streams share the cores".into() } else { what.collect::<Vec<_>>().join("; ") };
        Assumption { limit, what, decides_secs: secs, change_secs: (secs * (all(Case::Fast) - 1.0), secs * (all(Case::Slow) - 1.0)) }
    }

    /// Stage 3 without prefetch, gathering apart for forward, recomputation and backward: DeepSpeed's schedule with its stock
    /// offload configuration, where `max_live_parameters = 0` switches prefetch off.
    fn serial(&self, rates: &Rates, compute: f64, out: &Prediction) -> Option<Serial> {
        if self.options.stage != 3 || self.cluster.part.kind == PartKind::Cpu {
            return None;
        }
        let bytes = self.recording.weight_bytes as f64;
        let ranks = self.cluster.ranks() as f64;
        let link = self.cluster.part.host_link.as_ref().filter(|_| self.options.offload_param);
        let from_host = link.map_or(0.0, |l| bytes / ranks / l.to_device.value);
        let gather_secs = from_host + rates.collective(zrt_kernels::sim::Kind::AllGather, bytes).secs;
        let gathers = 3 * self.batch.accumulation;
        // All blocks recomputed: what of the forward is not done again yet.
        let passes = if out.parameters.1 == out.parameters.0 { 3.0 } else { 2.0 };
        let now = passes + out.shape.recomputed as f64 / out.shape.recomputable.max(1) as f64;
        let compute_secs = compute * (passes + 1.0) / now;
        Some(Serial { gathers, gather_secs, compute_secs, secs: gathers as f64 * gather_secs + compute_secs })
    }

    /// The expected step as events; times of works that run in one go are theirs alone, stretched to what they took together.
    fn events(&self) -> Result<Vec<TraceEvent>> {
        let tape = &self.recording.tape;
        let rates = Rates::new(self.cluster, self.threads, Case::Expected);
        let mut spans = Vec::new();
        let (_, costs) = self.play(&rates, Some(&mut spans))?;
        let streams: Vec<Arc<str>> = tape.lanes.iter().map(|n| n.as_str().into()).collect();
        let first = spans.iter().map(|s| s.start_secs).fold(f64::INFINITY, f64::min).min(0.0);
        let ns = |secs: f64| ((secs - first) * 1e9).round() as u64;
        let mut events = Vec::with_capacity(tape.items.len());
        for span in spans {
            let works = || {
                tape.items[span.first..span.end].iter().filter(|i| usize::from(i.lane) == span.lane).filter_map(|i| match i.what {
                    What::Work { work, tag } => Some((work as usize, tag as usize)),
                    _ => None,
                })
            };
            let total: f64 = works().map(|(w, _)| costs[w].secs).sum();
            let stretch = (span.end_secs - span.start_secs) / total.max(f64::MIN_POSITIVE);
            let mut at = span.start_secs;
            for (work, tag) in works() {
                let end = at + costs[work].secs * stretch;
                let (kind, unit) = (tape.works[work].kind.name(), &tape.names[tag]);
                let name = if unit.is_empty() { kind.to_string() } else { format!("{kind} {unit}") };
                let stream = streams[span.lane].clone();
                events.push(TraceEvent {
                    stream_id: span.lane as u64 + 1,
                    stream,
                    name,
                    start_ns: ns(at),
                    end_ns: ns(end),
                    kind: TraceKind::Task,
                });
                at = end;
            }
        }
        Ok(events)
    }
}

/// A number in the unit of its kind.
fn amount(limit: Limit, value: f64) -> String {
    match limit {
        _ if value <= 2.0 && value > 1e-2 => format!("{value:.2}"),
        Limit::Matmul | Limit::Attention if value >= 1e12 => format!("{:.0} TFLOP/s", value / 1e12),
        Limit::Matmul | Limit::Attention => format!("{:.1} GFLOP/s", value / 1e9),
        Limit::Overhead => format!("{:.1} us", value * 1e6),
        _ if value >= 1e12 => format!("{:.2} TB/s", value / 1e12),
        _ => format!("{:.1} GB/s", value / 1e9),
    }
}

/// How far the origins of a cluster's numbers are from measurements: for a line that says so.
pub fn guesses(cluster: &Cluster) -> Vec<&'static str> {
    let mut out = Vec::new();
    let (part, machine) = (&cluster.part, &cluster.machine);
    for (name, n) in [
        ("device memory", &part.memory.bytes),
        ("host memory", &machine.host.memory),
        ("host bandwidth", &machine.host.bandwidth),
        ("links", &machine.links.bandwidth),
    ] {
        if n.how == How::Guess {
            out.push(name);
        }
    }
    out
}
