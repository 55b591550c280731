//! What does a program with a GPU see on a machine without one? This library. It has the C functions of libcuda, NVRTC, cuBLASLt and
//! NCCL and of libamdhip64, hipRTC, hipBLASLt and RCCL, over host memory, with the SIMT emulator running the kernels. It is never
//! found by itself: its path must be given ([`library`]), the same one for all libraries of a vendor, since they share its state.
//! Whether a process has CUDA's or HIP's GPUs depends on what it calls; every device's name begins with "Emulated".
//!
//! As on a real GPU: streams are asynchronous, pageable memory is read at a copy's call and pinned memory when it runs, memory is
//! full of NaN when it is allocated, addresses that are freed, or no part of an operand, end in error 700, and an error of an
//! operation is the device's for good. What a kernel did wrong is printed to standard error.
//!
//! # Settings
//! The variable `ZRT_EMULATED_GPU` ([`VARIABLE`]): `key=value`, separated by `;`, read once per process.
//!
//! | key | meaning | default |
//! |---|---|---|
//! | `devices` | GPUs of the process | 2 |
//! | `memory` | bytes of each, `512MiB`, `8GiB` | 8GiB |
//! | `arch` | `sm_80`, `sm_90`, `gfx90a`, `gfx942`, `gfx950`; ignored by the other vendor | sm_90, gfx942 |
//! | `workers` | host threads that share a launch's blocks | 1 |
//! | `poison` | 0: new memory is zeros | 1 |
//! | `null` | 1: launches do nothing, to measure the host | 0 |
//! | `jitter` | seed of random delays below 1 ms before each operation | none |
//! | `reduce_seed` | seed of the order in which collectives add | ranks in order |
//! | `dead_peer` | what peers of a process that ended see: `error` (6, asynchronous) or `hang` | error |
//! | `in_progress` | 1: collectives of non-blocking communicators first answer 7 | 0 |
//! | `timeline` | file to which operations are added as JSON lines, in virtual time | none |
//! | `h2d`, `d2h`, `d2d`, `link` | virtual bandwidths in GB/s | 50, 50, 1500, 45 |
//! | `kernel_ns`, `wave_ns` | virtual time of a launch, and of as many blocks as the machine has units | 10000, 1000 |
//! | `fault` | faults, separated by `,` | none |
//! | `fault_log` | file to which a line is added when a fault comes: nanoseconds since 1970, the fault | none |
//!
//! Faults: `oom:N` (N-th allocation: 2), `launch:KERNEL:N[:CODE]` (N-th launch of this kernel or `*`: asynchronously 719),
//! `lost:N[:CODE]` (at the N-th launch the device is lost: 999), `call:FUNCTION:N:CODE` (N-th call of an exported function, which
//! does nothing), `image:N` (N-th compilation gives the other vendor's image), and of a rank of a communicator `dead:RANK:N` (the
//! process ends at its N-th collective; 0: when it joins), `silent:RANK:N` (takes part in none from then on), `slow:RANK:MS`,
//! `mismatch:RANK:N` (its N-th collective is another one). `@R` behind a fault: only in the process whose `RANK` is R.
//!
//! A line of the timeline: `pid`, `rank`, `device`, `stream`, `kind` (`h2d`, `d2h`, `d2d`, `memset`, `kernel`, `collective`), `name`,
//! `bytes`, `start_ns`, `end_ns`. It is complete when the process has ended, or all streams were destroyed. An operation begins when
//! its stream, what that waited for and the host thread that gave it are there, and its engine is free: compute, one copy engine each
//! way, one between and inside devices, and the link. Clocks of processes know nothing of each other.
//!
//! For tests that must know what a stream has not done yet: the exported `zrtEmulatedHold(1)` stops all streams before their next
//! operation, `zrtEmulatedHold(0)` lets them go on.
#![deny(unsafe_code)]

use std::path::{Path, PathBuf};
use std::process::Command;
use zrt_kernels::gpu::launch::Arch;
use zrt_kernels::gpu::table;
use zrt_simt::build::Kernels;

#[allow(unsafe_code)]
mod abi;
#[allow(unsafe_code)]
mod api;
#[allow(unsafe_code)]
mod blas;
#[allow(unsafe_code)]
mod ccl;
mod clock;
#[allow(unsafe_code)]
mod device;
mod faults;
#[allow(unsafe_code)]
mod memory;
#[allow(unsafe_code)]
mod module;
mod settings;
mod stream;

pub use settings::VARIABLE;

/// Name of the library's file.
pub const FILE: &str = "libzrt_driver.so";

/// Where the library is: Cargo puts it beside the tests of a package that depends on this one, or a folder above or below.
///
/// # Errors
/// It is not there.
pub fn library() -> Result<PathBuf, String> {
    let program = std::env::current_exe().map_err(|e| format!("where this program is: {e}"))?;
    let folder = program.parent().ok_or("this program is in no folder")?;
    let places = [folder.join(FILE), folder.join("deps").join(FILE), folder.join("..").join(FILE)];
    places
        .iter()
        .find(|p| p.is_file())
        .cloned()
        .ok_or_else(|| format!("{FILE} is not in {}, in its folder `deps`, or above; build the package zrt-driver", folder.display()))
}

/// Compiles all kernels for the host, for this machine (`sm_90`, `gfx942`), as far as nobody did: otherwise each is when it is first
/// launched, which takes longer than a program with a GPU may expect. Of several processes one compiles and the others wait.
///
/// # Errors
/// An unknown machine, no C++ compiler, or what it says.
pub fn prepare(arch: &str) -> Result<(), String> {
    let path = library()?.with_file_name("prepare.lock");
    let turn = std::fs::File::create(&path).and_then(|file| file.lock().map(|()| file));
    let _turn = turn.map_err(|e| format!("{}: {e}", path.display()))?;
    let known = Arch::known(arch).ok_or_else(|| format!("unknown machine {arch}"))?;
    let kernels = Kernels::of(&device::build(&known))?;
    let sources = table::SOURCES.iter().map(|(name, _)| *name).filter(|name| table::kernels().any(|k| k.source == *name));
    sources.map(|source| kernels.library(source)).try_for_each(|library| library.map(|_| ()))
}

/// Makes, in `folder`, a library that has these functions alone, each of which returns 0: for what a program does where one is missing.
///
/// # Errors
/// There is no C compiler, or it fails.
pub fn library_with(folder: &Path, functions: &[&str]) -> Result<PathBuf, String> {
    let (source, library) = (folder.join("functions.c"), folder.join("libfunctions.so"));
    let text: String = functions.iter().map(|f| format!("int {f}(void) {{ return 0; }}\n")).collect();
    std::fs::write(&source, text).map_err(|e| format!("{}: {e}", source.display()))?;
    let out = Command::new("cc").args(["-shared", "-fPIC", "-o"]).args([&library, &source]).output();
    let out = out.map_err(|e| format!("no C compiler (cc): {e}"))?;
    if out.status.success() { Ok(library) } else { Err(String::from_utf8_lossy(&out.stderr).into_owned()) }
}
