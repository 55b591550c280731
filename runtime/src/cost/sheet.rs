//! The form of a hardware file, and what cannot be in one. Every number carries its origin ([`Number`]); units are bytes, bytes/s,
//! FLOP/s and seconds.

use super::number::Number;
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What a catalogue file holds: `[part]`, `[machine]`, or both.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sheet {
    /// A processor with its own memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part: Option<Part>,
    /// A host with several of one part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<Machine>,
}

/// Kinds of parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PartKind {
    /// Memory of its own, behind a link to the host.
    Gpu,
    /// The host itself: "device" memory is host memory, ranks share the cores.
    Cpu,
}

/// A processor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// As written in a machine spec, such as `MI300X`; case and dashes do not matter.
    pub name: String,
    /// Other names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<String>,
    /// GPU or CPU.
    pub kind: PartKind,
    /// Architecture name as the kernels know it, such as `gfx942` or `sm_90`: decides scratch sizes. CPU: empty.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub arch: String,
    /// Its memory.
    pub memory: PartMemory,
    /// Matrix products by storage type (`bf16`, `f32`).
    pub matmul: BTreeMap<String, Matmul>,
    /// Rate of attention as a share of the matmul ceiling.
    pub attention: AttentionRates,
    /// Rates of single operations, by the name in `zrt_kernels::Ops`, where they are known better than by bytes and FLOPs.
    /// `adamw_host`, `copy`, `fill` too.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub ops: BTreeMap<String, OpRate>,
    /// Seconds that an operation costs beside its work: launch, scheduling.
    pub op_overhead: Number,
    /// How streams slow each other while they run together.
    pub overlap: Overlap,
    /// CPU: how much faster operations are where each core has a rank of its own than where one rank has all cores, whose threads have to
    /// meet in every operation. Rates are those of the mean of both times.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank_per_core: Option<Number>,
    /// Link to the host; absent on a CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_link: Option<HostLink>,
}

/// Memory of a part.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PartMemory {
    /// Usable bytes, not the label.
    pub bytes: Number,
    /// Nominal bytes/s.
    pub bandwidth: Number,
    /// Share of it that operations which only move bytes reach.
    pub efficiency: Number,
    /// Bytes that the driver, its context and the communication library take.
    pub reserved: Number,
}

/// Rates of dense products for one type.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Matmul {
    /// Dense FLOP/s of the data sheet.
    pub peak: Number,
    /// Highest FLOP/s that anyone reached: claims above it are refused.
    pub ceiling: Number,
    /// Share of the ceiling that the products of training reach when they are large.
    pub share: Number,
    /// (FLOPs of a product, share of what large ones reach), ascending; between points by the logarithm. Empty: 1 everywhere.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub by_flops: Vec<(f64, f64)>,
    /// Measured products; where there are any they replace `share` and `by_flops`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub points: Vec<MatmulPoint>,
}

/// A measured product `[m, k] x [k, n]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MatmulPoint {
    /// Rows: tokens.
    pub m: f64,
    /// Outputs.
    pub n: f64,
    /// Inputs: what is summed over.
    pub k: f64,
    /// FLOP/s reached.
    pub flops: f64,
    /// Which product it was: `forward`, `dx` or `dw`. Absent: stands for all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub form: Option<MatmulForm>,
}

/// The three products of a linear layer; a library may be unequally good at them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MatmulForm {
    /// `y = x W^T`.
    Forward,
    /// `dx = dy W`.
    Dx,
    /// `dW = dy^T x`.
    Dw,
}

/// Attention, as shares of the matmul ceiling of the type.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionRates {
    /// Forward.
    pub forward: Number,
    /// Backward, over all five products.
    pub backward: Number,
}

/// Key of [`Part::ops`] for an operation on values of `dtype`: its name for bf16, and with the type behind it for others, which is
/// looked for before the plain name.
pub fn op_key(op: &str, dtype: zrt_kernels::DType) -> String {
    if dtype == zrt_kernels::DType::BF16 { op.to_string() } else { format!("{op}_{}", dtype.name()) }
}

/// Rates of one operation: it takes `overhead + max(flops / flops_per_s, bytes / bytes_per_s)`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OpRate {
    /// FLOP/s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flops_per_s: Option<Number>,
    /// Bytes/s of operands, each read or written once, as the simulated device counts them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_s: Option<Number>,
    /// Seconds a call; absent: the part's `op_overhead`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overhead: Option<Number>,
}

/// How streams slow each other.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "snake_case", tag = "kind")]
pub enum Overlap {
    /// Compute and collectives run together, each slower by a factor.
    Factors {
        /// On compute while a collective runs.
        compute: Number,
        /// On a collective while compute runs.
        collective: Number,
    },
    /// All streams share the same cores: `busy` streams run at `threads / busy` of their speed, when that is below 1.
    SharedCores,
}

/// A part's link to host memory, one direction.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostLink {
    /// Bytes/s reached from the host.
    pub to_device: Number,
    /// Bytes/s reached to the host.
    pub to_host: Number,
    /// Seconds before the first byte.
    pub latency: Number,
}

/// A host with parts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// As written in a machine spec. Usually the part's name.
    pub name: String,
    /// Other names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<String>,
    /// Name of the part.
    pub part: String,
    /// Parts in one host, at most.
    pub devices: usize,
    /// Links between the parts of a host.
    pub links: Links,
    /// The host.
    pub host: Host,
    /// Between hosts; absent: one host only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<Network>,
    /// Local disks; absent: unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nvme: Option<Nvme>,
    /// What it costs; absent: unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub price: Option<Price>,
}

/// Shapes of the link graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Graph {
    /// Every pair of devices has one link of its own: `n` devices have `n - 1` links each.
    Mesh,
    /// A switch: each device has its full bandwidth to any other.
    Switch,
    /// Through the host's memory: PCIe without peer access, or ranks on CPUs.
    Host,
    /// One device: no links.
    None,
}

/// Links between the devices of a host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Links {
    /// Their shape.
    pub graph: Graph,
    /// Bytes/s that collectives reach, one direction: of one link (mesh), of a device (switch, host).
    pub bandwidth: Number,
    /// Mesh: share that `n - 1` links used together reach of `n - 1` times one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub together: Option<Number>,
    /// Bus bandwidth measured with so many devices: replaces the arithmetic for that count.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bus: Vec<BusPoint>,
    /// Seconds of one step of a collective.
    pub latency: Number,
    /// Message (bytes a rank sends) at which half of the bandwidth is reached.
    pub half_bytes: Number,
    /// Measured collectives: replace all of the above for their (operation, ranks), between and beyond sizes by lines.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub collectives: Vec<CollectivePoint>,
}

/// Bus bandwidth with so many devices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BusPoint {
    /// Devices.
    pub ranks: usize,
    /// Bytes/s as nccl-tests define bus bandwidth.
    pub bandwidth: Number,
}

/// One measured collective.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CollectivePoint {
    /// `all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all`, `broadcast` or `barrier`.
    pub op: String,
    /// Ranks.
    pub ranks: usize,
    /// Bytes of the longer operand (all parts together); 0 for a barrier.
    pub bytes: f64,
    /// Seconds, as the slowest rank sees it.
    pub secs: f64,
}

/// A host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Host {
    /// Usable bytes of memory.
    pub memory: Number,
    /// Bytes/s of memory over all sockets, nominal.
    pub bandwidth: Number,
    /// Share of it that AdamW on the host reaches.
    pub adam_efficiency: Number,
    /// Sockets, or NUMA nodes: a device's share of bandwidth is its node's.
    pub numa_nodes: usize,
    /// Cores.
    pub cores: usize,
}

/// Between hosts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Network {
    /// Bytes/s of a host, one direction, nominal.
    pub bandwidth: Number,
    /// Share of it that collectives reach.
    pub efficiency: Number,
    /// Seconds of one step of a collective.
    pub latency: Number,
}

/// Local disks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Nvme {
    /// Bytes.
    pub bytes: Number,
    /// Bytes/s of reading, all drives.
    pub read: Number,
}

/// A price, which moves every week.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Price {
    /// US dollars for one device and hour.
    pub per_device_hour: Number,
    /// When it was read, as `2026-06`.
    pub date: String,
}

impl Sheet {
    /// Reads a sheet; `origin` is named in errors.
    pub fn parse(text: &str, origin: &str) -> Result<Sheet> {
        let sheet: Sheet = toml::from_str(text).map_err(|e| Error::Input(format!("{origin}: {}", e.to_string().trim_end())))?;
        let problems = sheet.problems();
        if problems.is_empty() { Ok(sheet) } else { Err(Error::Input(format!("{origin}: {}", problems.join("; ")))) }
    }

    /// The sheet as a file.
    pub fn to_toml(&self) -> Result<String> {
        toml::to_string(self).map_err(|e| Error::Input(format!("a hardware file cannot be written: {e}")))
    }

    /// What cannot be: sizes that are not positive, shares above one, a ceiling above the peak.
    fn problems(&self) -> Vec<String> {
        let mut out = Vec::new();
        let mut check = |name: &str, n: &Number, positive: bool| out.extend(n.problem(positive).map(|p| format!("{name}: {p}")));
        let mut share = Vec::new();
        if let Some(p) = &self.part {
            check("part.memory.bytes", &p.memory.bytes, true);
            check("part.memory.bandwidth", &p.memory.bandwidth, true);
            check("part.memory.reserved", &p.memory.reserved, false);
            check("part.op_overhead", &p.op_overhead, false);
            share.extend([("part.memory.efficiency", &p.memory.efficiency)]);
            share.extend([("part.attention.forward", &p.attention.forward), ("part.attention.backward", &p.attention.backward)]);
            for (dtype, m) in &p.matmul {
                check(&format!("part.matmul.{dtype}.peak"), &m.peak, true);
                check(&format!("part.matmul.{dtype}.ceiling"), &m.ceiling, true);
                share.push(("part.matmul.share", &m.share));
            }
            for (op, rate) in &p.ops {
                let numbers = [&rate.flops_per_s, &rate.bytes_per_s].into_iter().flatten();
                numbers.for_each(|n| check(&format!("part.ops.{op}"), n, true));
            }
            for n in p.host_link.iter().flat_map(|l| [&l.to_device, &l.to_host]) {
                check("part.host_link", n, true);
            }
        }
        if let Some(m) = &self.machine {
            check("machine.links.bandwidth", &m.links.bandwidth, true);
            check("machine.links.latency", &m.links.latency, false);
            check("machine.links.half_bytes", &m.links.half_bytes, false);
            check("machine.host.memory", &m.host.memory, true);
            check("machine.host.bandwidth", &m.host.bandwidth, true);
            share.push(("machine.host.adam_efficiency", &m.host.adam_efficiency));
            m.links.bus.iter().for_each(|b| check("machine.links.bus", &b.bandwidth, true));
            share.extend(m.links.together.iter().map(|n| ("machine.links.together", n)));
            if let Some(n) = &m.network {
                check("machine.network.bandwidth", &n.bandwidth, true);
                share.push(("machine.network.efficiency", &n.efficiency));
            }
            m.price.iter().for_each(|p| check("machine.price.per_device_hour", &p.per_device_hour, false));
        }
        for (name, n) in share {
            check(name, n, true);
        }
        if let Some(p) = &self.part {
            for (dtype, m) in p.matmul.iter().filter(|(_, m)| m.ceiling.value > m.peak.value) {
                out.push(format!("part.matmul.{dtype}: the ceiling {} is above the peak {}", m.ceiling.value, m.peak.value));
            }
            for (dtype, m) in &p.matmul {
                let ordered = m.by_flops.windows(2).all(|w| w[0].0 < w[1].0) && m.by_flops.iter().all(|p| p.0 > 0.0 && p.1 > 0.0);
                if !ordered {
                    out.push(format!("part.matmul.{dtype}.by_flops: expected ascending FLOPs and positive shares"));
                }
                if m.points.iter().any(|p| [p.m, p.n, p.k, p.flops].iter().any(|v| !(v.is_finite() && *v > 0.0))) {
                    out.push(format!("part.matmul.{dtype}.points: expected positive sizes and rates"));
                }
            }
            if p.matmul.is_empty() {
                out.push("part.matmul: expected a rate for bf16 at least".into());
            }
        }
        if let Some(m) = &self.machine {
            if m.devices == 0 || m.host.numa_nodes == 0 || m.host.cores == 0 {
                out.push("machine: devices, host.numa_nodes and host.cores are at least 1".into());
            }
            if m.links.collectives.iter().any(|c| c.ranks == 0 || !(c.bytes >= 0.0 && c.secs >= 0.0)) {
                out.push("machine.links.collectives: expected ranks of at least 1, bytes and seconds that are not negative".into());
            }
        }
        out
    }
}
