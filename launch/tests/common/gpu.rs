//! Runs on emulated GPUs: the product's own path from driver to collectives, with the library of `tests/driver` in the place of each
//! vendor's, named in the configuration. The kernels are the real sources, compiled for the host.

use super::tiny::Tiny;
use super::*;

/// Far above what a run of a few steps takes on an emulator that shares its cores with other tests.
const LONG: Duration = Duration::from_secs(600);

pub const CUDA: Gpu = Gpu("cuda");
pub const HIP: Gpu = Gpu("hip");
pub const BOTH: [Gpu; 2] = [CUDA, HIP];

/// A kind of emulated device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gpu(pub &'static str);

/// Whether kernels can be emulated here; says "not run" if not. They are compiled when this returns, so that a run's deadlines are about the run.
pub fn can_run() -> bool {
    let compiler = ["g++", "clang++"].iter().any(|c| Command::new(c).arg("--version").output().is_ok_and(|o| o.status.success()));
    if !compiler {
        println!("not run: no C++ compiler for the emulated kernels");
        return false;
    }
    ["sm_90", "gfx942"].iter().for_each(|arch| zrt_driver::prepare(arch).unwrap());
    true
}

impl Gpu {
    /// What the configuration says to train on it.
    pub fn sets(self) -> Vec<String> {
        self.sets_with(&zrt_driver::library().unwrap())
    }

    /// The same with another driver.
    pub fn sets_with(self, driver: &Path) -> Vec<String> {
        let ours = zrt_driver::library().unwrap();
        let path = |role: &str, library: &Path| format!("device.libraries.{role}={}", library.display());
        let mut sets = vec![format!("device.kind={}", self.0), path("driver", driver)];
        sets.extend(["compiler", "collectives"].map(|role| path(role, &ours)));
        sets.push("device.kernel_folder=kernels".into());
        sets
    }

    /// The name of the vendor's own function, CUDA's or HIP's.
    pub fn name(self, cuda: &'static str, hip: &'static str) -> &'static str {
        if self == CUDA { cuda } else { hip }
    }
}

/// A run of a job on emulated GPUs.
pub struct GpuRun<'a> {
    pub tiny: &'a Tiny,
    pub gpu: Gpu,
    pub ranks: usize,
    /// Settings of the emulator, see `tests/driver`.
    pub emulator: &'a str,
}

impl GpuRun<'_> {
    pub fn start(&self, sets: &[&str]) -> Running {
        let own = self.gpu.sets();
        let all: Vec<&str> = own.iter().map(String::as_str).chain(sets.iter().copied()).collect();
        let mut command = self.tiny.command(self.ranks, &all);
        command.env(zrt_driver::VARIABLE, format!("devices={};{}", self.ranks.max(2), self.emulator));
        Running::start(&mut command)
    }

    pub fn run(&self, sets: &[&str]) -> Done {
        self.start(sets).finish_within(LONG)
    }

    /// Runs to the end.
    #[track_caller]
    pub fn train(&self, sets: &[&str]) -> Done {
        let done = self.run(sets);
        assert_eq!(done.code, Some(0), "{} {sets:?}\nstdout:\n{}\nstderr:\n{}", self.gpu.0, done.out, done.err);
        done
    }
}
