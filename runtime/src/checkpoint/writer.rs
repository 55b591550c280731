//! How does a rank put its shards on disk, and when does a checkpoint exist? Streamed through one block; it exists from the
//! rename on, and that comes after every byte, every index and the manifest are synced and the pieces cover every parameter once.

use super::base::hex;
use super::{BLOCK_BYTES, Error, FORMAT, KINDS, Kind, MANIFEST, Manifest, Param, Result};
use crate::durable::{self, at};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

/// A rank's files, as the manifest names them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardInfo {
    /// Name of the data file.
    pub file: String,
    /// Its bytes.
    pub bytes: u64,
    /// Name of its index.
    pub index: String,
    /// Sha256 of the index, which holds the checksums of the data.
    pub index_sha256: String,
}

/// A range of a parameter in a data file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Piece {
    pub kind: Kind,
    pub param: String,
    /// First element.
    pub start: usize,
    pub elems: usize,
    /// Byte offset in the data file.
    pub offset: u64,
}

/// `rank-00000.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Index {
    pub bytes: u64,
    pub pieces: Vec<Piece>,
    /// Sha256 of each block of [`BLOCK_BYTES`], the last one shorter.
    pub blocks: Vec<String>,
}

pub(super) fn data_name(rank: usize) -> String {
    format!("rank-{rank:05}.bin")
}

pub(super) fn index_name(rank: usize) -> String {
    format!("rank-{rank:05}.json")
}

/// Writes one rank's data file. Dropped before [`ShardWriter::finish`], it removes the file.
#[derive(Debug)]
pub struct ShardWriter {
    path: PathBuf,
    rank: usize,
    file: File,
    block: Vec<u8>,
    index: Index,
    done: bool,
}

impl ShardWriter {
    /// Starts `rank`'s file in the temporary folder, which is made if it is not there yet. All ranks use the same [`super::tmp_dir`].
    ///
    /// # Errors
    /// The folder cannot be made or written.
    pub fn create(tmp: &Path, rank: usize) -> Result<ShardWriter> {
        fs::create_dir_all(tmp).map_err(at("create", tmp))?;
        let path = tmp.join(data_name(rank));
        let file = File::options().write(true).create_new(true).open(&path).map_err(at("create", &path))?;
        let index = Index { bytes: 0, pieces: Vec::new(), blocks: Vec::new() };
        Ok(ShardWriter { path, rank, file, block: Vec::with_capacity(BLOCK_BYTES), index, done: false })
    }

    /// Appends elements `start..start + values.len()` of a parameter. Over all ranks, every element of every kind is written exactly
    /// once: a parameter that ranks hold copies of is written by one of them, or cut between them.
    ///
    /// # Errors
    /// The disk is full or fails.
    pub fn write(&mut self, kind: Kind, param: &str, start: usize, values: &[f32]) -> Result<()> {
        if values.is_empty() {
            return Ok(());
        }
        let piece = Piece { kind, param: param.into(), start, elems: values.len(), offset: self.index.bytes };
        self.index.pieces.push(piece);
        let mut bytes: &[u8] = bytemuck::cast_slice(values);
        self.index.bytes += bytes.len() as u64;
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(BLOCK_BYTES - self.block.len()));
            self.block.extend_from_slice(now);
            bytes = later;
            if self.block.len() == BLOCK_BYTES {
                self.flush()?;
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        self.index.blocks.push(hex(&Sha256::digest(&self.block)));
        self.file.write_all(&self.block).map_err(at("write", &self.path))?;
        self.block.clear();
        Ok(())
    }

    /// Syncs the data and writes its index. A barrier of the ranks must follow before [`commit`].
    ///
    /// # Errors
    /// The disk is full or fails; the files are removed.
    pub fn finish(mut self) -> Result<ShardInfo> {
        if !self.block.is_empty() {
            self.flush()?;
        }
        self.file.sync_all().map_err(at("sync", &self.path))?;
        let dir = self.path.parent().unwrap_or(Path::new("."));
        let text = serde_json::to_vec(&self.index).map_err(|e| Error::Damaged { dir: dir.into(), what: e.to_string() })?;
        durable::write_new(&dir.join(index_name(self.rank)), &text)?;
        self.done = true;
        Ok(ShardInfo {
            file: data_name(self.rank),
            bytes: self.index.bytes,
            index: index_name(self.rank),
            index_sha256: hex(&Sha256::digest(&text)),
        })
    }
}

impl Drop for ShardWriter {
    fn drop(&mut self) {
        if !self.done {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Makes the checkpoint exist: checks that the ranks' pieces cover every parameter once, writes the manifest, syncs, renames `tmp` to `final_dir`.
/// Called by rank 0 after every rank has finished. Returns the manifest as written.
///
/// # Errors
/// A rank's file is missing, an element is missing or written twice, or the disk fails; then `tmp` is removed and earlier checkpoints are as before.
pub fn commit(tmp: &Path, manifest: Manifest, final_dir: &Path) -> Result<Manifest> {
    let done = prepare(tmp, manifest).and_then(|m| {
        durable::install(tmp, final_dir)?;
        Ok(m)
    });
    if done.is_err() {
        abandon(tmp);
    }
    done
}

fn prepare(tmp: &Path, mut manifest: Manifest) -> Result<Manifest> {
    manifest.format = FORMAT;
    manifest.files.clear();
    let mut all = Vec::with_capacity(manifest.ranks);
    for rank in 0..manifest.ranks {
        let (info, index) = read_index(tmp, rank)?;
        manifest.files.push(info);
        all.push(index);
    }
    check_cover(&manifest.params, all.iter().flat_map(|i| &i.pieces))?;
    let text = serde_json::to_vec_pretty(&manifest).map_err(|e| Error::Damaged { dir: tmp.into(), what: e.to_string() })?;
    durable::write_new(&tmp.join(MANIFEST), &text)?;
    Ok(manifest)
}

/// A rank's index, with its data file's size checked.
pub(super) fn read_index(dir: &Path, rank: usize) -> Result<(ShardInfo, Index)> {
    let damaged = |what: String| Error::Damaged { dir: dir.into(), what };
    let (file, name) = (data_name(rank), index_name(rank));
    let path = dir.join(&name);
    let text = fs::read(&path).map_err(at("read", &path))?;
    let index: Index = serde_json::from_slice(&text).map_err(|e| damaged(format!("{name} is not valid: {e}")))?;
    let data = dir.join(&file);
    let bytes = fs::metadata(&data).map_err(at("read", &data))?.len();
    if bytes != index.bytes {
        return Err(damaged(format!("{file} has {bytes} bytes, expected {}", index.bytes)));
    }
    if index.blocks.len() as u64 != bytes.div_ceil(BLOCK_BYTES as u64) {
        return Err(damaged(format!("{name} has {} checksums for {bytes} bytes", index.blocks.len())));
    }
    let inside = |p: &Piece| (p.elems as u64).checked_mul(4).and_then(|b| b.checked_add(p.offset)).is_some_and(|end| end <= bytes);
    if let Some(p) = index.pieces.iter().find(|p| !inside(p)) {
        return Err(damaged(format!("{name}: the piece of '{}' at byte {} leaves the file", p.param, p.offset)));
    }
    Ok((ShardInfo { file, bytes, index: name, index_sha256: hex(&Sha256::digest(&text)) }, index))
}

/// Every element of every parameter and kind in exactly one piece.
pub(super) fn check_cover<'a>(params: &[Param], pieces: impl Iterator<Item = &'a Piece>) -> Result<()> {
    let mut ranges: HashMap<(Kind, &str), Vec<(usize, usize)>> = HashMap::new();
    for p in pieces {
        ranges.entry((p.kind, &p.param)).or_default().push((p.start, p.elems));
    }
    for param in params {
        for kind in KINDS {
            let bad = |what: String| Error::Piece { kind, param: param.name.clone(), what };
            let mut found = ranges.remove(&(kind, param.name.as_str())).unwrap_or_default();
            found.sort_unstable();
            let mut next = 0;
            for (start, elems) in found {
                if start < next {
                    return Err(bad(format!("element {start} was written twice; of copies only one rank writes")));
                }
                if start > next {
                    return Err(bad(format!("elements {next}..{start} were not written by any rank")));
                }
                next = start.saturating_add(elems);
            }
            if next != param.elems() {
                return Err(bad(format!("elements 0..{next} were written, the shape {:?} has {}", param.shape, param.elems())));
            }
        }
    }
    match ranges.into_keys().next() {
        Some((kind, param)) => Err(Error::Piece { kind, param: param.into(), what: "the manifest has no such parameter".into() }),
        None => Ok(()),
    }
}

/// Gives up a checkpoint in the making; what cannot be removed now is removed at the next start ([`super::sweep`]).
pub fn abandon(tmp: &Path) {
    let _ = fs::remove_dir_all(tmp);
}
