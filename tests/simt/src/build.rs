//! How do kernel sources become code of the host? When the first kernel of a `.cu` file is launched, the file and the headers it
//! includes are written to a folder under `target/simt` named after their hash, compiled there to a shared library, and loaded; the
//! next time the library is found. Files are written under another name and renamed, so that processes that compile the same file
//! do not disturb each other.
#![allow(unsafe_code)]

use libloading::Library;
use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use zrt_kernels::gpu::table;

/// Headers of the emulator, and kernels that only tests launch.
const EMULATOR: &[(&str, &str)] = &[
    ("fragments.cu", include_str!("../kernels/fragments.cu")),
    ("emu.h", include_str!("../emu/emu.h")),
    ("emu_core.h", include_str!("../emu/emu_core.h")),
    ("emu_memory.h", include_str!("../emu/emu_memory.h")),
    ("emu_warp.h", include_str!("../emu/emu_warp.h")),
];

/// Checks that the compiler puts into the kernels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Sanitizer {
    /// None; the emulator's own checks remain.
    #[default]
    None,
    /// Addresses: the process must run with the sanitizer's library preloaded.
    Address,
    /// Undefined behaviour, which aborts.
    Undefined,
}

/// A change of a source: the first place where `from` stands, exactly, becomes `to`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Mutation {
    /// File of `kernels/gpu`.
    pub file: &'static str,
    /// Text that must be there.
    pub from: String,
    /// What stands there instead.
    pub to: String,
}

/// What is compiled, and how.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Build {
    /// Lanes of a warp, 32 or 64.
    pub lanes: u32,
    /// With the wider matrix instruction of gfx950.
    pub gfx950: bool,
    /// Sanitizer of the kernels.
    pub sanitizer: Sanitizer,
    /// Changes of the sources, in this order.
    pub mutations: Vec<Mutation>,
}

/// The C++ compiler of the host: `g++`, else `clang++`, of any version. `None`: there is none.
pub fn compiler() -> Option<&'static str> {
    static FOUND: OnceLock<Option<&'static str>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let works = |name: &&str| Command::new(name).arg("--version").output().is_ok_and(|out| out.status.success());
        ["g++", "clang++", "clang++-19"].into_iter().find(works)
    })
}

/// The libraries of one [`Build`], by source file.
pub struct Kernels {
    build: Build,
    texts: BTreeMap<&'static str, String>,
    loaded: Mutex<HashMap<&'static str, Arc<Library>>>,
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(|e| e.into_inner())
}

fn io<T>(what: &Path, result: std::io::Result<T>) -> Result<T, String> {
    result.map_err(|e| format!("{}: {e}", what.display()))
}

impl Kernels {
    /// The kernels of this build, shared by all who ask for the same; nothing is compiled yet.
    ///
    /// # Errors
    /// A mutation whose text is not there.
    pub fn of(build: &Build) -> Result<Arc<Kernels>, String> {
        static ALL: OnceLock<Mutex<HashMap<Build, Arc<Kernels>>>> = OnceLock::new();
        let mut all = lock(ALL.get_or_init(Default::default));
        if let Some(kernels) = all.get(build) {
            return Ok(kernels.clone());
        }
        let mut texts: BTreeMap<&'static str, String> = table::SOURCES.iter().chain(EMULATOR).map(|(n, t)| (*n, t.to_string())).collect();
        for m in &build.mutations {
            let text = texts.get_mut(m.file).ok_or_else(|| format!("no source {}", m.file))?;
            if !text.contains(&m.from) {
                return Err(format!("{} does not contain `{}`", m.file, m.from));
            }
            *text = text.replacen(&m.from, &m.to, 1);
        }
        let kernels = Arc::new(Kernels { build: build.clone(), texts, loaded: Mutex::default() });
        all.insert(build.clone(), kernels.clone());
        Ok(kernels)
    }

    /// Adds `file` and what it includes to `found`.
    fn closure<'a>(&'a self, file: &str, found: &mut BTreeMap<&'static str, &'a str>) {
        let Some((name, text)) = self.texts.get_key_value(file) else { return };
        if found.insert(name, text).is_some() {
            return;
        }
        for included in text.lines().filter_map(|l| l.strip_prefix("#include \"")?.split('"').next()) {
            self.closure(included, found);
        }
    }

    /// Writes a source and its headers to a folder of their own.
    fn folder(&self, source: &'static str) -> Result<PathBuf, String> {
        let mut files = BTreeMap::new();
        self.closure(source, &mut files);
        let mut hash = DefaultHasher::new();
        (source, &files, Self::flags(&self.build), compiler()).hash(&mut hash);
        let folder = target_folder().join("simt").join(format!("{source}-{:016x}", hash.finish()));
        io(&folder, std::fs::create_dir_all(&folder))?;
        for (name, text) in &files {
            let path = folder.join(name);
            // Another process may read it meanwhile, and would write the same.
            if std::fs::read_to_string(&path).is_ok_and(|have| have == *text) {
                continue;
            }
            let fresh = folder.join(format!("{name}.{}", std::process::id()));
            io(&fresh, std::fs::write(&fresh, text))?;
            io(&path, std::fs::rename(&fresh, &path))?;
        }
        Ok(folder)
    }

    fn flags(build: &Build) -> Vec<String> {
        let mut flags: Vec<String> =
            ["-std=c++17", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-fno-strict-aliasing"].map(String::from).to_vec();
        // Bounds of unrolling are used by pragmas alone, which this compiler does not know.
        flags.extend(["-Wall", "-Wno-unknown-pragmas", "-Wno-unused-variable", "-Wno-maybe-uninitialized", "-DGPU_EMU"].map(String::from));
        // What runs a few small cases need not be fast.
        let once = !build.mutations.is_empty() || build.sanitizer != Sanitizer::None;
        flags.push(if once { "-O1" } else { "-O2" }.into());
        flags.push(format!("-DGPU_WARP={}", build.lanes));
        if build.gfx950 {
            flags.push("-DGPU_EMU_GFX950".into());
        }
        match build.sanitizer {
            Sanitizer::None => {}
            Sanitizer::Address => flags.extend(["-g1", "-fsanitize=address"].map(String::from)),
            Sanitizer::Undefined => flags.extend(["-g1", "-fsanitize=undefined", "-fno-sanitize-recover=undefined"].map(String::from)),
        }
        flags
    }

    /// The library of a source file, compiled if it is not there yet.
    ///
    /// # Errors
    /// No compiler, or what the compiler says.
    pub fn library(&self, source: &'static str) -> Result<Arc<Library>, String> {
        let mut loaded = lock(&self.loaded);
        if let Some(library) = loaded.get(source) {
            return Ok(library.clone());
        }
        let folder = self.folder(source)?;
        let path = folder.join(format!("{source}.so"));
        if !path.is_file() {
            let compiler = compiler().ok_or("no C++ compiler (g++ or clang++) on PATH")?;
            let fresh = folder.join(format!("{source}.so.{}", std::process::id()));
            let mut command = Command::new(compiler);
            command.args(Self::flags(&self.build)).arg("-I").arg(&folder).args(["-x", "c++"]);
            let out = io(Path::new(compiler), command.arg(folder.join(source)).arg("-o").arg(&fresh).output())?;
            let text = String::from_utf8_lossy(&out.stderr);
            if !out.status.success() {
                return Err(format!("{compiler} on {source}: {text}"));
            }
            if !text.is_empty() {
                eprintln!("{source}: {text}");
            }
            io(&path, std::fs::rename(&fresh, &path))?;
        }
        // SAFETY: our own code; its initializers only make memory for the emulator.
        let library = unsafe { Library::new(&path) }.map_err(|e| format!("{}: {e}", path.display()))?;
        let library = Arc::new(library);
        loaded.insert(source, library.clone());
        Ok(library)
    }

    /// What it was built of.
    pub fn build(&self) -> &Build {
        &self.build
    }
}

/// The folder that Cargo builds in.
pub(crate) fn target_folder() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target");
    std::env::var_os("CARGO_TARGET_DIR").map_or(here, PathBuf::from)
}
