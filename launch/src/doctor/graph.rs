//! How do AMD's GPUs reach each other? The topology that the kernel driver gives in `/sys/class/kfd`: nodes, and links between them.
//! NVIDIA's links are known to its driver only; what that says is in [`super::gpu`].

use super::finding::{Finding, Group, Level};
use super::pci::PciGpu;
use super::tree::{Tree, Unread, line};
use std::collections::BTreeMap;
use zrt_kernels::gpu::driver::Vendor;

const NODES: &str = "/sys/class/kfd/kfd/topology/nodes";

/// Kinds of links in the topology.
const XGMI: u64 = 11;

/// A GPU of the topology.
#[derive(Clone, Debug, PartialEq)]
struct Node {
    number: u64,
    arch: String,
    /// (other node, MB/s) of its xGMI links.
    xgmi: BTreeMap<u64, u64>,
}

fn number(text: &str, key: &str) -> Option<u64> {
    line(text, &format!("{key} "))?.parse().ok()
}

/// `gfx942` of 90402: major, two digits of minor, two of stepping.
fn arch(version: u64) -> String {
    format!("gfx{}{:x}{:x}", version / 10_000, version / 100 % 100, version % 100)
}

/// GPUs that may be used here, and how many are hidden.
fn nodes(tree: &Tree) -> Result<(Vec<Node>, usize), Unread> {
    let (mut gpus, mut hidden) = (Vec::new(), 0);
    for name in tree.names(NODES)? {
        let Ok(text) = tree.read(&format!("{NODES}/{name}/properties")) else {
            hidden += 1;
            continue;
        };
        // Processors are nodes without SIMD units.
        if number(&text, "simd_count").is_none_or(|n| n == 0) {
            continue;
        }
        let folder = format!("{NODES}/{name}/io_links");
        let links = tree.names(&folder).unwrap_or_default();
        let link = |l: &String| {
            let text = tree.read(&format!("{folder}/{l}/properties")).ok()?;
            let to = number(&text, "node_to")?;
            (number(&text, "type")? == XGMI).then(|| (to, number(&text, "max_bandwidth").unwrap_or(0)))
        };
        gpus.push(Node {
            number: name.parse().unwrap_or(u64::MAX),
            arch: number(&text, "gfx_target_version").map_or_else(|| "unknown".into(), arch),
            xgmi: links.iter().filter_map(link).collect(),
        });
    }
    Ok((gpus, hidden))
}

/// The graph, when there are AMD GPUs.
pub fn findings(gpus: &[PciGpu], tree: &Tree) -> Vec<Finding> {
    if gpus.iter().all(|g| g.vendor != Vendor::Amd) {
        return Vec::new();
    }
    let (nodes, hidden) = match nodes(tree) {
        Ok(found) => found,
        Err(why) => return vec![Finding::unread(Group::Links, "links between GPUs", &why)],
    };
    let mut found = vec![seen(&nodes, hidden, gpus.len())];
    if nodes.len() > 1 {
        found.push(pairs(&nodes));
    }
    found
}

fn seen(nodes: &[Node], hidden: usize, on_bus: usize) -> Finding {
    let mut archs: Vec<&str> = nodes.iter().map(|n| n.arch.as_str()).collect();
    archs.dedup();
    let hidden = if hidden > 0 { format!("; hidden from this process: {hidden}") } else { String::new() };
    let text = format!("{} GPUs for compute ({}){hidden}", nodes.len(), archs.join(", "));
    if nodes.is_empty() {
        return Finding::new(Level::Problem, Group::Devices, "compute topology", format!("no GPU for compute{hidden}"))
            .expected(format!("{on_bus}, as on the PCI bus"))
            .fix("read dmesg | grep -i -e kfd -e amdgpu; in a container: start it with --device=/dev/kfd --device=/dev/dri");
    }
    let level = if archs.len() > 1 { Level::Note } else { Level::Ok };
    Finding::new(level, Group::Devices, "compute topology", text)
}

fn pairs(nodes: &[Node]) -> Finding {
    const WHAT: &str = "links between GPUs";
    let all: Vec<(&Node, &Node)> = nodes.iter().enumerate().flat_map(|(i, a)| nodes[i + 1..].iter().map(move |b| (a, b))).collect();
    let without: Vec<String> =
        all.iter().filter(|(a, b)| !a.xgmi.contains_key(&b.number)).map(|(a, b)| format!("{} and {}", a.number, b.number)).collect();
    if without.is_empty() {
        let least = all.iter().filter_map(|(a, b)| a.xgmi.get(&b.number)).min().copied().unwrap_or(0);
        // 0: the firmware does not say.
        let rate = if least > 0 { format!(", at least {} GB/s nominal", least / 1000) } else { String::new() };
        return Finding::ok(Group::Links, WHAT, format!("each of {} pairs has xGMI{rate}", all.len()));
    }
    let found = format!("{} of {} pairs have no xGMI: nodes {}", without.len(), all.len(), without.join("; "));
    let bridged = nodes.iter().any(|n| !n.xgmi.is_empty());
    // Cards in slots have PCIe only: nothing is broken there.
    let level = if bridged { Level::Warning } else { Level::Note };
    Finding::new(level, Group::Links, WHAT, found).expected("xGMI between any two").fix(
        "such pairs talk over PCIe: choose GPUs that are joined (rocm-smi --showtopo; HIP_VISIBLE_DEVICES), \
         prefer replicated weights (zero.stage = 0), which send least; a link that was there before: read dmesg for xgmi errors and reset the host",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_architectures() {
        assert_eq!([arch(90_402), arch(90_010), arch(110_000), arch(90_500)], ["gfx942", "gfx90a", "gfx1100", "gfx950"]);
    }
}
