//! Where are the compilers? Under `target/gpu-tools`, where `.ci/tools` puts them, else where the system has them.

use crate::build::target_folder;
use std::path::{Path, PathBuf};
use std::process::Command;
use zrt_kernels::gpu::driver::Vendor;
use zrt_kernels::gpu::driver::rtc::Rtc;

/// A compiler of GPU code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compiler {
    /// NVIDIA's run-time compiler, with the disassembler nvdisasm.
    Nvrtc,
    /// clang 19.
    Clang,
    /// The clang in Zig's package, which is newer.
    Zig,
}

/// The compilers of this machine; an error says what is missing.
pub struct Tools {
    /// NVRTC.
    pub nvrtc: Result<Rtc, String>,
    /// The disassembler of NVIDIA's code.
    pub nvdisasm: Option<PathBuf>,
    clang: Option<PathBuf>,
    zig: Option<PathBuf>,
}

/// What a command prints, if it runs.
fn output(program: &Path, args: &[&str]) -> Option<String> {
    let out = Command::new(program).args(args).output().ok()?;
    out.status.success().then(|| String::from_utf8_lossy(&out.stdout).into_owned())
}

/// The folders of Python packages that were installed for us.
fn packages() -> Vec<PathBuf> {
    let below = |folder: PathBuf| std::fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path());
    let environments = below(target_folder().join("gpu-tools"));
    let versions = environments.flat_map(|e| below(e.join("lib")).collect::<Vec<_>>());
    let mut found: Vec<PathBuf> = versions.map(|v| v.join("site-packages")).filter(|p| p.is_dir()).collect();
    found.sort();
    found
}

impl Tools {
    /// Looks for them.
    pub fn find() -> Tools {
        let packages = packages();
        let packaged = |name: &str| packages.iter().map(|p| p.join(name)).find(|p| p.is_file());
        let works = |path: PathBuf, args: &[&str]| output(&path, args).map(|_| path);
        let system = |name: &str| works(name.into(), &["--version"]);
        let nvrtc = match packaged("nvidia/cu13/lib/libnvrtc.so.13") {
            Some(path) => Rtc::open(Vendor::Nvidia, Some(&path)).map_err(|e| e.to_string()),
            None => Rtc::open(Vendor::Nvidia, None).map_err(|_| "no NVRTC (libnvrtc.so)".into()),
        };
        Tools {
            nvrtc,
            nvdisasm: packaged("nvidia/cu13/bin/nvdisasm").or_else(|| system("nvdisasm")),
            clang: system("clang++-19"),
            zig: packaged("ziglang/zig").or_else(|| works("zig".into(), &["version"])),
        }
    }

    /// The program and its first arguments, of a compiler that is a program.
    pub fn clang(&self, compiler: Compiler) -> Result<(&Path, &'static [&'static str]), String> {
        let (found, args, missing): (_, &'static [&'static str], _) = match compiler {
            Compiler::Zig => (&self.zig, &["clang"], "no zig (package ziglang)"),
            _ => (&self.clang, &[], "no clang++-19 on PATH"),
        };
        found.as_deref().map(|path| (path, args)).ok_or_else(|| missing.to_string())
    }

    /// Name and version of a compiler.
    ///
    /// # Errors
    /// It, or its disassembler, is not there.
    pub fn version(&self, compiler: Compiler) -> Result<String, String> {
        if compiler == Compiler::Nvrtc {
            let nvrtc = self.nvrtc.as_ref().map_err(Clone::clone)?;
            return self.nvdisasm.as_ref().map(|_| nvrtc.version()).ok_or_else(|| "no nvdisasm".to_string());
        }
        let (program, args) = self.clang(compiler)?;
        let text = output(program, &[args, &["--version"]].concat()).ok_or_else(|| format!("{} does not run", program.display()))?;
        let version = text.split("clang version ").nth(1).and_then(|rest| rest.split_whitespace().next());
        version.map(|v| format!("clang {v}")).ok_or_else(|| format!("{} does not say its version", program.display()))
    }
}
