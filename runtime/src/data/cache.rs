//! The token cache: one file per key (a hash of everything the tokens depend on), so that the second start, and every rank, only
//! reads. Written beside its final name and renamed, so that concurrent runs see all of it or nothing and the last rename wins with
//! the same bytes. A checksum at the end is verified on load; a damaged file is as good as none.
//!
//! Layout, little endian: magic (8), header bytes (u64), header (JSON), offsets (u64 x documents + 1), sources (u32, u32 x
//! documents), ids (u32 x tokens), trained (u8 x tokens), SHA-256 of all before (32).

use super::set::{Report, Source, TokenSet};
use sha2::{Digest, Sha256};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

const MAGIC: &[u8; 8] = b"ZRTTOK01";

#[derive(serde::Serialize, serde::Deserialize)]
struct Header {
    report: Report,
    pad_id: u32,
    documents: usize,
    tokens: usize,
}

/// Name of the cache file of `key`.
pub(crate) fn path_of(folder: &Path, key: &[u8; 32]) -> PathBuf {
    let name: String = key.iter().map(|b| format!("{b:02x}")).collect();
    folder.join(format!("{name}.tokens"))
}

/// Loads the set of `key`; `None` if there is none or it is damaged.
pub(crate) fn load(path: &Path, key: &[u8; 32], files: Vec<PathBuf>) -> Option<TokenSet> {
    let bytes = std::fs::read(path).ok()?;
    let set = parse(&bytes, key, files);
    if set.is_none() {
        tracing::warn!("token cache {} is damaged: building it anew", path.display());
    }
    set
}

fn parse(bytes: &[u8], key: &[u8; 32], files: Vec<PathBuf>) -> Option<TokenSet> {
    let (body, sum) = bytes.split_at(bytes.len().checked_sub(32)?);
    if Sha256::digest(body).as_slice() != sum {
        return None;
    }
    let mut rest = body.strip_prefix(MAGIC.as_slice())?;
    let mut take = |bytes: usize| -> Option<&[u8]> {
        let (head, tail) = rest.split_at_checked(bytes)?;
        rest = tail;
        Some(head)
    };
    let header_bytes = u64::from_le_bytes(take(8)?.try_into().ok()?);
    let header: Header = serde_json::from_slice(take(usize::try_from(header_bytes).ok()?)?).ok()?;
    let (documents, tokens) = (header.documents, header.tokens);
    let u32s = |bytes: &[u8]| bytes.chunks_exact(4).map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect::<Vec<u32>>();
    let offsets: Vec<u64> = take(documents.checked_add(1)?.checked_mul(8)?)?
        .chunks_exact(8)
        .map(|c| u64::from_le_bytes([c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7]]))
        .collect();
    let sources: Vec<Source> = u32s(take(documents.checked_mul(8)?)?).chunks_exact(2).map(|c| Source { file: c[0], line: c[1] }).collect();
    let ids = u32s(take(tokens.checked_mul(4)?)?);
    let trained = take(tokens)?.to_vec();
    let ordered = offsets.first() == Some(&0) && offsets.last() == Some(&(tokens as u64)) && offsets.is_sorted();
    let named = sources.iter().all(|s| (s.file as usize) < files.len());
    if !rest.is_empty() || !ordered || !named {
        return None;
    }
    Some(TokenSet { ids, trained, offsets, sources, files, pad_id: header.pad_id, report: header.report, fingerprint: *key })
}

/// Stores `set` at `path`, all or nothing.
pub(crate) fn store(path: &Path, set: &TokenSet) -> std::io::Result<()> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    let unique = format!("tmp-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let temporary = path.with_extension(unique);
    let result = write(&temporary, set).and_then(|()| std::fs::rename(&temporary, path));
    if result.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    result
}

fn write(path: &Path, set: &TokenSet) -> std::io::Result<()> {
    let file = std::fs::OpenOptions::new().write(true).create_new(true).open(path)?;
    let mut out = Hashing { out: BufWriter::with_capacity(1 << 20, &file), hash: Sha256::new() };
    let header = Header { report: set.report.clone(), pad_id: set.pad_id, documents: set.documents(), tokens: set.ids.len() };
    let header = serde_json::to_vec(&header)?;
    out.put(MAGIC)?;
    out.put(&(header.len() as u64).to_le_bytes())?;
    out.put(&header)?;
    set.offsets.iter().try_for_each(|o| out.put(&o.to_le_bytes()))?;
    set.sources.iter().try_for_each(|s| out.put(&s.file.to_le_bytes()).and_then(|()| out.put(&s.line.to_le_bytes())))?;
    let mut block = Vec::with_capacity(1 << 18);
    for ids in set.ids.chunks(1 << 16) {
        block.clear();
        ids.iter().for_each(|id| block.extend_from_slice(&id.to_le_bytes()));
        out.put(&block)?;
    }
    out.put(&set.trained)?;
    let sum = out.hash.finalize();
    out.out.write_all(&sum)?;
    out.out.flush()?;
    drop(out.out);
    file.sync_all()
}

struct Hashing<W: Write> {
    out: W,
    hash: Sha256,
}

impl<W: Write> Hashing<W> {
    fn put(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.hash.update(bytes);
        self.out.write_all(bytes)
    }
}
