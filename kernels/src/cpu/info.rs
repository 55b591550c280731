//! What processor is this? Name, instruction set, and an estimate of its peak, for logs and for "% of peak".
//!
//! The peak is arithmetic, not a measurement: cores x clock x lanes x 2 (multiply and add) x 2 (units a core). The clock
//! is the highest that the kernel tells, else the current one; a processor under vector load may run slower.

use super::simd::Isa;
use std::sync::OnceLock;

/// The machine's processor, read once.
pub(crate) struct Processor {
    /// Name for people, with the instruction set.
    pub name: String,
    /// The instruction set that kernels use, as [`Isa::name`] tells it.
    pub isa: &'static str,
    /// Estimated peak of one core for f32.
    pub core_flops_f32: f64,
    /// Estimated peak of one core for bf16 inputs with f32 sums.
    pub core_flops_bf16: f64,
    /// Cores that this process may use.
    pub cores: usize,
}

/// Value of `key` in the text of `/proc/cpuinfo`.
fn field<'a>(cpuinfo: &'a str, key: &str) -> Option<&'a str> {
    cpuinfo.lines().filter_map(|l| l.split_once(':')).find(|(k, _)| k.trim() == key).map(|(_, v)| v.trim())
}

fn probe(cpuinfo: &str, max_khz: Option<f64>, isa: &'static str, cores: usize) -> Processor {
    let has = |flag: &str| field(cpuinfo, "flags").is_some_and(|f| f.split_whitespace().any(|x| x == flag));
    let mhz = field(cpuinfo, "cpu MHz").and_then(|s| s.parse::<f64>().ok());
    let hz = max_khz.map(|k| k * 1e3).or(mhz.map(|m| m * 1e6)).unwrap_or(0.0);
    let lanes = if isa.starts_with("avx512") {
        16.0
    } else if isa.starts_with("avx2") {
        8.0
    } else {
        4.0
    };
    let core_flops_f32 = hz * lanes * 4.0;
    let core_flops_bf16 = if has("amx_bf16") {
        // One tile product: 2 x 16 x 16 x 32 operations in 16 cycles.
        hz * 1024.0
    } else if has("avx512_bf16") {
        2.0 * core_flops_f32
    } else {
        core_flops_f32
    };
    let name = format!("{} ({isa})", field(cpuinfo, "model name").unwrap_or(std::env::consts::ARCH));
    Processor { name, isa, core_flops_f32, core_flops_bf16, cores }
}

/// The processor this runs on.
pub(crate) fn processor() -> &'static Processor {
    static ONCE: OnceLock<Processor> = OnceLock::new();
    ONCE.get_or_init(|| {
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let khz = std::fs::read_to_string("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq");
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        probe(&cpuinfo, khz.ok().and_then(|s| s.trim().parse().ok()), Isa::detect().name(), cores)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_the_kernel_tells() {
        let text = "processor\t: 0\nmodel name\t: Some CPU\ncpu MHz\t\t: 2000.000\nflags\t\t: fpu avx512_bf16\n";
        let p = probe(text, None, "avx512", 4);
        assert_eq!(p.name, "Some CPU (avx512)");
        assert_eq!((p.core_flops_f32, p.core_flops_bf16), (128e9, 256e9));
        assert_eq!(probe(text, Some(3e6), "avx2", 4).core_flops_f32, 96e9);
        assert_eq!(probe("", None, "portable", 1).core_flops_f32, 0.0, "unknown is 0");
        assert!(processor().cores > 0);
    }
}
