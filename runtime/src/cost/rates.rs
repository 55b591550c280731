//! Seconds of one unit of work on a machine, and which number of the catalogue decides them.
//!
//! Products take their FLOPs at a rate by shape, or their bytes at the memory's; attention a share of the product rate; everything
//! else moves bytes. Collectives are alpha-beta over the link graph with a size at which half of the bandwidth is reached; copies
//! cross the host link; the optimizer on the host moves the bytes of its share of host memory.

use super::catalogue::Cluster;
use super::number::{Case, Number};
use super::sheet::{CollectivePoint, Graph, Matmul, MatmulForm, MatmulPoint, Overlap, PartKind, op_key};
use serde::Serialize;
use zrt_kernels::DType;
use zrt_kernels::sim::clock::{Class, Sharing};
use zrt_kernels::sim::work::forms;
use zrt_kernels::sim::{Kind, Work};

/// What a prediction rests on: groups of numbers of the catalogue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// Rate of matrix products.
    Matmul,
    /// Rate of attention.
    Attention,
    /// Bandwidth of device memory.
    Memory,
    /// Cost of a call beside its work.
    Overhead,
    /// How compute and collectives slow each other.
    Overlap,
    /// Links between devices of a host.
    Links,
    /// Between hosts.
    Network,
    /// Between host and device.
    HostLink,
    /// Memory of the host.
    HostMemory,
}

impl Limit {
    /// All of them.
    pub const ALL: [Limit; 9] = [
        Limit::Matmul,
        Limit::Attention,
        Limit::Memory,
        Limit::Overhead,
        Limit::Overlap,
        Limit::Links,
        Limit::Network,
        Limit::HostLink,
        Limit::HostMemory,
    ];
}

/// Seconds, and what decides them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// Seconds alone on the machine.
    pub secs: f64,
    /// Seconds of these that are the call's own cost.
    pub overhead: f64,
    /// What decides the rest.
    pub limit: Limit,
}

/// The rates of one rank of a cluster.
pub struct Rates<'a> {
    cluster: &'a Cluster,
    /// CPU: this rank's share of the machine; else 1.
    share: f64,
    /// CPU: threads of a rank.
    threads: usize,
    case: Case,
}

impl<'a> Rates<'a> {
    /// Rates in `case`; `threads` are those of a CPU rank.
    pub fn new(cluster: &'a Cluster, threads: usize, case: Case) -> Rates<'a> {
        let share = match cluster.part.kind {
            PartKind::Gpu => 1.0,
            PartKind::Cpu => {
                let cores = cluster.machine.host.cores as f64;
                let faster = cluster.part.rank_per_core.as_ref().map_or(1.0, |n| n.rate(case));
                // Of the mean of both times: one rank on all cores takes longer, ranks on a core each take less.
                let pace = if threads == 1 { (1.0 + faster) / 2.0 } else { (1.0 + 1.0 / faster) / 2.0 };
                pace * (threads as f64 / cores).min(1.0 / cluster.devices as f64)
            }
        };
        Rates { cluster, share, threads, case }
    }

    fn rate(&self, n: &Number) -> f64 {
        n.rate(self.case)
    }

    /// How streams slow each other.
    pub fn sharing(&self) -> Sharing {
        match &self.cluster.part.overlap {
            Overlap::Factors { compute, collective } => {
                Sharing::Factors { compute: compute.cost(self.case).max(1.0), collective: collective.cost(self.case).max(1.0) }
            }
            Overlap::SharedCores => Sharing::Cores(self.threads as f64),
        }
    }

    /// What a work is to the clock.
    pub fn class(&self, work: &Work) -> Class {
        match work.kind {
            k if k.is_collective() => Class::Collective,
            Kind::Host => Class::Host,
            Kind::Copy | Kind::Write | Kind::Read if work.crosses || work.kind != Kind::Copy => Class::Link,
            _ if self.cluster.part.kind == PartKind::Gpu && work.host_bytes > 0 => Class::Host,
            _ => Class::Compute,
        }
    }

    /// Bytes/s that one rank gets of the device's memory.
    fn memory(&self) -> f64 {
        let m = &self.cluster.part.memory;
        self.rate(&m.bandwidth) * self.rate(&m.efficiency) * self.share
    }

    /// Bytes/s that one rank gets of the host's memory: all ranks of a host use it at once.
    fn host_memory(&self) -> f64 {
        match self.cluster.part.kind {
            PartKind::Cpu => self.memory(),
            PartKind::Gpu => {
                let h = &self.cluster.machine.host;
                self.rate(&h.bandwidth) * self.rate(&h.adam_efficiency) / self.cluster.devices as f64
            }
        }
    }

    fn matmul(&self, dtype: DType) -> Option<(&Matmul, f64)> {
        let by_type = &self.cluster.part.matmul;
        match by_type.get(dtype.name()) {
            Some(m) => Some((m, 1.0)),
            // Parts without a rate for f32: their vector units, about an eighth of the matrix units.
            None => by_type.get("bf16").or_else(|| by_type.values().next()).map(|m| (m, 0.125)),
        }
    }

    /// FLOP/s of a product of `m x n x k` in `form`.
    fn product_rate(&self, dtype: DType, form: MatmulForm, [m, n, k]: [f64; 3]) -> f64 {
        let Some((rates, factor)) = self.matmul(dtype) else { return 1.0 };
        let flops = if rates.points.is_empty() {
            self.rate(&rates.ceiling) * self.rate(&rates.share) * by_logarithm(&rates.by_flops, 2.0 * m * n * k)
        } else {
            let spread = self.rate(&rates.ceiling) / rates.ceiling.value;
            spread * nearest_points(&rates.points, form, [m, n, k])
        };
        flops * factor * self.share
    }

    /// What `work` costs.
    pub fn cost(&self, work: &Work) -> Cost {
        if work.kind.is_collective() {
            return self.collective(work.kind, work.bytes as f64);
        }
        let overhead = self.cluster.part.op_overhead.cost(self.case);
        let (memory, host) = (self.memory(), self.host_memory());
        let (bytes, host_bytes) = (work.bytes as f64, work.host_bytes as f64);
        let on_host = self.cluster.part.kind == PartKind::Gpu && work.host_bytes > 0;
        let moved = |secs: f64, limit: Limit| Cost { secs: secs + overhead, overhead, limit };
        match work.kind {
            Kind::Copy | Kind::Write | Kind::Read if self.cluster.part.kind == PartKind::Gpu => {
                if work.kind == Kind::Copy && !work.crosses {
                    // Read and written.
                    return if on_host {
                        moved(2.0 * host_bytes / host, Limit::HostMemory)
                    } else {
                        moved(2.0 * bytes / memory, Limit::Memory)
                    };
                }
                let to_host = work.kind == Kind::Read || work.host_bytes > 0;
                let Some(link) = &self.cluster.part.host_link else { return moved((bytes + host_bytes) / memory, Limit::Memory) };
                let rate = self.rate(if to_host { &link.to_host } else { &link.to_device });
                let latency = link.latency.cost(self.case);
                let crossing = (bytes + host_bytes) / rate;
                let in_host = (bytes + host_bytes) / host;
                let limit = if in_host > crossing { Limit::HostMemory } else { Limit::HostLink };
                Cost { secs: latency + crossing.max(in_host), overhead: latency, limit }
            }
            _ if on_host => {
                let name = if work.kind == Kind::AdamW { "adamw_host" } else { work.kind.name() };
                let own = self.op(name, work).filter(|_| work.kind == Kind::AdamW);
                let crossing = match &self.cluster.part.host_link {
                    Some(link) if work.crosses => bytes / self.rate(&link.to_host),
                    _ => 0.0,
                };
                let secs = own.unwrap_or(host_bytes / host);
                if crossing > secs { moved(crossing, Limit::HostLink) } else { moved(secs, Limit::HostMemory) }
            }
            Kind::Linear | Kind::LinearBackward | Kind::LinearCrossEntropy => {
                if let Some(secs) = self.op(work.kind.name(), work) {
                    return Cost { secs, overhead: 0.0, limit: Limit::Matmul };
                }
                let dims = work.dims.map(f64::from);
                let each = 2.0 * dims[0] * dims[1] * dims[2];
                let of = |bit: u8, form: MatmulForm| {
                    if work.forms & bit == 0 { 0.0 } else { each / self.product_rate(work.dtype, form, dims) }
                };
                let products = of(forms::FORWARD, MatmulForm::Forward) + of(forms::DX, MatmulForm::Dx) + of(forms::DW, MatmulForm::Dw);
                let calls = f64::from(work.forms.count_ones().max(1));
                let overhead = overhead * calls;
                let moving = (bytes + host_bytes) / memory;
                let limit = if moving > products { Limit::Memory } else { Limit::Matmul };
                Cost { secs: products.max(moving) + overhead, overhead, limit }
            }
            Kind::Attention | Kind::AttentionBackward => {
                if let Some(secs) = self.op(work.kind.name(), work) {
                    return Cost { secs, overhead: 0.0, limit: Limit::Attention };
                }
                let a = &self.cluster.part.attention;
                let share = self.rate(if work.kind == Kind::Attention { &a.forward } else { &a.backward });
                let (rates, factor) = match self.matmul(work.dtype) {
                    Some((m, factor)) => (m.ceiling.value, factor),
                    None => (1.0, 1.0),
                };
                let products = work.flops as f64 / (rates * factor * share * self.share);
                let moving = (bytes + host_bytes) / memory;
                let limit = if moving > products { Limit::Memory } else { Limit::Attention };
                Cost { secs: products.max(moving) + overhead, overhead, limit }
            }
            _ => match self.op(work.kind.name(), work) {
                Some(secs) => Cost { secs, overhead: 0.0, limit: Limit::Memory },
                None => moved((bytes + host_bytes) / memory, Limit::Memory),
            },
        }
    }

    /// By the part's own rate of an operation, where it has one.
    fn op(&self, name: &str, work: &Work) -> Option<f64> {
        let ops = &self.cluster.part.ops;
        let own = if work.dtype == DType::BF16 { None } else { ops.get(&op_key(name, work.dtype)) };
        let rate = own.or_else(|| ops.get(name))?;
        let by = |n: &Option<Number>, amount: f64| n.as_ref().map_or(0.0, |n| amount / (self.rate(n) * self.share));
        let overhead = rate.overhead.as_ref().unwrap_or(&self.cluster.part.op_overhead).cost(self.case);
        let bytes = (work.bytes + work.host_bytes) as f64;
        Some(overhead + by(&rate.flops_per_s, work.flops as f64).max(by(&rate.bytes_per_s, bytes)))
    }

    /// A collective of `bytes` in its longer operand over all ranks.
    pub fn collective(&self, kind: Kind, bytes: f64) -> Cost {
        let c = self.cluster;
        let (ranks, devices, hosts) = (c.ranks() as f64, c.devices as f64, c.hosts as f64);
        if c.ranks() <= 1 {
            return Cost { secs: 0.0, overhead: 0.0, limit: Limit::Links };
        }
        if c.hosts == 1
            && let Some(secs) = measured(&c.machine.links.collectives, kind, c.ranks(), bytes)
        {
            return Cost { secs, overhead: 0.0, limit: Limit::Links };
        }
        // Steps of the algorithm within a host and between hosts, and times that the whole length passes a link.
        let log2 = |n: f64| n.log2().ceil();
        let (steps, net_steps, passes) = match kind {
            Kind::AllReduce => (2.0 * (devices - 1.0), 2.0 * (hosts - 1.0), 2.0),
            Kind::Barrier => (2.0 * log2(devices), 2.0 * log2(hosts), 0.0),
            Kind::Broadcast => (log2(devices), log2(hosts), ranks / (ranks - 1.0)),
            _ => (devices - 1.0, hosts - 1.0, 1.0),
        };
        let links = &c.machine.links;
        let mut overhead = steps * links.latency.cost(self.case);
        let within = match c.devices {
            0 | 1 => 0.0,
            _ => {
                let sent = passes * bytes * (devices - 1.0) / devices;
                if sent > 0.0 { (sent + links.half_bytes.cost(self.case)) / self.bus(c.devices) } else { 0.0 }
            }
        };
        let between = match (&c.machine.network, c.hosts) {
            (Some(net), 2..) => {
                overhead += net_steps * net.latency.cost(self.case);
                // Ports belong to devices: a host that uses half of its devices has half of the ports.
                let ports = devices / c.machine.devices.max(c.devices) as f64;
                passes * bytes * (hosts - 1.0) / hosts / (self.rate(&net.bandwidth) * self.rate(&net.efficiency) * ports)
            }
            _ => 0.0,
        };
        // The two levels run as one pipeline: the slower one decides.
        let limit = if between > within { Limit::Network } else { Limit::Links };
        Cost { secs: overhead + within.max(between), overhead, limit }
    }

    /// Bus bandwidth of so many devices of a host.
    pub fn bus(&self, devices: usize) -> f64 {
        let links = &self.cluster.machine.links;
        if let Some(point) = links.bus.iter().find(|b| b.ranks == devices) {
            return self.rate(&point.bandwidth);
        }
        let one = self.rate(&links.bandwidth);
        match links.graph {
            Graph::Mesh if devices > 2 => one * (devices as f64 - 1.0) * links.together.as_ref().map_or(1.0, |t| self.rate(t)),
            _ => one,
        }
    }
}

/// Between points by the logarithm of x, constant beyond them; 1 without points.
fn by_logarithm(points: &[(f64, f64)], x: f64) -> f64 {
    let Some(after) = points.iter().position(|p| p.0 >= x) else { return points.last().map_or(1.0, |p| p.1) };
    if after == 0 {
        return points[0].1;
    }
    let ((x0, y0), (x1, y1)) = (points[after - 1], points[after]);
    y0 + (y1 - y0) * (x / x0).ln() / (x1 / x0).ln()
}

/// Measured products of the nearest shapes, weighted by the inverse cube of the distance in octaves; at a measured shape, that one.
fn nearest_points(points: &[MatmulPoint], form: MatmulForm, [m, n, k]: [f64; 3]) -> f64 {
    let own = points.iter().any(|p| p.form == Some(form));
    let (mut sum, mut weights) = (0.0, 0.0);
    for p in points.iter().filter(|p| if own { p.form == Some(form) } else { p.form.is_none() || p.form == Some(MatmulForm::Forward) }) {
        let octaves = [(p.m, m), (p.n, n), (p.k, k)].map(|(a, b)| (a / b).log2());
        let distance = octaves.iter().map(|o| o * o).sum::<f64>().sqrt();
        let weight = 1.0 / (distance + 1e-3).powi(3);
        sum += weight * p.flops;
        weights += weight;
    }
    // Points of other forms only: better than nothing.
    if weights > 0.0 { sum / weights } else { points.iter().map(|p| p.flops).sum::<f64>() / points.len() as f64 }
}

/// Between and beyond the measured sizes by lines.
fn measured(points: &[CollectivePoint], kind: Kind, ranks: usize, bytes: f64) -> Option<f64> {
    let mut own: Vec<(f64, f64)> = points.iter().filter(|p| p.op == kind.name() && p.ranks == ranks).map(|p| (p.bytes, p.secs)).collect();
    own.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (&first, &last) = (own.first()?, own.last()?);
    if own.len() == 1 || bytes <= first.0 {
        // Below the smallest size latency decides.
        return Some(if bytes > first.0 && first.0 > 0.0 { first.1 * bytes / first.0 } else { first.1 });
    }
    let after = own.iter().position(|p| p.0 >= bytes).unwrap_or(own.len() - 1).max(1);
    let (a, b) = (own[after - 1], own[after]);
    let line = a.1 + (b.1 - a.1) * (bytes - a.0) / (b.0 - a.0);
    Some(if bytes > last.0 { line.max(last.1) } else { line })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::Catalogue;

    fn cluster(spec: &str) -> Cluster {
        Catalogue::builtin().unwrap().cluster(spec).unwrap()
    }

    fn secs(spec: &str, kind: Kind, bytes: f64) -> f64 {
        Rates::new(&cluster(spec), 1, Case::Expected).collective(kind, bytes).secs
    }

    #[test]
    fn a_pair_has_one_link_and_eight_have_seven_each() {
        // SCALING: one full gather of a 70B over a pair of MI300X receives 70.55 GB, 1.47 s at 48 GB/s.
        let base = 141.1e9;
        let pair = secs("2xMI300X", Kind::AllGather, base);
        assert!((1.45..1.5).contains(&pair), "{pair}");
        let eight = secs("8xMI300X", Kind::AllGather, base);
        assert!((0.39..0.41).contains(&eight), "7/8 of 141 GB at 313 GB/s: {eight}");
        let four = secs("4xMI300X", Kind::AllGather, base);
        assert!(eight < four && four < pair);
        let (two, all) = (secs("2xH100", Kind::AllGather, base), secs("8xH100", Kind::AllGather, base));
        assert!((all / two - 1.75).abs() < 0.01, "a switch: 7/8 beside 1/2 of the bytes at one rate");
    }

    #[test]
    fn small_messages_cost_latency_and_hosts_the_network() {
        assert!(secs("8xH100", Kind::AllReduce, 8.0) > 1e-4);
        let (one, two) = (secs("8xH100", Kind::AllGather, 1e9), secs("16xH100", Kind::AllGather, 1e9));
        assert!(two > 0.9 * one);
        assert_eq!(secs("1xH100", Kind::AllGather, 1e9), 0.0);
        assert!(secs("8xMI300X", Kind::Barrier, 0.0) < 1e-4);
    }

    #[test]
    fn measured_points_win_and_lines_join_them() {
        let point = |bytes, secs| CollectivePoint { op: "all_gather".into(), ranks: 2, bytes, secs };
        let points = [point(1e3, 1e-5), point(1e6, 1e-3), point(2e6, 2e-3)];
        let at = |bytes| measured(&points, Kind::AllGather, 2, bytes).unwrap();
        assert_eq!((at(1.0), at(1e6)), (1e-5, 1e-3));
        assert!((at(1.5e6) - 1.5e-3).abs() < 1e-12 && (at(4e6) - 4e-3).abs() < 1e-12);
        assert_eq!(measured(&points, Kind::AllGather, 4, 1e3), None);
        let point = |m, flops| MatmulPoint { m, n: 64.0, k: 64.0, flops, form: None };
        let points = [point(64.0, 1e9), point(256.0, 4e9)];
        let rate = |m| nearest_points(&points, MatmulForm::Forward, [m, 64.0, 64.0]);
        assert!((rate(64.0) - 1e9).abs() < 1e5 && (rate(128.0) - 2.5e9).abs() < 1e5);
        assert_eq!(by_logarithm(&[(1.0, 0.5), (100.0, 1.0)], 10.0), 0.75);
    }

    #[test]
    fn no_product_is_above_the_measured_ceiling() {
        for spec in ["MI300X", "H100", "A100", "B200", "MI355X", "CPU"] {
            let k = cluster(spec);
            let rates = Rates::new(&k, 1, Case::Fast);
            let ceiling = k.part.matmul["bf16"].ceiling.high();
            for tokens in [128.0, 2048.0, 16384.0] {
                let rate = rates.product_rate(DType::BF16, MatmulForm::Forward, [tokens, 28672.0, 8192.0]);
                assert!(rate <= ceiling, "{spec}: {rate} above {ceiling}");
            }
        }
    }
}
