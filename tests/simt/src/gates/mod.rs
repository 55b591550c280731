//! What do real compilers make of the kernels? Every source is compiled for every machine by a pinned compiler, and what a compiler
//! says of each kernel becomes a [`Row`]: registers, shared memory, spills, matrix instructions, bytes of its parameters. Spills
//! and scratch memory are errors, so are products without matrix instructions and structs that differ from the host's; the rest is
//! compared with `tests/simt/gates.md`, where a change shows in review.
//!
//! * [`tools`] finds the compilers; a machine without them compares nothing. `.ci/tools` installs them.
//! * [`cuda`] NVRTC, which will also compile in the product, and the disassembler; [`amd`] clang.
//! * [`occupancy`] how many blocks a compute unit holds at once. [`page`] the table.

pub mod amd;
pub mod cuda;
pub mod occupancy;
pub mod page;
pub mod tools;

use crate::build::target_folder;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use tools::{Compiler, Tools};
use zrt_kernels::gpu::table;

/// The machines, each with the compiler that makes its code. There is no sm_90a: no kernel uses wgmma yet. The compiler of gfx950
/// is newer because clang 19 does not know that machine.
pub const ARCHS: [(&str, Compiler); 5] = [
    ("sm_80", Compiler::Nvrtc),
    ("sm_90", Compiler::Nvrtc),
    ("gfx90a", Compiler::Clang),
    ("gfx942", Compiler::Clang),
    ("gfx950", Compiler::Zig),
];

/// What a compiler made of one kernel for one machine.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Row {
    /// File in `kernels/gpu`.
    pub source: String,
    /// Entry point.
    pub kernel: String,
    /// Machine.
    pub arch: String,
    /// Bytes of its parameters.
    pub params_bytes: u32,
    /// Threads that a block may have.
    pub threads: u32,
    /// Registers of a thread, those of matrix accumulators too.
    pub registers: u32,
    /// Shared memory of a block that the compiler knows of; what the host adds at the launch is not in it.
    pub shared_bytes: u32,
    /// Device memory of a thread: arrays that did not fit into registers.
    pub scratch_bytes: u32,
    /// Registers or bytes spilled.
    pub spills: u32,
    /// Matrix instructions in the code.
    pub matrix: u32,
}

impl Row {
    /// One line: kept between runs.
    fn line(&self) -> String {
        let Row { source, kernel, arch, params_bytes, threads, registers, shared_bytes, scratch_bytes, spills, matrix } = self;
        format!("{source} {kernel} {arch} {params_bytes} {threads} {registers} {shared_bytes} {scratch_bytes} {spills} {matrix}")
    }

    fn parse(line: &str) -> Option<Row> {
        let mut words = line.split_whitespace();
        let (source, kernel, arch) = (words.next()?.into(), words.next()?.into(), words.next()?.into());
        let mut number = || words.next()?.parse().ok();
        Some(Row {
            source,
            kernel,
            arch,
            params_bytes: number()?,
            threads: number()?,
            registers: number()?,
            shared_bytes: number()?,
            scratch_bytes: number()?,
            spills: number()?,
            matrix: number()?,
        })
    }
}

/// What was compiled, and by what.
pub struct Compiled {
    /// By source, then kernel, then machine in the order of [`ARCHS`].
    pub rows: Vec<Row>,
    /// Machines that could not be compiled for, with the reason.
    pub not_run: Vec<(&'static str, String)>,
    /// Version of the compiler of each machine that was compiled for.
    pub versions: Vec<(&'static str, String)>,
}

/// Names of the `.cu` files.
pub fn sources() -> impl Iterator<Item = &'static str> {
    table::SOURCES.iter().map(|(name, _)| *name).filter(|name| name.ends_with(".cu"))
}

/// Compiles all sources for all machines that there are compilers for, on all cores. Results are kept under `target/gates`.
///
/// # Errors
/// What a compiler says of a source that it does not compile.
pub fn compile_all() -> Result<Compiled, String> {
    let tools = Tools::find();
    let mut versions = Vec::new();
    let mut not_run = Vec::new();
    for (arch, compiler) in ARCHS {
        match tools.version(compiler) {
            Ok(version) => versions.push((arch, version)),
            Err(why) => not_run.push((arch, why)),
        }
    }
    let jobs: Vec<(&str, &str, &str)> =
        sources().flat_map(|source| versions.iter().map(move |(arch, version)| (source, *arch, version.as_str()))).collect();
    let results: Mutex<Vec<Result<Vec<Row>, String>>> = Mutex::default();
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some((source, arch, version)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let rows = compile(&tools, source, arch, version);
                    results.lock().unwrap_or_else(|e| e.into_inner()).push(rows);
                }
            });
        }
    });
    let mut rows = Vec::new();
    for result in results.into_inner().unwrap_or_else(|e| e.into_inner()) {
        rows.extend(result?);
    }
    let place = |row: &Row| {
        let kernel = table::kernels().position(|k| k.name == row.kernel);
        (sources().position(|s| s == row.source), kernel, row.kernel.clone(), ARCHS.iter().position(|(a, _)| *a == row.arch))
    };
    rows.sort_by_key(place);
    Ok(Compiled { rows, not_run, versions })
}

/// The rows of one source on one machine: those of an earlier run of the same compiler on the same text, or fresh ones.
fn compile(tools: &Tools, source: &str, arch: &'static str, version: &str) -> Result<Vec<Row>, String> {
    let mut hash = DefaultHasher::new();
    let headers = table::SOURCES.iter().filter(|(name, _)| !name.ends_with(".cu") || *name == source);
    // What reads the compiler's output is part of the result.
    let readers = [
        include_str!("mod.rs"),
        include_str!("cuda.rs"),
        include_str!("amd.rs"),
        include_str!("../../../../kernels/src/gpu/driver/rtc.rs"),
    ];
    (headers.collect::<Vec<_>>(), readers, version).hash(&mut hash);
    let folder = target_folder().join("gates");
    let path = folder.join(format!("{source}.{arch}.{:016x}", hash.finish()));
    if let Some(rows) = std::fs::read_to_string(&path).ok().and_then(|text| text.lines().map(Row::parse).collect::<Option<Vec<_>>>()) {
        return Ok(rows);
    }
    let rows = match ARCHS.iter().find(|(name, _)| *name == arch).map(|(_, compiler)| *compiler) {
        Some(Compiler::Nvrtc) => cuda::compile(tools, source, arch),
        Some(compiler) => amd::compile(tools, compiler, source, arch),
        None => Err(format!("no compiler for {arch}")),
    }?;
    let text: String = rows.iter().map(|row| row.line() + "\n").collect();
    std::fs::create_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    write_whole(&path, text.as_bytes())?;
    Ok(rows)
}

/// Writes a file that other processes see whole or not at all.
fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), String> {
    let fresh = path.with_extension(format!("fresh{}", std::process::id()));
    let written = std::fs::write(&fresh, bytes).and_then(|()| std::fs::rename(&fresh, path));
    written.map_err(|e| format!("{}: {e}", path.display()))
}

/// Kernels whose products must be on matrix cores: by what their names begin with.
const PRODUCTS: [&str; 3] = ["gemm_", "lora_", "attention_"];

/// Of those, kernels that make no product.
const NO_PRODUCT: [&str; 3] = ["lora_sum", "attention_boundaries", "attention_delta"];

/// f32 has no exact matrix instruction on NVIDIA's cores.
fn must_have_matrix(row: &Row) -> bool {
    let exact = row.arch.starts_with("sm_") && row.kernel.ends_with("_f32");
    let product = PRODUCTS.iter().any(|p| row.kernel.starts_with(p)) && !NO_PRODUCT.iter().any(|n| row.kernel.starts_with(n));
    product && !exact
}

/// What must not be, one line each: none is good.
pub fn faults(compiled: &Compiled) -> Vec<String> {
    let mut out = Vec::new();
    for row in &compiled.rows {
        let at = format!("{} on {}", row.kernel, row.arch);
        if row.spills > 0 || row.scratch_bytes > 0 {
            out.push(format!("{at}: {} spills, {} bytes of scratch memory a thread; expected none", row.spills, row.scratch_bytes));
        }
        match table::kernel(&row.kernel) {
            None => out.push(format!("{at}: is not in kernels/src/gpu/table.rs")),
            Some(k) if k.params_bytes != row.params_bytes as usize => {
                out.push(format!("{at}: takes {} bytes of parameters, the host passes {}", row.params_bytes, k.params_bytes));
            }
            Some(_) => {}
        }
        if must_have_matrix(row) && row.matrix == 0 {
            out.push(format!("{at}: has no matrix instruction"));
        }
    }
    for (arch, _) in &compiled.versions {
        for k in table::kernels() {
            if !compiled.rows.iter().any(|row| row.arch == *arch && row.kernel == k.name) {
                out.push(format!("{} on {arch}: is not in the code of {}", k.name, k.source));
            }
        }
    }
    out
}
