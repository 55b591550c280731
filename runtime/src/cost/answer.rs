//! The form of an answer: memory, time and money of a job on a machine, with what they rest on.

use super::catalogue::Cluster;
use super::deepspeed;
use super::rates::Limit;
use super::record::Recording;
use super::sheet::PartKind;
use serde::Serialize;
use zrt_kernels::Place;

/// A value with the interval it may be in.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Range {
    /// Optimistic for times.
    pub low: f64,
    /// Expected.
    pub expected: f64,
    /// Pessimistic for times.
    pub high: f64,
}

/// The keys that shape a plan, as they are used.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Shape {
    /// ZeRO stage.
    pub stage: u8,
    /// Weight shards on the host.
    pub offload_param: bool,
    /// Optimizer on the host.
    pub offload_optimizer: bool,
    /// Sequences of a micro-batch.
    pub micro_batch_size: usize,
    /// Micro-batches of a rank in a step.
    pub accumulation: usize,
    /// Micro-batches that share a gather.
    pub group: usize,
    /// Blocks that are recomputed.
    pub recomputed: usize,
    /// Blocks that could be.
    pub recomputable: usize,
    /// Bytes of frozen units kept gathered; `u64::MAX` for all.
    pub resident_bytes: u64,
    /// Units gathered ahead.
    pub prefetch_depth: usize,
}

impl Shape {
    /// One line: `replicated base, micro-batch 1 x 8, no recomputation`.
    pub fn line(&self) -> String {
        let mut out = match (self.stage, self.offload_param) {
            (0, _) => "replicated (stage 0)".to_string(),
            (3, true) => "streamed from host memory (stage 3, offload_param)".to_string(),
            (stage, _) => format!("sharded (stage {stage})"),
        };
        if self.offload_optimizer {
            out += ", optimizer on the host";
        }
        if self.stage == 3 && self.resident_bytes == u64::MAX {
            out += ", all frozen units resident";
        } else if self.stage == 3 && self.resident_bytes > 0 {
            out += &format!(", {:.1} GB of frozen units resident", self.resident_bytes as f64 / 1e9);
        }
        out += &format!(", micro-batch {} x {}", self.micro_batch_size, self.accumulation);
        if self.group > 1 {
            out += &format!(" in groups of {}", self.group);
        }
        match self.recomputed {
            0 => {}
            n if n >= self.recomputable => out += ", all blocks recomputed",
            n => out += &format!(", {n} of {} blocks recomputed", self.recomputable),
        }
        out
    }
}

/// One row of a memory table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MemoryRow {
    /// Category, as the allocator counts it; `reserved` is what driver and libraries take.
    pub category: &'static str,
    /// Bytes of one device.
    pub device_bytes: u64,
    /// Bytes of one host, over its ranks.
    pub host_bytes: u64,
}

/// Who holds what, and what there is.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Memory {
    /// By category.
    pub rows: Vec<MemoryRow>,
    /// Bytes of one device.
    pub device_bytes: u64,
    /// What a device has.
    pub device_capacity: u64,
    /// Bytes of one host.
    pub host_bytes: u64,
    /// What a host has.
    pub host_capacity: u64,
    /// Bytes that must stay free of each device.
    pub margin_bytes: u64,
    /// Bytes that must stay free of each host.
    pub host_margin_bytes: u64,
}

impl Memory {
    /// Bytes by which a device, then a host, is overfull; margins included.
    pub fn missing(&self) -> (u64, u64) {
        let over = |used: u64, capacity: u64, margin: u64| (used + margin).saturating_sub(capacity);
        let device = over(self.device_bytes, self.device_capacity, self.margin_bytes);
        (device, over(self.host_bytes, self.host_capacity, self.host_margin_bytes))
    }

    /// Both fit.
    pub fn fits(&self) -> bool {
        self.missing() == (0, 0)
    }
}

/// Time in which compute waits for something else.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Wait {
    /// The stream that runs meanwhile.
    pub stream: String,
    /// The unit it is about, or empty.
    pub unit: String,
    /// Seconds of a step.
    pub secs: f64,
}

/// A number of the catalogue that the time rests on.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Assumption {
    /// Which.
    pub limit: Limit,
    /// In words, with value and origin.
    pub what: String,
    /// Seconds of a step that it decides.
    pub decides_secs: f64,
    /// By how much the step would be faster or slower (negative, positive) at the ends of its range.
    pub change_secs: (f64, f64),
}

/// What a whole run takes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunTotal {
    /// Steps.
    pub steps: u64,
    /// Seconds.
    pub secs: Range,
    /// US dollars, where the catalogue has a price.
    pub dollars: Option<Range>,
}

/// The same weights gathered one unit after the other, as a schedule without prefetch does it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Serial {
    /// Passes over all weights in a step: three a micro-batch (forward, recomputation, backward).
    pub gathers: usize,
    /// Seconds of one pass: host link, then links, one after the other.
    pub gather_secs: f64,
    /// Seconds of compute with all blocks recomputed.
    pub compute_secs: f64,
    /// Seconds of a step.
    pub secs: f64,
}

/// A predicted step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Prediction {
    /// The machine.
    pub machine: String,
    /// Ranks.
    pub ranks: usize,
    /// How it runs.
    pub shape: Shape,
    /// All and trained parameters.
    pub parameters: (usize, usize),
    /// Memory.
    pub memory: Memory,
    /// Seconds of a step; zero where only memory was asked for.
    pub secs: Range,
    /// Tokens of a step over all ranks.
    pub tokens: u64,
    /// Tokens per second over all ranks.
    pub tokens_per_s: Range,
    /// Useful FLOPs (without recomputation) per second and device.
    pub useful_flops: f64,
    /// The same as a share of the part's peak.
    pub share_of_peak: f64,
    /// FLOPs per second and device, recomputation included, as a share of the highest rate that was measured.
    pub share_of_ceiling: f64,
    /// Seconds that each stream is busy.
    pub busy: Vec<(String, f64)>,
    /// What compute waits for, most first.
    pub exposed: Vec<Wait>,
    /// What decides the time, in words.
    pub binding: String,
    /// What the time rests on, most uncertain first.
    pub assumptions: Vec<Assumption>,
    /// Steps, time and money of the run, where the configuration says how many steps.
    pub run: Option<RunTotal>,
    /// DeepSpeed's own estimate for this stage.
    pub deepspeed: Option<deepspeed::Estimate>,
    /// Stage 3: what a schedule that hides nothing takes.
    pub serial: Option<Serial>,
}

/// What a rank and a host hold, and what there is.
pub(super) fn memory(recording: &Recording, cluster: &Cluster, margin: Option<u64>) -> Memory {
    let ranks = cluster.devices as u64;
    let reserved = cluster.part.memory.reserved.value as u64;
    let gpu = cluster.part.kind == PartKind::Gpu;
    let mut rows: Vec<MemoryRow> = Vec::new();
    for (place, category, used) in &recording.memory {
        let bytes = used.peak_bytes as u64;
        let (device_bytes, host_bytes) = if gpu && *place == Place::Device { (bytes, 0) } else { (0, bytes * ranks) };
        match rows.iter_mut().find(|r| r.category == category.name()) {
            Some(row) => (row.device_bytes, row.host_bytes) = (row.device_bytes + device_bytes, row.host_bytes + host_bytes),
            None => rows.push(MemoryRow { category: category.name(), device_bytes, host_bytes }),
        }
    }
    // Pages were counted by every rank, and are there once.
    let twice = recording.shared_bytes as u64 * (ranks - 1);
    if let Some(row) = rows.iter_mut().find(|r| r.category == zrt_kernels::Category::Weights.name()).filter(|_| twice > 0) {
        row.host_bytes = row.host_bytes.saturating_sub(twice);
    }
    rows.push(MemoryRow {
        category: "reserved",
        device_bytes: if gpu { reserved } else { 0 },
        host_bytes: if gpu { 0 } else { reserved * ranks },
    });
    let host_capacity = cluster.machine.host.memory.value as u64;
    let device_capacity = if gpu { cluster.part.memory.bytes.value as u64 } else { 0 };
    let usual = |capacity: u64| margin.unwrap_or((capacity / 100 * 3).max(2_000_000_000));
    let (margin_bytes, host_margin_bytes) = match gpu {
        // What the system and the page cache need.
        true => (usual(device_capacity), host_capacity / 100 * 3),
        // Of a small host not all may be margin.
        false => (0, usual(host_capacity).min(host_capacity / 4)),
    };
    Memory {
        device_bytes: rows.iter().map(|r| r.device_bytes).sum(),
        device_capacity,
        host_bytes: rows.iter().map(|r| r.host_bytes).sum(),
        host_capacity,
        margin_bytes,
        host_margin_bytes,
        rows,
    }
}

/// Time and money of so many steps.
pub(super) fn run_total(steps: u64, secs: Range, cluster: &Cluster) -> RunTotal {
    let times = |r: Range, f: f64| Range { low: r.low * f, expected: r.expected * f, high: r.high * f };
    let secs = times(secs, steps as f64);
    let dollars = cluster.machine.price.as_ref().map(|p| times(secs, p.per_device_hour.value * cluster.ranks() as f64 / 3600.0));
    RunTotal { steps, secs, dollars }
}
