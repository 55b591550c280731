//! Is the kernel set up for GPUs that share memory with the host? NUMA balancing, IOMMU, huge pages, clock governor, and a few
//! settings of `/proc/sys`: those that AMD's and NVIDIA's guides for training hosts name.

use super::finding::{Finding, Group, Level};
use super::pci::PciGpu;
use super::tree::Tree;

fn ok(what: &str, found: impl Into<String>) -> Finding {
    Finding::ok(Group::Kernel, what, found)
}

fn warning(what: &str, found: impl Into<String>) -> Finding {
    Finding::new(Level::Warning, Group::Kernel, what, found)
}

fn note(what: &str, found: impl Into<String>) -> Finding {
    Finding::new(Level::Note, Group::Kernel, what, found)
}

/// True on a virtual machine, whose host decides much of this.
pub fn is_virtual(tree: &Tree) -> bool {
    let text = tree.read("/proc/cpuinfo").unwrap_or_default();
    text.lines().any(|l| l.starts_with("flags") && l.split_whitespace().any(|flag| flag == "hypervisor"))
}

/// All settings.
pub fn findings(tree: &Tree, gpus: &[PciGpu]) -> Vec<Finding> {
    let mut found = vec![version(tree), numa_balancing(tree), iommu(tree, gpus), huge_pages(tree), governor(tree)];
    found.extend(watchdog(tree));
    found.extend(overcommit(tree));
    found
}

fn version(tree: &Tree) -> Finding {
    match tree.read("/proc/sys/kernel/osrelease") {
        Ok(text) => ok("kernel", if is_virtual(tree) { format!("{text}, on a virtual machine") } else { text }),
        Err(why) => Finding::unread(Group::Kernel, "kernel", &why),
    }
}

fn numa_balancing(tree: &Tree) -> Finding {
    const WHAT: &str = "NUMA balancing";
    match tree.read("/proc/sys/kernel/numa_balancing") {
        Ok(text) if text == "0" => ok(WHAT, "off"),
        Ok(text) => {
            let found =
                format!("on ({text}): the kernel unmaps pages to see who uses them, and copies and collectives stall on the faults");
            let fix =
                "sudo sysctl kernel.numa_balancing=0; to keep it: echo kernel.numa_balancing=0 | sudo tee /etc/sysctl.d/90-zlaunch.conf";
            // With one node there is nothing to balance.
            let one = tree.names("/sys/devices/system/node").is_ok_and(|n| !n.iter().any(|n| n == "node1"));
            let finding = warning(WHAT, found).expected("off").fix(fix);
            if one { finding.softened() } else { finding }
        }
        Err(why) => Finding::unread(Group::Kernel, WHAT, &why),
    }
}

/// What the GPUs' own groups say; else what the kernel was started with.
fn iommu(tree: &Tree, gpus: &[PciGpu]) -> Finding {
    const WHAT: &str = "IOMMU";
    const FIX: &str = "add iommu=pt to GRUB_CMDLINE_LINUX in /etc/default/grub, then sudo update-grub (or grub2-mkconfig -o /boot/grub2/grub.cfg) and restart";
    let translated: Vec<&PciGpu> = gpus.iter().filter(|g| g.iommu.as_ref().is_some_and(|mode| mode.starts_with("DMA"))).collect();
    if let Some(first) = translated.first() {
        let mode = first.iommu.as_deref().unwrap_or_default();
        let found = format!(
            "it translates the addresses of {} of {} GPUs ({mode}): slower copies, and peers may not reach each other",
            translated.len(),
            gpus.len()
        );
        return warning(WHAT, found).expected("identity (pass-through)").fix(FIX);
    }
    if gpus.iter().any(|g| g.iommu.as_deref() == Some("identity")) {
        return ok(WHAT, "pass-through");
    }
    let command = match tree.read("/proc/cmdline") {
        Ok(text) => text,
        Err(why) => return Finding::unread(Group::Kernel, WHAT, &why),
    };
    let has = |word: &str| command.split_whitespace().any(|w| w == word);
    if has("iommu=pt") || has("iommu.passthrough=1") {
        return ok(WHAT, "pass-through (iommu=pt)");
    }
    if has("iommu=off") || has("amd_iommu=off") || has("intel_iommu=off") {
        return ok(WHAT, "off");
    }
    match tree.names("/sys/class/iommu") {
        Ok(units) if !units.is_empty() => warning(WHAT, "on, and the kernel was not started with iommu=pt").expected("iommu=pt").fix(FIX),
        _ if is_virtual(tree) => ok(WHAT, "none in this virtual machine: its host has it in hand"),
        _ => ok(WHAT, "none"),
    }
}

fn huge_pages(tree: &Tree) -> Finding {
    const WHAT: &str = "transparent huge pages";
    const FILE: &str = "/sys/kernel/mm/transparent_hugepage/enabled";
    let text = match tree.read(FILE) {
        Ok(text) => text,
        Err(why) => return Finding::unread(Group::Kernel, WHAT, &why),
    };
    let chosen = text.split_once('[').and_then(|(_, rest)| rest.split_once(']')).map_or(text.as_str(), |(mode, _)| mode);
    match chosen {
        "always" => ok(WHAT, "always"),
        "madvise" => ok(WHAT, "where asked for, as zlaunch does for its large buffers"),
        other => warning(WHAT, format!("{other}: large buffers have a page every 4 KiB, and pinning them takes long"))
            .expected("always or madvise")
            .fix(format!("echo always | sudo tee {FILE}; to keep it: transparent_hugepage=always on the kernel's command line")),
    }
}

fn governor(tree: &Tree) -> Finding {
    const WHAT: &str = "clock governor";
    const CORES: &str = "/sys/devices/system/cpu";
    let cores = match tree.names(CORES) {
        Ok(names) => names,
        Err(why) => return Finding::unread(Group::Kernel, WHAT, &why),
    };
    let is_core = |name: &&String| name.strip_prefix("cpu").is_some_and(|n| n.bytes().all(|b| b.is_ascii_digit()));
    let of = |core: &String| tree.read(&format!("{CORES}/{core}/cpufreq/scaling_governor")).ok();
    let mut governors: Vec<String> = cores.iter().filter(is_core).filter_map(of).collect();
    governors.sort();
    governors.dedup();
    match governors.as_slice() {
        [] => note(WHAT, "could not be read: this machine does not let its clock be seen"),
        [one] if one == "performance" => ok(WHAT, "performance"),
        several => note(WHAT, several.join(", ")).expected("performance").fix("sudo cpupower frequency-set -g performance"),
    }
}

fn watchdog(tree: &Tree) -> Option<Finding> {
    let on = tree.value::<u32>("/proc/sys/kernel/nmi_watchdog")? != 0;
    Some(if on {
        note("NMI watchdog", "on: interrupts that every core gets").expected("off").fix("sudo sysctl kernel.nmi_watchdog=0")
    } else {
        ok("NMI watchdog", "off")
    })
}

fn overcommit(tree: &Tree) -> Option<Finding> {
    let strict = tree.value::<u32>("/proc/sys/vm/overcommit_memory")? == 2;
    strict.then(|| {
        warning("memory overcommit", "strict (2): files and shared memory that are mapped count in full, and reservations fail early")
            .expected("0 or 1")
            .fix("sudo sysctl vm.overcommit_memory=0")
    })
}
