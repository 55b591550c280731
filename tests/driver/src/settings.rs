//! What does `ZRT_EMULATED_GPU` say? A list of `key=value`, separated by `;`, read once per process. The keys are in the crate's
//! documentation; a word that is not understood is an error of `cuInit`, so that a test cannot believe in a fault that never comes.

use crate::faults::Fault;
use std::path::PathBuf;
use zrt_kernels::gpu::launch::Arch;

/// Name of the variable.
pub const VARIABLE: &str = "ZRT_EMULATED_GPU";

/// How this process's GPUs are.
#[derive(Clone, Debug)]
pub struct Settings {
    pub devices: usize,
    /// Bytes of each device.
    pub memory: u64,
    /// Compiler's name of the machine; by vendor if not given.
    pub arch: Option<String>,
    /// Host threads that share the blocks of a launch.
    pub workers: u32,
    /// Memory is filled with ones when it is allocated.
    pub poison: bool,
    /// Launches do nothing.
    pub null: bool,
    /// Seed of random delays of up to a millisecond before operations.
    pub jitter: Option<u64>,
    /// Seed of the order in which collectives add; by rank if not given.
    pub reduce_seed: Option<u64>,
    /// A peer that is gone: an asynchronous error, or silence.
    pub dead_peer_errors: bool,
    /// Non-blocking communicators answer "in progress" once, as the first collective of a real one may.
    pub in_progress: bool,
    pub timeline: Option<PathBuf>,
    /// Virtual bandwidths in bytes per nanosecond.
    pub h2d: f64,
    pub d2h: f64,
    pub d2d: f64,
    pub link: f64,
    /// Virtual nanoseconds of a launch, and of each wave of blocks.
    pub kernel_ns: u64,
    pub wave_ns: u64,
    pub faults: Vec<Fault>,
    /// To which each fault that comes is added, with its time.
    pub fault_log: Option<PathBuf>,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            devices: 2,
            memory: 8 << 30,
            arch: None,
            workers: 1,
            poison: true,
            null: false,
            jitter: None,
            reduce_seed: None,
            dead_peer_errors: true,
            in_progress: false,
            timeline: None,
            h2d: 50.0,
            d2h: 50.0,
            d2d: 1500.0,
            link: 45.0,
            kernel_ns: 10_000,
            wave_ns: 1_000,
            faults: Vec::new(),
            fault_log: None,
        }
    }
}

impl Settings {
    /// Reads the variable's text. `rank` is that of this process, for faults of one rank.
    ///
    /// # Errors
    /// A key or value that is not understood.
    pub fn parse(text: &str, rank: Option<usize>) -> Result<Settings, String> {
        let mut s = Settings::default();
        for item in text.split(';').map(str::trim).filter(|i| !i.is_empty()) {
            let (key, value) = item.split_once('=').ok_or_else(|| format!("`{item}` is not key=value"))?;
            let bad = || format!("`{value}` is no value of `{key}`");
            let number = || value.parse::<u64>().map_err(|_| bad());
            let rate = || value.parse::<f64>().ok().filter(|v| *v > 0.0).ok_or_else(bad);
            match key {
                "devices" => s.devices = number()? as usize,
                "memory" => s.memory = bytes(value).ok_or_else(bad)?,
                "arch" => s.arch = Some(Arch::known(value).ok_or_else(bad)?.name),
                "workers" => s.workers = number()? as u32,
                "poison" => s.poison = number()? != 0,
                "null" => s.null = number()? != 0,
                "jitter" => s.jitter = Some(number()?),
                "reduce_seed" => s.reduce_seed = Some(number()?),
                "dead_peer" if value == "error" => s.dead_peer_errors = true,
                "dead_peer" if value == "hang" => s.dead_peer_errors = false,
                "in_progress" => s.in_progress = number()? != 0,
                "timeline" => s.timeline = Some(value.into()),
                "h2d" => s.h2d = rate()?,
                "d2h" => s.d2h = rate()?,
                "d2d" => s.d2d = rate()?,
                "link" => s.link = rate()?,
                "kernel_ns" => s.kernel_ns = number()?,
                "wave_ns" => s.wave_ns = number()?,
                "fault_log" => s.fault_log = Some(value.into()),
                "fault" => {
                    for fault in value.split(',') {
                        s.faults.extend(Fault::parse(fault, rank)?);
                    }
                }
                _ => return Err(format!("unknown key `{key}`, or `{value}` is none of its values")),
            }
        }
        Ok(s)
    }

    /// Those of this process.
    ///
    /// # Errors
    /// As [`Settings::parse`].
    pub fn of_process() -> Result<Settings, String> {
        let rank = std::env::var("RANK").ok().and_then(|r| r.parse().ok());
        Settings::parse(&std::env::var(VARIABLE).unwrap_or_default(), rank).map_err(|e| format!("{VARIABLE}: {e}"))
    }
}

/// `512MiB`, `8GiB`, `4096`.
fn bytes(text: &str) -> Option<u64> {
    let units = [("KiB", 10), ("MiB", 20), ("GiB", 30)];
    let (number, shift) = units.iter().find_map(|(unit, shift)| Some((text.strip_suffix(unit)?, *shift))).unwrap_or((text, 0));
    number.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_read_and_nonsense_is_refused() {
        let s = Settings::parse("devices=4; memory=2MiB;null=1;h2d=12.5;fault=oom:3,launch:*:2:719@1", Some(1)).expect("settings");
        assert_eq!((s.devices, s.memory, s.null, s.h2d, s.faults.len()), (4, 2 << 20, true, 12.5, 2));
        let other = Settings::parse("fault=oom:3,launch:*:2@1", Some(0)).expect("settings");
        assert_eq!(other.faults.len(), 1);
        for bad in ["devices", "devices=x", "speed=1", "fault=bang:1", "memory=1TB", "arch=sm_1", "dead_peer=maybe"] {
            assert!(Settings::parse(bad, None).is_err(), "{bad}");
        }
    }
}
