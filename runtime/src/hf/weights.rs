//! Which bytes of the safetensors files are which elements? Reads any element range of any tensor straight into place.
//!
//! Reading is by `pread`, never by mapping: a range lands where it will live, the page cache is not charged to the process,
//! and a truncated file is an error instead of a signal. Conversion goes through a staging buffer of at most
//! [`STAGING_BYTES`], so the peak of loading does not depend on the model. Pickle files are never read.

use super::folder::{self, Files};
use super::header::{self, Stored, TensorInfo};
use super::{ArchConfig, Error, Result};
use half::{bf16, f16};
use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use zrt_kernels::DType;
use zrt_kernels::cpu::convert;

/// Upper limit of the staging buffer of one converting read: small enough to stay in a core's own cache.
pub const STAGING_BYTES: usize = 256 << 10;

/// The weights of a model directory, open for reading. Shared freely between threads.
#[derive(Debug)]
pub struct Weights {
    dir: PathBuf,
    files: Vec<(PathBuf, File)>,
    tensors: HashMap<String, TensorInfo>,
    names: Vec<String>,
    bytes_read: AtomicU64,
}

impl Weights {
    /// Opens all safetensors files of `dir` and checks their headers.
    ///
    /// # Errors
    /// No safetensors file (a pickle file alone is named and refused), a file of the index is missing or truncated, a header
    /// breaks its format, an index that points outside its folder or disagrees with the files.
    pub fn open(dir: &Path) -> Result<Weights> {
        let Files { paths, index } = folder::weight_files(dir)?;
        Self::open_files(dir, paths, index.as_ref())
    }

    /// Opens one safetensors file, such as an adapter's.
    ///
    /// # Errors
    /// As [`Weights::open`].
    pub fn open_file(path: &Path) -> Result<Weights> {
        Self::open_files(path, vec![path.to_path_buf()], None)
    }

    fn open_files(dir: &Path, paths: Vec<PathBuf>, index: Option<&HashMap<String, usize>>) -> Result<Weights> {
        let mut w =
            Weights { dir: dir.into(), files: Vec::new(), tensors: HashMap::new(), names: Vec::new(), bytes_read: AtomicU64::new(0) };
        for (i, path) in paths.into_iter().enumerate() {
            let file = File::open(&path).map_err(Error::io("open", &path))?;
            let header = header::read(&file, &path)?;
            *w.bytes_read.get_mut() += header.bytes;
            for (name, mut info) in header.tensors {
                info.file = i;
                if let Some(other) = w.tensors.insert(name.clone(), info) {
                    let what = format!("tensor '{name}' is also in {}", w.files[other.file].0.display());
                    return Err(Error::Header { path, what });
                }
                w.names.push(name);
            }
            w.files.push((path, file));
        }
        let absent = |(name, file): (&String, &usize)| w.tensors.get(name).is_none_or(|t| t.file != *file).then(|| name.clone());
        if let Some(mut missing) = index.map(|index| index.iter().filter_map(absent).collect::<Vec<_>>()).filter(|m| !m.is_empty()) {
            missing.sort();
            let problems = missing.into_iter().map(|n| format!("{n}: the index names a file that does not hold it")).collect();
            return Err(Error::Tensors { dir: dir.into(), problems });
        }
        w.names.sort();
        Ok(w)
    }

    /// The directory (or the file, after [`Weights::open_file`]).
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Paths of the files, in the order of [`TensorInfo::file`].
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(|(path, _)| path.as_path())
    }

    /// All tensor names, sorted.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Where a tensor lies and what it is.
    ///
    /// # Errors
    /// There is no such tensor.
    pub fn tensor(&self, name: &str) -> Result<&TensorInfo> {
        self.tensors.get(name).ok_or_else(|| Error::NoTensor { dir: self.dir.clone(), name: name.into() })
    }

    /// Bytes read from the files so far, headers included.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }

    /// Reads elements `start..start + dst.len() / dst_dtype.bytes()` of a tensor (row-major) into `dst` as `dst_dtype` (`F32` or
    /// `BF16`): straight from the file where types agree, else converted, rounding to nearest even.
    ///
    /// # Errors
    /// No such tensor, a range outside it, a type that cannot be converted, or a read that fails.
    pub fn read(&self, name: &str, start: usize, dst: &mut [u8], dst_dtype: DType) -> Result<()> {
        let info = self.tensor(name)?;
        let range = |what: String| Error::Range { name: name.into(), what };
        let elems = dst.len() / dst_dtype.bytes();
        if elems * dst_dtype.bytes() != dst.len() {
            return Err(range(format!("a destination of {} bytes is not whole {dst_dtype} elements", dst.len())));
        }
        if start.checked_add(elems).is_none_or(|end| end > info.elems()) {
            return Err(range(format!("elements {start}.. + {elems} of shape {:?} ({} elements)", info.shape, info.elems())));
        }
        let (path, file) = &self.files[info.file];
        let fetch = |into: &mut [u8], first: usize| {
            self.bytes_read.fetch_add(into.len() as u64, Ordering::Relaxed);
            let at = info.offset + (first * info.dtype.bytes()) as u64;
            file.read_exact_at(into, at).map_err(Error::io("read", path))
        };
        if info.dtype.dtype() == Some(dst_dtype) {
            return fetch(dst, start);
        }
        let convert: fn(&[u8], &mut [u8]) = match (info.dtype, dst_dtype) {
            (Stored::BF16, DType::F32) => widen,
            (Stored::F32, DType::BF16) => narrow,
            (Stored::F16, DType::F32) => |s, d| each::<2, 4>(s, d, |b| f16::from_le_bytes(b).to_f32().to_le_bytes()),
            (Stored::F16, DType::BF16) => |s, d| each::<2, 2>(s, d, |b| bf16::from_f32(f16::from_le_bytes(b).to_f32()).to_le_bytes()),
            (from, to) => return Err(range(format!("is stored as {from}, which cannot be read as {to}; F32, BF16 and F16 can"))),
        };
        let width = info.dtype.bytes();
        let step = STAGING_BYTES / width;
        // Of words, so that it is aligned for vectors of any element.
        let mut staging = vec![0u32; (elems.min(step) * width).div_ceil(4)];
        let staging: &mut [u8] = bytemuck::cast_slice_mut(&mut staging);
        for (i, part) in dst.chunks_mut(step * dst_dtype.bytes()).enumerate() {
            let bytes = part.len() / dst_dtype.bytes() * width;
            fetch(&mut staging[..bytes], start + i * step)?;
            convert(&staging[..bytes], part);
        }
        Ok(())
    }

    /// Reads elements `start..` of a tensor as they are stored, of whatever type.
    ///
    /// # Errors
    /// No such tensor, a range outside it, or a read that fails.
    pub fn read_stored(&self, name: &str, start: usize, dst: &mut [u8]) -> Result<()> {
        let info = self.tensor(name)?;
        let width = info.dtype.bytes();
        if width == 0 || !dst.len().is_multiple_of(width) || start.checked_add(dst.len() / width).is_none_or(|end| end > info.elems()) {
            let what = format!("elements {start}.. in {} bytes, of shape {:?} of {}", dst.len(), info.shape, info.dtype);
            return Err(Error::Range { name: name.into(), what });
        }
        let (path, file) = &self.files[info.file];
        self.bytes_read.fetch_add(dst.len() as u64, Ordering::Relaxed);
        file.read_exact_at(dst, info.offset + (start * width) as u64).map_err(Error::io("read", path))
    }

    /// Reads a whole tensor as f32.
    ///
    /// # Errors
    /// As [`Weights::read`].
    pub fn read_f32(&self, name: &str) -> Result<Vec<f32>> {
        let mut values = vec![0f32; self.tensor(name)?.elems()];
        self.read_into_f32(name, 0, &mut values)?;
        Ok(values)
    }

    /// Reads elements `start..start + dst.len()` as f32.
    ///
    /// # Errors
    /// As [`Weights::read`].
    pub fn read_into_f32(&self, name: &str, start: usize, dst: &mut [f32]) -> Result<()> {
        self.read(name, start, bytemuck::cast_slice_mut(dst), DType::F32)
    }

    /// Compares the tensors with what `arch` needs and reports everything that does not fit at once. A tied head may be absent or present;
    /// `rotary_emb.inv_freq` of old files is ignored.
    ///
    /// # Errors
    /// [`Error::Tensors`] with one line per missing, misshaped, unexpected or unreadable tensor.
    pub fn validate(&self, arch: &ArchConfig) -> Result<()> {
        let mut problems = Vec::new();
        let mut expected: HashMap<String, Vec<usize>> = arch.parameters().into_iter().collect();
        if arch.tie_word_embeddings && self.tensors.contains_key("lm_head.weight") {
            expected.insert("lm_head.weight".into(), vec![arch.vocab, arch.hidden]);
        }
        for (name, shape) in &expected {
            match self.tensors.get(name) {
                None => problems.push(format!("{name}: missing, expected shape {shape:?}")),
                Some(t) if t.shape != *shape => problems.push(format!("{name}: expected shape {shape:?}, got {:?}", t.shape)),
                Some(t) if matches!(t.dtype, Stored::Other(..)) => {
                    problems
                        .push(format!("{name}: is stored as {}, expected F32, BF16 or F16 (a quantized model cannot be trained)", t.dtype));
                }
                Some(_) => {}
            }
        }
        for name in self.names.iter().filter(|n| !expected.contains_key(*n) && !n.ends_with("rotary_emb.inv_freq")) {
            problems.push(format!("{name}: unexpected, shape {:?}", self.tensors[name].shape));
        }
        problems.sort();
        if problems.is_empty() { Ok(()) } else { Err(Error::Tensors { dir: self.dir.clone(), problems }) }
    }
}

/// bf16 to f32, in vectors where the bytes are aligned, as those of views are.
fn widen(src: &[u8], dst: &mut [u8]) {
    match (bytemuck::try_cast_slice(src), bytemuck::try_cast_slice_mut(dst)) {
        (Ok(s), Ok(d)) => convert::widen(d, s),
        _ => each::<2, 4>(src, dst, |b| bf16::from_le_bytes(b).to_f32().to_le_bytes()),
    }
}

/// f32 to bf16, rounding to nearest even, likewise.
fn narrow(src: &[u8], dst: &mut [u8]) {
    match (bytemuck::try_cast_slice(src), bytemuck::try_cast_slice_mut(dst)) {
        (Ok(s), Ok(d)) => convert::narrow(d, s),
        _ => each::<4, 2>(src, dst, |b| bf16::from_f32(f32::from_le_bytes(b)).to_le_bytes()),
    }
}

/// Applies `f` element by element; the lengths agree.
fn each<const S: usize, const D: usize>(src: &[u8], dst: &mut [u8], f: impl Fn([u8; S]) -> [u8; D]) {
    let (src, _) = src.as_chunks::<S>();
    let (dst, _) = dst.as_chunks_mut::<D>();
    for (s, d) in src.iter().zip(dst) {
        *d = f(*s);
    }
}

/// Whether every value of `bytes` (elements of `dtype`) is finite. Testing bits vectorizes: a number is not finite when all bits
/// of its exponent are set.
pub fn is_finite(bytes: &[u8], dtype: DType) -> bool {
    // Whole blocks without an exit between, else the compiler makes a loop of single elements.
    const BLOCK: usize = 4096;
    let bad = |b: &[u8]| match dtype {
        DType::F32 => b.as_chunks::<4>().0.iter().fold(false, |bad, b| bad | (u32::from_le_bytes(*b) & 0x7f80_0000 == 0x7f80_0000)),
        DType::BF16 => b.as_chunks::<2>().0.iter().fold(false, |bad, b| bad | (u16::from_le_bytes(*b) & 0x7f80 == 0x7f80)),
        DType::I32 | DType::U8 => false,
    };
    !bytes.chunks(BLOCK).any(bad)
}

/// Fails if any value of `bytes` (elements of `dtype`, `F32` or `BF16`) is NaN or infinite, naming the first and counting all.
///
/// # Errors
/// [`Error::NotFinite`]; `name` is the tensor's.
pub fn check_finite(name: &str, bytes: &[u8], dtype: DType) -> Result<()> {
    let scan = |width: usize, bad: &dyn Fn(&[u8]) -> bool, value: &dyn Fn(&[u8]) -> f32| {
        let mut first = None;
        let mut count = 0;
        for (i, b) in bytes.chunks_exact(width).enumerate().filter(|(_, b)| bad(b)) {
            first.get_or_insert_with(|| (i, value(b)));
            count += 1;
        }
        first.map(|(index, value)| Error::NotFinite { name: name.into(), index, value, count, elems: bytes.len() / width })
    };
    if is_finite(bytes, dtype) {
        return Ok(());
    }
    let f32_of = |b: &[u8]| b.try_into().map_or(0.0, f32::from_le_bytes);
    let bf16_of = |b: &[u8]| b.try_into().map_or(0.0, |b| bf16::from_le_bytes(b).to_f32());
    let found = match dtype {
        DType::F32 => scan(4, &|b| !f32_of(b).is_finite(), &f32_of),
        _ => scan(2, &|b| !bf16_of(b).is_finite(), &bf16_of),
    };
    found.map_or(Ok(()), Err)
}
