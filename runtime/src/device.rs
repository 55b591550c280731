//! Which device does a rank compute on? `device.kind` says it, or `"auto"`: a GPU where a driver and enough devices are found, else the CPU.
//!
//! The launcher decides once for all ranks ([`resolve`]) and says what it found; a rank then opens its own ([`open`]). From there on all is
//! the same: the trainer sees a [`Device`] and a communicator.

use crate::config::Config;
use crate::cost::{Catalogue, Cluster, Part, PartKind};
use crate::error::{Error, Result};
use crate::progress::StepReport;
use crate::run::{cpu_device, local_options, threads};
use crate::trainer::{Hook, Run};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use zrt_collectives::ccl::{CopyOptions, CopyWhen, GpuMemory, recommended_env};
use zrt_collectives::local::LocalComm;
use zrt_collectives::store::Store;
use zrt_collectives::{CclComm, CclOptions, Comm, Communicator, SoloComm};
use zrt_kernels::cpu::trace::TraceEvent;
use zrt_kernels::cpu::{CpuDevice, Mode};
use zrt_kernels::gpu::driver::{Facts, Libraries, Vendor, find};
use zrt_kernels::gpu::{CodeOptions, GpuDevice, GpuOptions};
use zrt_kernels::sim::{SimDevice, SimOptions};
use zrt_kernels::{Buffer, Category, Device, Place, gpu};

/// The device of a rank.
pub enum Computes {
    /// Cores of the host.
    Cpu(Arc<CpuDevice>),
    /// One GPU.
    Gpu(Arc<GpuDevice>, Vendor),
}

impl Computes {
    /// As the trainer sees it.
    pub fn device(&self) -> Arc<dyn Device> {
        match self {
            Computes::Cpu(device) => device.clone(),
            Computes::Gpu(device, _) => device.clone(),
        }
    }

    /// Takes its timeline.
    pub fn trace_events(&self) -> Vec<TraceEvent> {
        match self {
            Computes::Cpu(device) => device.trace_events(),
            Computes::Gpu(device, _) => device.trace_events(),
        }
    }

    /// Says what the device has to tell since it was opened: memory that could not be locked.
    pub fn notes(&self) -> Option<Box<dyn Hook>> {
        match self {
            Computes::Cpu(_) => None,
            Computes::Gpu(device, _) => Some(Box::new(Notes(device.clone()))),
        }
    }

    /// Joins the other ranks: through the vendor's library where several GPUs compute, else through the host's memory.
    ///
    /// # Errors
    /// Ranks that do not come, a library that is missing or fails.
    pub fn join(&self, config: &Config, store: Arc<dyn Store>, rank: usize, ranks: usize) -> Result<Comm> {
        match self {
            Computes::Gpu(device, vendor) if ranks > 1 => {
                let mut comm = CclComm::join(store.clone(), rank, ranks, device.clone(), ccl_options(config, *vendor))?;
                if let Some(options) = copy_options(config, *vendor, ranks) {
                    let memory = GpuMemory::of(device.clone())?;
                    // The others learn of it at once, and dropping the group waits for nobody.
                    let used = comm.use_copies(&*store, &memory, &options);
                    used.inspect_err(|e| comm.abort(&e.to_string()))?;
                }
                Ok(Arc::new(comm))
            }
            Computes::Gpu(..) => Ok(Arc::new(SoloComm::new())),
            _ => Ok(Arc::new(LocalComm::join(&*store, rank, ranks, local_options(config))?)),
        }
    }
}

/// Passes on what a device notes, when the first step has allocated all.
struct Notes(Arc<GpuDevice>);

impl Notes {
    fn pass(&self) {
        self.0.take_notes().iter().for_each(|note| tracing::warn!("{note}"));
    }
}

impl Hook for Notes {
    fn after_step(&mut self, _: &mut Run, _: &mut StepReport) -> Result<()> {
        self.pass();
        Ok(())
    }
    fn end(&mut self, _: &mut Run) -> Result<()> {
        self.pass();
        Ok(())
    }
}

/// The vendor that `device.kind` names; `None`: the CPU, or not decided yet.
pub fn vendor(config: &Config) -> Option<Vendor> {
    Vendor::ALL.into_iter().find(|v| v.kind() == config.device.kind)
}

/// Whether `device.kind` is a GPU's, decided.
pub fn uses_gpu(config: &Config) -> bool {
    vendor(config).is_some()
}

/// Where `[device.libraries]` says that the vendor's libraries are.
pub fn libraries(config: &Config) -> Libraries {
    let l = &config.device.libraries;
    Libraries { driver: l.driver.clone(), compiler: l.compiler.clone(), blas: l.blas.clone(), collectives: l.collectives.clone() }
}

fn ccl_options(config: &Config, vendor: Vendor) -> CclOptions {
    let secs = Duration::from_secs;
    CclOptions {
        library: libraries(config).collectives,
        init_timeout: secs(config.comm.init_timeout_seconds),
        train_timeout: secs(config.comm.train_timeout_seconds),
        heartbeat_timeout: secs(config.comm.heartbeat_timeout_seconds),
        deterministic: config.training.deterministic,
        ..CclOptions::new(vendor)
    }
}

/// How weights are gathered by copies, where they may be.
fn copy_options(config: &Config, vendor: Vendor, ranks: usize) -> Option<CopyOptions> {
    match config.comm.gather.as_str() {
        "library" => None,
        "copies" => Some(CopyOptions { when: CopyWhen::Possible, ..CopyOptions::default() }),
        // A pair shares one link, which the library's kernels do not fill.
        _ => (vendor == Vendor::Amd && ranks == 2).then(CopyOptions::default),
    }
}

/// Variables that the vendor's libraries should find in the environment of `ranks` ranks, where the user has not set them.
pub fn environment(config: &Config, ranks: usize) -> Vec<(&'static str, &'static str)> {
    let all = vendor(config).map(|v| recommended_env(v, ranks)).unwrap_or_default();
    all.into_iter().filter(|(name, _)| std::env::var_os(name).is_none()).collect()
}

/// Where compiled kernels are kept.
pub fn kernel_folder(config: &Config) -> Option<PathBuf> {
    config.device.kernel_folder.clone().or_else(default_kernel_folder)
}

/// `kernels` beside the cache of tokens; `None` without a home.
pub fn default_kernel_folder() -> Option<PathBuf> {
    crate::data::prepare::default_cache_folder().map(|f| f.with_file_name("kernels"))
}

/// What the emulated driver of the tests calls its devices.
const EMULATED: &str = "Emulated";

/// Decides `device.kind = "auto"` for `ranks` ranks on this host, and checks what was asked for. Returns lines that say what was found.
///
/// # Errors
/// [`Error::Input`]: a GPU was asked for and there is no driver, or there are fewer devices than ranks.
pub fn resolve(config: &mut Config, ranks: usize) -> Result<String> {
    let libraries = libraries(config);
    let asked = vendor(config);
    if config.device.kind == "cpu" {
        return Ok(String::new());
    }
    // Collectives through the host's memory are asked for: they are CPU ranks'.
    if asked.is_none() && config.comm.backend == "local" {
        config.device.kind = "cpu".into();
        return Ok("device: CPU, since comm.backend = \"local\"".into());
    }
    let mut notes = Vec::new();
    for vendor in asked.map_or(Vendor::ALL.to_vec(), |v| vec![v]) {
        let found = match find(vendor, &libraries) {
            Ok(Some(found)) => found,
            Ok(None) => continue,
            // With "auto" a driver that does not work is no reason not to train, but one to be told.
            Err(e) if asked.is_none() => {
                notes.push(format!("{}: {e}", vendor.driver_name()));
                continue;
            }
            Err(e) => return Err(Error::Input(format!("device.kind = \"{}\": {e}", vendor.kind()))),
        };
        let facts = found.facts(0).map_err(|e| Error::Input(format!("device.kind = \"{}\": {e}", vendor.kind())))?;
        if found.count() < ranks {
            let (kind, count) = (vendor.kind(), found.count());
            return Err(Error::Input(format!(
                "{ranks} ranks, but this host has {count} {} ({kind}): each rank needs a device of its own; start with -n {count}, or set device.kind = \"cpu\"",
                facts.name
            )));
        }
        config.device.kind = vendor.kind().into();
        notes.push(format!("device: {} of {} x {}, {}", ranks, found.count(), describe(&facts), vendor.kind()));
        if facts.name.starts_with(EMULATED) {
            notes.push("THIS IS AN EMULATED GPU: a test of the runtime on host memory, thousands of times slower than a real one".into());
        }
        return Ok(notes.join("\n"));
    }
    if let Some(vendor) = asked {
        return Err(Error::Input(format!(
            "device.kind = \"{}\": no driver ({}) with a device was found on this host; install the driver, name it in [device.libraries], or use \"cpu\" or \"auto\" (`zlaunch doctor` says what is here)",
            vendor.kind(),
            vendor.driver_name()
        )));
    }
    config.device.kind = "cpu".into();
    notes.push("device: no GPU found, training on the CPU (device.kind = \"cpu\" says so explicitly)".into());
    Ok(notes.join("\n"))
}

/// The machine that plans for a start on this host are for: its GPUs where `device.kind` says so, else its cores.
///
/// # Errors
/// The catalogue has no part like this GPU.
pub fn cluster(config: &Config, catalogue: &Catalogue, ranks: usize) -> Result<Cluster> {
    let Some(vendor) = vendor(config) else { return Cluster::this_host(catalogue, ranks) };
    let found = find(vendor, &libraries(config))?.ok_or_else(|| Error::Input(format!("no {} device", vendor.kind())))?;
    let facts = found.facts(0)?;
    let part = part_like(catalogue, &facts).ok_or_else(|| {
        let what = "add a file for it to ~/.config/zlaunch/hw, or set every \"auto\" key";
        Error::Input(format!("the hardware catalogue has no part like {} ({}): {what}", facts.name, facts.arch.name))
    })?;
    catalogue.cluster(&format!("{ranks}x{part},device_memory={}", facts.memory_bytes))
}

/// The part whose name is in the device's, the longest; else one of the same architecture. Of several the one with memory nearest to it.
fn part_like<'a>(catalogue: &'a Catalogue, facts: &Facts) -> Option<&'a str> {
    let plain = |s: &str| s.chars().filter(char::is_ascii_alphanumeric).collect::<String>().to_ascii_uppercase();
    let device = plain(&facts.name);
    let gpus = catalogue.parts().iter().filter(|p| p.kind == PartKind::Gpu);
    let likeness = |p: &Part| {
        let names = std::iter::once(&p.name).chain(&p.aliases).map(|n| plain(n));
        names.filter(|n| device.contains(n.as_str())).map(|n| n.len()).max().unwrap_or(0)
    };
    let distance = |p: &Part| (p.memory.bytes.value - facts.memory_bytes as f64).abs();
    let candidates = gpus.filter(|p| likeness(p) > 0 || p.arch == facts.arch.name);
    let best = candidates.min_by(|a, b| likeness(b).cmp(&likeness(a)).then(distance(a).total_cmp(&distance(b))));
    best.map(|p| p.name.as_str())
}

/// A device in a few words.
pub fn describe(facts: &Facts) -> String {
    format!("{} ({}, {:.0} GB, driver {})", facts.name, facts.arch.name, facts.memory_bytes as f64 / 1e9, facts.driver_version)
}

/// Opens the device of the rank that is number `local_rank` of `local_ranks` on this host.
///
/// # Errors
/// As [`resolve`], and what the driver says.
pub fn open(config: &Config, local_rank: usize, local_ranks: usize, trace: bool) -> Result<Computes> {
    let mut config = config.clone();
    resolve(&mut config, local_ranks)?;
    let threads = threads(&config, local_ranks);
    let Some(vendor) = vendor(&config) else { return Ok(Computes::Cpu(cpu_device(&config, threads, trace)?)) };
    let libraries = libraries(&config);
    let found = find(vendor, &libraries)?.ok_or_else(|| Error::Input(format!("the {} device is gone", vendor.kind())))?;
    let mode = match config.device.mode.as_str() {
        "inline" => Mode::Inline,
        "chaos" => Mode::Chaos { seed: config.training.seed },
        _ => Mode::Threaded,
    };
    let code = CodeOptions { folder: kernel_folder(&config), libraries };
    let device = GpuDevice::open(found, GpuOptions { ordinal: local_rank, mode, trace, host_threads: threads, code })?;
    tracing::info!("device {local_rank}: {}", describe(device.driver().facts()));
    Notes(device.clone()).pass();
    Ok(Computes::Gpu(device, vendor))
}

/// The simulated device that plans for the device of `config`: sizes are those of the GPU's operations where one is used.
///
/// # Errors
/// What the driver says.
pub fn simulated(config: &Config, ranks: usize) -> Result<Arc<SimDevice>> {
    let options = SimOptions { threads: threads(config, ranks) };
    let Some(vendor) = vendor(config) else { return Ok(SimDevice::new(options)?) };
    let found = find(vendor, &libraries(config))?.ok_or_else(|| Error::Input(format!("no {} device", vendor.kind())))?;
    let arch = found.facts(0)?.arch;
    Ok(SimDevice::with_sizes(options, move |shape| gpu::workspace_bytes(&arch, shape))?)
}

/// What the communicator of a plan holds on `device`.
///
/// # Errors
/// None is expected.
pub fn simulated_comm(config: &Config, device: &SimDevice, ranks: usize) -> Result<Vec<Buffer>> {
    let Some(vendor) = vendor(config).filter(|_| ranks > 1) else { return Ok(Vec::new()) };
    let hold = |(name, bytes): (&str, usize)| Ok(device.alloc(name, bytes, Place::Device, Category::Libraries)?);
    let copies = copy_options(config, vendor, ranks).map(|options| options.memory());
    ccl_options(config, vendor).memory(ranks).into_iter().chain(copies).map(hold).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use zrt_kernels::gpu::launch::Arch;

    fn part(name: &str, arch: &str, memory_bytes: f64) -> Option<String> {
        let arch = Arch::known(arch).unwrap();
        let (pci, library) = (String::new(), String::new());
        let facts = Facts { name: name.into(), arch, memory_bytes: memory_bytes as u64, pci, driver_version: 12040, library };
        part_like(&Catalogue::builtin().unwrap(), &facts).map(str::to_string)
    }

    #[test]
    fn devices_are_found_in_the_catalogue_by_the_names_that_drivers_give_them() {
        assert_eq!(part("NVIDIA H100 80GB HBM3", "sm_90", 85e9).unwrap(), "H100");
        assert_eq!(part("NVIDIA H200", "sm_90", 150e9).unwrap(), "H200");
        assert_eq!(part("NVIDIA A100-SXM4-80GB", "sm_80", 85e9).unwrap(), "A100");
        assert_eq!(part("NVIDIA A100-SXM4-40GB", "sm_80", 42e9).unwrap(), "A100-40");
        assert_eq!(part("AMD Instinct MI300X", "gfx942", 206e9).unwrap(), "MI300X");
        assert_eq!(part("AMD Instinct MI300X VF", "gfx942", 206e9).unwrap(), "MI300X");
        assert_eq!(part("AMD Instinct MI355X", "gfx950", 309e9).unwrap(), "MI355X");
        // Not in the catalogue by name: what it is compiled for, and its memory, decide.
        assert_eq!(part("AMD Instinct MI308X", "gfx942", 206e9).unwrap(), "MI300X");
        assert_eq!(part("Something else", "gfx90a", 64e9), None);
    }

    #[test]
    fn the_processor_needs_no_driver() {
        let text = "[model]\npath = \"m\"\n[[dataset]]\npath = \"d.jsonl\"\n[device]\nkind = \"cpu\"\n[training]\nsteps = 1\nseq_len = 8\n";
        let here = std::path::Path::new(".");
        let mut config = Config::parse(text, here, here, &[]).unwrap();
        assert_eq!(resolve(&mut config, 64).unwrap(), "");
    }
}
