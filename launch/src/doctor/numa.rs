//! Where does host memory lie, seen from each GPU? Pinned memory lies on the node of the core that touches it first; a copy from the
//! other socket goes through the link between sockets, which all GPUs share.

use super::finding::{Finding, Group, Level};
use super::pci::PciGpu;
use super::tree::{Tree, Unread, bytes, kib, line, numbers};

const NODES: &str = "/sys/devices/system/node";

/// Nodes with memory, and what this process may use of them.
struct Nodes {
    /// (node, bytes in all, bytes free)
    memory: Vec<(usize, u64, u64)>,
    /// Nodes on which this process may have memory.
    allowed: Vec<usize>,
    /// Cores that it may run on.
    cores: Vec<usize>,
}

impl Nodes {
    fn read(tree: &Tree) -> Result<Nodes, Unread> {
        let number = |name: String| name.strip_prefix("node").and_then(|n| n.parse::<usize>().ok());
        let size = |node: usize| {
            let text = tree.read(&format!("{NODES}/node{node}/meminfo")).ok()?;
            Some((node, kib(&text, "MemTotal").filter(|n| *n > 0)?, kib(&text, "MemFree").unwrap_or(0)))
        };
        let memory = tree.names(NODES)?.into_iter().filter_map(number).filter_map(size).collect();
        let status = tree.read("/proc/self/status")?;
        let list = |key: &str| numbers(line(&status, key).unwrap_or_default());
        Ok(Nodes { memory, allowed: list("Mems_allowed_list"), cores: list("Cpus_allowed_list") })
    }
}

/// The nodes, and for each GPU whether its own may be used.
pub fn findings(gpus: &[PciGpu], tree: &Tree) -> Vec<Finding> {
    let nodes = match Nodes::read(tree) {
        Ok(nodes) => nodes,
        Err(why) => return vec![Finding::unread(Group::Numa, "NUMA nodes", &why)],
    };
    let list: Vec<String> =
        nodes.memory.iter().map(|(node, total, free)| format!("node {node}: {}, {} free", bytes(*total), bytes(*free))).collect();
    let mut found = vec![Finding::ok(Group::Numa, "NUMA nodes", if list.is_empty() { "one".into() } else { list.join("; ") })];
    found.extend(gpus.iter().map(|gpu| near(gpu, &nodes)));
    let mut of: Vec<usize> = gpus.iter().filter_map(|g| g.node).collect();
    of.sort_unstable();
    of.dedup();
    if gpus.len() > 1 && of.len() == 1 && nodes.memory.len() > 1 {
        let text = format!("all {} are on node {}: their copies share the memory channels of one socket", gpus.len(), of[0]);
        let fix = "with weights at home on the host, two GPUs on different sockets have twice the memory bandwidth: choose such a pair if the host has one";
        found.push(Finding::new(Level::Note, Group::Numa, "sockets of the GPUs", text).fix(fix));
    }
    found
}

fn near(gpu: &PciGpu, nodes: &Nodes) -> Finding {
    let what = format!("pinned memory for {}", gpu.address);
    let Some(node) = gpu.node else {
        if nodes.memory.len() <= 1 {
            return Finding::ok(Group::Numa, what, "one node: all memory is near");
        }
        let fix = "rented machines often hide it: numactl -H shows the nodes; give a rank's cores to the node whose copies are faster";
        return Finding::new(Level::Note, Group::Numa, what, "could not be read: the firmware does not say which node the GPU is on")
            .fix(fix);
    };
    let cores = numbers(&gpu.cores);
    let expected = format!("node {node}, cores {}", gpu.cores);
    let bad =
        |found: String, fix: String| Finding::new(Level::Warning, Group::Numa, what.clone(), found).expected(expected.clone()).fix(fix);
    if !nodes.allowed.is_empty() && !nodes.allowed.contains(&node) {
        let fix = format!("start without numactl --membind; containers: --cpuset-mems with node {node} in it; Slurm: --mem-bind=none");
        return bad(format!("this process may not have memory on node {node}: all copies cross the sockets"), fix);
    }
    if !cores.is_empty() && !nodes.cores.is_empty() && !cores.iter().any(|c| nodes.cores.contains(c)) {
        let fix = format!(
            "start without taskset or numactl --cpunodebind; containers: --cpuset-cpus with some of {}; Slurm: --cpu-bind=none",
            gpu.cores
        );
        return bad(format!("this process may run on no core of node {node}: what its threads touch first lies on another"), fix);
    }
    Finding::ok(Group::Numa, what, expected)
}
