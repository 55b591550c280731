//! The bench of kernels on a real GPU, called by `benches/gpu.sh`:
//!
//! ```text
//! gpu_kernels [PEERS.tsv]     checks against the CPU, then times; without a GPU it says so
//! gpu_kernels --emulate ARCH  the same checks on the emulator (sm_90, gfx942, gfx950)
//! gpu_kernels --list          the calls that are timed, for benches/compare/gpu.py
//! gpu_kernels --host DRIVER.so ARCH   the host's time for an operation, on the emulated driver (told to do nothing: ZRT_EMULATED_GPU=null=1)
//! ```
#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::time::Duration;
use zrt_kernels::cpu::{CpuDevice, CpuOptions, Mode};
use zrt_kernels::gpu::driver::{Libraries, Vendor};
use zrt_kernels::gpu::{GpuDevice, probe};
use zrt_simt::bench::Target;
use zrt_simt::bench::checks::{Host, Outcome, TOLERANCE, check, checked};
use zrt_simt::bench::gpu::{Gpu, overhead_ns};
use zrt_simt::bench::times::{Peers, cases, table};
use zrt_simt::{SimtDevice, SimtOptions};

/// Checks all calls; false if one is wrong.
fn check_all(device: &dyn Target, large: bool) -> Result<bool, String> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let options = CpuOptions { threads, mode: Mode::Threaded, track: false, trace: false };
    let cpu = CpuDevice::new(options).and_then(|d| Host::new(d)).map_err(|e| e.to_string())?;
    let (mut good, mut worst, mut wrong) = (0, 0.0f64, 0);
    for case in checked(large) {
        match check(&case, device, &cpu).map_err(|e| format!("{} {}: {e}", case.op, case.sizes))? {
            Outcome::Distance(d) if d <= TOLERANCE => (good, worst) = (good + 1, worst.max(d)),
            Outcome::Distance(d) => {
                println!("WRONG: {} {}: off by {d:.2e}, at most {TOLERANCE:.2e}", case.op, case.sizes);
                wrong += 1;
            }
            Outcome::Failed(e) => {
                println!("FAILED: {} {}: {e}", case.op, case.sizes);
                wrong += 1;
            }
        }
    }
    println!("checks: {good} calls agree with the CPU (worst distance {worst:.1e}), {wrong} do not");
    Ok(wrong == 0)
}

/// Operations whose mean time on the host is taken.
const OPERATIONS: u32 = 50_000;

fn host(device: &GpuDevice) -> Result<String, String> {
    let ns = overhead_ns(device, OPERATIONS).map_err(|e| e.to_string())?;
    Ok(format!("host: {:.2} us an operation, from the call to the driver's return (at most 10)", ns / 1e3))
}

fn run(arguments: &[String]) -> Result<bool, String> {
    match arguments.first().map(String::as_str) {
        Some("--list") => {
            cases().iter().for_each(|c| println!("{}\t{}", c.op, c.sizes));
            Ok(true)
        }
        Some("--emulate") => {
            let known = ["sm_80", "sm_90", "gfx90a", "gfx942", "gfx950"];
            let wanted = arguments.get(1).map_or("sm_90", String::as_str);
            let arch = known.into_iter().find(|a| *a == wanted).ok_or_else(|| format!("{wanted}: expected one of {known:?}"))?;
            let device = SimtDevice::new(SimtOptions { arch, ..Default::default() }).map_err(|e| e.to_string())?;
            println!("emulated {arch}");
            check_all(&Host::new(device).map_err(|e| e.to_string())?, false)
        }
        Some("--host") => {
            let [_, driver, arch] = arguments else { return Err("usage: gpu_kernels --host DRIVER.so ARCH".into()) };
            let vendor = if arch.starts_with("gfx") { Vendor::Amd } else { Vendor::Nvidia };
            let libraries = Libraries { driver: Some(driver.into()), compiler: Some(driver.into()), ..Libraries::default() };
            println!("{}", host(&*probe::open(vendor, &libraries, 0).map_err(|e| e.to_string())?)?);
            Ok(true)
        }
        peers => {
            let Some(gpu) = Gpu::find().map_err(|e| e.to_string())? else {
                println!("not run: no CUDA or HIP device");
                return Ok(true);
            };
            let facts = gpu.facts();
            println!("{}, {}, {} units, driver {}", facts.name, facts.arch.name, facts.arch.units, facts.driver_version);
            let right = check_all(&gpu, true)?;
            println!("{}", host(gpu.device())?);
            let text = peers.map(std::fs::read_to_string).transpose().map_err(|e| format!("{}: {e}", arguments[0]))?;
            let peers = Peers::parse(&text.unwrap_or_default());
            println!("{}", table(&gpu, &peers, Duration::from_secs(180)).map_err(|e| e.to_string())?);
            Ok(right)
        }
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match run(&arguments) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("{e}");
            ExitCode::FAILURE
        }
    }
}
