//! Whole runs on GPUs, for `benches/gpu.sh`; one table in the end, and a failure if something is wrong:
//!
//! ```text
//! gpu_train ZLAUNCH                    on this machine's GPUs; without one it says so
//! gpu_train ZLAUNCH DRIVER.so sm_90    the parity part, on the emulated driver
//! ```
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;
use zrt_benches::gpu::{Machine, parity, speed, table};

/// Time for all runs.
const BUDGET: Duration = Duration::from_secs(8 * 60);

fn run(arguments: &[String]) -> Result<bool, String> {
    let (zlaunch, emulated) = match arguments {
        [zlaunch] => (zlaunch, None),
        [zlaunch, driver, arch] => (zlaunch, Some((Path::new(driver.as_str()), arch.as_str()))),
        _ => return Err("usage: gpu_train ZLAUNCH [DRIVER.so ARCH]".into()),
    };
    let root = std::env::current_dir().map_err(|e| e.to_string())?;
    let Some(machine) = Machine::find(PathBuf::from(zlaunch), root, emulated, BUDGET)? else {
        println!("training, parity: not run: no CUDA or HIP device\ntraining, 8B-shaped steps: not run: no CUDA or HIP device");
        return Ok(true);
    };
    println!("training on {} x {}", machine.gpus, machine.name);
    let mut lines = parity::lines(&machine);
    lines.extend(speed::lines(&machine));
    let (text, right) = table(&lines);
    print!("{text}");
    Ok(right)
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
