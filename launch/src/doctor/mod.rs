//! `zlaunch doctor`: is this machine set up for training? Reads what kernel, drivers and libraries say, measures for about a second,
//! and prints each finding beside what it should be and how to get there. It reports and never fails: on rented machines and in
//! containers much cannot be read or changed, and a machine without a GPU is a machine too.
//!
//! * [`tree`] where facts come from; [`finding`] what is made of them.
//! * [`pci`], [`graph`], [`gpu`] devices, links, libraries, which [`ask`] asks; [`numa`], [`kernel`], [`limits`], [`network`] the host; [`speed`] measurements.

mod ask;
mod finding;
mod gpu;
mod graph;
mod kernel;
mod limits;
mod network;
mod numa;
mod pci;
mod speed;
#[cfg(test)]
mod tests;
mod tree;

use crate::fault::Fault;
use finding::{Finding, Group, Level};
use gpu::GpuProbe;
use std::path::PathBuf;
use tree::Tree;
use zrt::config::Config;
use zrt_kernels::gpu::driver::Vendor;

/// `zlaunch doctor`
#[derive(Debug, clap::Args)]
pub struct DoctorArgs {
    /// Look with this configuration's `device` section: the kind of device, and where the vendor's libraries are
    #[arg(value_name = "TRAIN.TOML")]
    pub file: Option<PathBuf>,
    /// Override a key of it
    #[arg(long, value_name = "KEY=VALUE", requires = "file")]
    pub set: Vec<String>,
    /// One line of JSON instead of a report
    #[arg(long)]
    pub json: bool,
}

/// Looks, measures, prints.
pub fn run(args: &DoctorArgs) -> Result<u8, Fault> {
    let config = args.file.as_deref().map(|file| Config::load(file, &args.set)).transpose()?;
    let libraries = config.as_ref().map(zrt::device::libraries).unwrap_or_default();
    let only = config.as_ref().and_then(zrt::device::vendor);
    let tree = Tree::new("/");
    let gpus = pci::gpus(&tree).unwrap_or_default();
    ask::with_environment(&gpus, only);
    let mut found = examine(&tree, &crate::proc::host(), Some(&ask::probe(&gpus, libraries, only)));
    found.extend(speed::findings(&tree, &gpus));
    let found = in_groups(found);
    crate::print(if args.json { json(&found) } else { text(&found) })
}

/// All that can be known without measuring.
fn examine(tree: &Tree, host: &str, probe: Option<&GpuProbe>) -> Vec<Finding> {
    let read = pci::gpus(tree);
    let seen = probe.map_or(0, |p| p.devices.len());
    let mut found = match &read {
        Ok(gpus) if gpus.is_empty() && seen > 0 => {
            let text = format!("none on the PCI bus as it is seen here, though drivers have {seen}");
            vec![Finding::new(Level::Note, Group::Devices, "GPUs", text)]
        }
        _ => pci::findings(&read, tree),
    };
    let gpus = read.unwrap_or_default();
    let any = !gpus.is_empty() || pci::driver_file(tree).is_some() || seen > 0;
    let made_by = |vendor: Vendor| gpus.iter().any(|g| g.vendor == vendor);
    found.extend(limits::device_files(tree, made_by(Vendor::Amd), made_by(Vendor::Nvidia)));
    found.extend(graph::findings(&gpus, tree));
    found.extend(probe.into_iter().flat_map(|p| gpu::findings(p, &gpus)));
    found.extend(numa::findings(&gpus, tree));
    let settings = kernel::findings(tree, &gpus);
    // They cost little where no GPU copies.
    found.extend(settings.into_iter().map(|f| if any { f } else { f.softened() }));
    found.extend(limits::findings(tree, any));
    found.extend(network::findings(tree, host));
    found
}

fn in_groups(mut found: Vec<Finding>) -> Vec<Finding> {
    found.sort_by_key(|f| f.group);
    found
}

fn count(found: &[Finding], level: Level) -> usize {
    found.iter().filter(|f| f.level == level).count()
}

fn title(group: Group) -> &'static str {
    match group {
        Group::Devices => "Devices and drivers",
        Group::Libraries => "Libraries",
        Group::Links => "Links",
        Group::Numa => "NUMA",
        Group::Kernel => "Kernel",
        Group::Limits => "Limits and memory",
        Group::Network => "Network",
        Group::Speed => "Speed",
    }
}

fn mark(level: Level) -> &'static str {
    match level {
        Level::Ok => "ok",
        Level::Note => "note",
        Level::Warning => "WARNING",
        Level::Problem => "PROBLEM",
    }
}

/// Findings under headings; what to do stands below what is not as it should be.
fn text(found: &[Finding]) -> String {
    let mut lines: Vec<String> = Vec::new();
    let mut last = None;
    for f in found {
        if last != Some(f.group) {
            lines.extend(last.map(|_| String::new()));
            lines.push(title(f.group).into());
            last = Some(f.group);
        }
        lines.push(format!("  {:<8} {}: {}", mark(f.level), f.what, f.found));
        for (name, value) in [("expected", &f.expected), ("fix", &f.fix)] {
            if f.level != Level::Ok && !value.is_empty() {
                lines.push(format!("           {name}: {value}"));
            }
        }
    }
    let plural = |n: usize, word: &str| format!("{n} {word}{}", if n == 1 { "" } else { "s" });
    let counts = [(Level::Problem, "problem"), (Level::Warning, "warning"), (Level::Note, "note")];
    let counts: Vec<String> = counts.iter().map(|(level, word)| plural(count(found, *level), word)).collect();
    lines.extend([String::new(), counts.join(", ")]);
    lines.join("\n")
}

fn json(found: &[Finding]) -> String {
    let counts = serde_json::json!({
        "problems": count(found, Level::Problem),
        "warnings": count(found, Level::Warning),
        "notes": count(found, Level::Note),
    });
    serde_json::json!({ "counts": counts, "findings": found }).to_string()
}
