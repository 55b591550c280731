//! Which bytes are elements a..b of a parameter? Assembled from pieces of whatever layout wrote them; each block is checked
//! against its sha256 as it is read, so a flipped bit is an error and never a weight.

use super::base::hex;
use super::writer::{Index, Piece, check_cover, read_index};
use super::{BLOCK_BYTES, Error, FORMAT, Kind, MANIFEST, Manifest, Result};
use crate::durable::at;
use rayon::prelude::*;
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// An open checkpoint. Shared freely between threads.
#[derive(Debug)]
pub struct Reader {
    dir: PathBuf,
    manifest: Manifest,
    files: Vec<DataFile>,
    /// Pieces of each (kind, parameter) by first element: (start, elems, file, offset).
    pieces: HashMap<Kind, HashMap<String, Vec<Placed>>>,
}

#[derive(Clone, Copy, Debug)]
struct Placed {
    start: usize,
    elems: usize,
    file: usize,
    offset: u64,
}

#[derive(Debug)]
struct DataFile {
    path: PathBuf,
    file: File,
    bytes: u64,
    blocks: Vec<String>,
    /// The block read last: neighbouring small tensors share one.
    last: Mutex<Option<(usize, Vec<u8>)>>,
}

impl Reader {
    /// Opens a checkpoint: manifest, sizes, indices and coverage are checked now, data as it is read (all of it by [`Reader::verify`]).
    ///
    /// # Errors
    /// Anything is missing, truncated, changed or of another format.
    pub fn open(dir: &Path) -> Result<Reader> {
        let damaged = |what: String| Error::Damaged { dir: dir.into(), what };
        let path = dir.join(MANIFEST);
        let text = std::fs::read(&path).map_err(at("read", &path))?;
        let value: serde_json::Value = serde_json::from_slice(&text).map_err(|e| damaged(format!("{MANIFEST} is not valid: {e}")))?;
        match value.get("format").and_then(serde_json::Value::as_u64) {
            Some(f) if f == u64::from(FORMAT) => {}
            got => return Err(Error::Format { dir: dir.into(), got: got.unwrap_or(0) as u32 }),
        }
        let manifest: Manifest = serde_json::from_value(value).map_err(|e| damaged(format!("{MANIFEST} is not valid: {e}")))?;
        if manifest.files.len() != manifest.ranks {
            return Err(damaged(format!("{MANIFEST} names {} files for {} ranks", manifest.files.len(), manifest.ranks)));
        }
        let mut indices: Vec<Index> = Vec::new();
        let mut files = Vec::new();
        for (rank, expected) in manifest.files.iter().enumerate() {
            let (info, index) = read_index(dir, rank)?;
            if info != *expected {
                return Err(damaged(format!("{} is not the one that {MANIFEST} names", info.index)));
            }
            let path = dir.join(&info.file);
            let file = File::open(&path).map_err(at("open", &path))?;
            files.push(DataFile { path, file, bytes: info.bytes, blocks: index.blocks.clone(), last: Mutex::new(None) });
            indices.push(index);
        }
        check_cover(&manifest.params, indices.iter().flat_map(|i| &i.pieces))?;
        let mut pieces: HashMap<Kind, HashMap<String, Vec<Placed>>> = HashMap::new();
        for (file, index) in indices.into_iter().enumerate() {
            for Piece { kind, param, start, elems, offset } in index.pieces {
                pieces.entry(kind).or_default().entry(param).or_default().push(Placed { start, elems, file, offset });
            }
        }
        for list in pieces.values_mut().flat_map(HashMap::values_mut) {
            list.sort_by_key(|p| p.start);
        }
        Ok(Reader { dir: dir.into(), manifest, files, pieces })
    }

    /// The manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Reads elements `start..start + dst.len()` of a parameter.
    ///
    /// # Errors
    /// There is no such parameter or range, or a block is damaged.
    pub fn read(&self, kind: Kind, param: &str, start: usize, dst: &mut [f32]) -> Result<()> {
        let list = self.pieces.get(&kind).and_then(|by_name| by_name.get(param));
        let list = list.ok_or_else(|| Error::NoParam { dir: self.dir.clone(), param: param.into() })?;
        let total = list.last().map_or(0, |p| p.start + p.elems);
        let end = start.checked_add(dst.len()).filter(|end| *end <= total).ok_or_else(|| Error::Piece {
            kind,
            param: param.into(),
            what: format!("elements {start}.. + {} of {total} were asked for", dst.len()),
        })?;
        let first = list.partition_point(|p| p.start + p.elems <= start);
        for p in list[first..].iter().take_while(|p| p.start < end) {
            let (from, to) = (start.max(p.start), end.min(p.start + p.elems));
            let part = &mut dst[from - start..to - start];
            self.fetch(p.file, p.offset + (from - p.start) as u64 * 4, bytemuck::cast_slice_mut(part))?;
        }
        Ok(())
    }

    /// Copies bytes of a data file, checking every block they touch.
    fn fetch(&self, file: usize, offset: u64, dst: &mut [u8]) -> Result<()> {
        let f = &self.files[file];
        let mut done = 0;
        while done < dst.len() {
            let at_byte = offset + done as u64;
            let (block, skip) = ((at_byte / BLOCK_BYTES as u64) as usize, (at_byte % BLOCK_BYTES as u64) as usize);
            // A poisoned lock only means that another reader panicked; the cached block is whole or absent.
            let mut last = f.last.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            let bytes = match last.take() {
                Some((cached, bytes)) if cached == block => bytes,
                _ => self.block(f, block)?,
            };
            let n = (bytes.len() - skip).min(dst.len() - done);
            dst[done..done + n].copy_from_slice(&bytes[skip..skip + n]);
            done += n;
            *last = Some((block, bytes));
        }
        Ok(())
    }

    fn block(&self, f: &DataFile, block: usize) -> Result<Vec<u8>> {
        let begin = block as u64 * BLOCK_BYTES as u64;
        let mut bytes = vec![0u8; (f.bytes - begin).min(BLOCK_BYTES as u64) as usize];
        f.file.read_exact_at(&mut bytes, begin).map_err(at("read", &f.path))?;
        if hex(&Sha256::digest(&bytes)) != f.blocks[block] {
            let what = format!("{} is damaged at byte {begin}: the checksum differs; resume from an earlier checkpoint", f.path.display());
            return Err(Error::Damaged { dir: self.dir.clone(), what });
        }
        Ok(bytes)
    }

    /// Reads and checks every block, in parallel.
    ///
    /// # Errors
    /// The first damaged block.
    pub fn verify(&self) -> Result<()> {
        self.files.iter().try_for_each(|f| (0..f.blocks.len()).into_par_iter().try_for_each(|b| self.block(f, b).map(|_| ())))
    }
}
