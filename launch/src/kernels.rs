//! `zlaunch kernels build`: makes the code of GPU kernels ahead, for hosts without a run-time compiler.

use crate::fault::Fault;
use std::path::PathBuf;
use zrt_kernels::gpu::build_ahead;
use zrt_kernels::gpu::driver::Libraries;

/// What to build.
#[derive(Debug, clap::Args)]
pub struct BuildArgs {
    /// Machines, such as sm_80, sm_90, gfx90a, gfx942, gfx950
    #[arg(long, required = true, value_delimiter = ',', value_name = "ARCH,...")]
    arch: Vec<String>,
    /// Folder to write, to be named as device.kernel_folder; by default the one that runs use
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// The vendor's run-time compiler (libnvrtc.so.12, libhiprtc.so.6), where it is not under its usual name
    #[arg(long, value_name = "FILE")]
    compiler: Option<PathBuf>,
}

/// Compiles and returns the text to print.
pub fn build(args: &BuildArgs) -> Result<String, Fault> {
    let folder = args.out.clone().or_else(zrt::device::default_kernel_folder);
    let folder = folder.ok_or_else(|| Fault::user("there is no home folder to write to: give --out DIR"))?;
    let libraries = Libraries { compiler: args.compiler.clone(), ..Libraries::default() };
    let mut text = String::new();
    for arch in &args.arch {
        let made = build_ahead(&folder, arch, &libraries).map_err(Fault::user)?;
        let bytes: usize = made.iter().map(|(_, bytes)| bytes).sum();
        text += &format!("{arch}: {} files, {:.1} MB\n", made.len(), bytes as f64 / 1e6);
    }
    Ok(text + &format!("in {}\n", folder.display()))
}
