//! Writes checkpoints beside the training: a thread per save takes pieces from a queue of bounded bytes.
//!
//! A small state (LoRA) fits the queue, and the step loop goes on at once; a large one makes the loop wait for the disk, but never
//! takes more memory than the queue. Rank 0's thread commits when all ranks have finished their files, which they say through the
//! store, so no collective waits for a disk. Every outcome is a value that all ranks learn: a failed save leaves the training and earlier checkpoints as they were.

use crate::checkpoint::{self, Kind, Manifest, ShardWriter};
use crate::error::{Error, Result};
use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use zrt_collectives::store::Store;

/// Bytes that may wait in the queue.
const QUEUE_BYTES: usize = 64 << 20;

type Piece = (Kind, String, usize, Vec<f32>);

#[derive(Default)]
struct Queue {
    pieces: VecDeque<Piece>,
    bytes: usize,
    closed: bool,
    /// The writer is gone: pieces are dropped.
    dead: bool,
}

struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
    /// Nobody waits for the outcome any more: the run is ending with an error.
    abandoned: AtomicBool,
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn wait<'a>(&self, q: std::sync::MutexGuard<'a, Queue>) -> std::sync::MutexGuard<'a, Queue> {
        self.changed.wait(q).unwrap_or_else(|e| e.into_inner())
    }
}

/// A save in progress.
pub struct Save {
    step: u64,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    store: Arc<dyn Store>,
}

/// Where and as whom to save.
#[derive(Clone)]
pub struct SavePlace {
    /// The run folder.
    pub folder: PathBuf,
    /// The same on all ranks of this start of the run.
    pub nonce: String,
    /// This rank.
    pub rank: usize,
    /// All ranks.
    pub ranks: usize,
    /// Checkpoints kept.
    pub keep: usize,
    /// Longest wait for the others' disks without news.
    pub patience: Duration,
}

fn key(place: &SavePlace, step: u64, what: &str) -> String {
    format!("checkpoint/{}/{step}/{what}", place.nonce)
}

impl Save {
    /// Starts to save `manifest.step`. Give the state with [`Save::push`], then [`Save::close`].
    pub fn start(place: SavePlace, manifest: Manifest, store: Arc<dyn Store>) -> Result<Save> {
        let step = manifest.step;
        let shared = Arc::new(Shared { queue: Mutex::default(), changed: Condvar::new(), abandoned: AtomicBool::new(false) });
        let (inner, inner_store) = (shared.clone(), store.clone());
        let thread = std::thread::Builder::new()
            .name("checkpoint".into())
            .spawn(move || run(&place, manifest, &inner, &*inner_store))
            .map_err(|e| Error::Save(format!("cannot start the checkpoint thread: {e}")))?;
        Ok(Save { step, shared, thread: Some(thread), store })
    }

    /// Queues one piece; waits while the queue is full.
    pub fn push(&self, kind: Kind, name: &str, start: usize, values: &[f32]) {
        let bytes = values.len() * 4;
        let mut q = self.shared.lock();
        while q.bytes > 0 && q.bytes + bytes > QUEUE_BYTES && !q.dead {
            q = self.shared.wait(q);
        }
        if !q.dead {
            q.bytes += bytes;
            q.pieces.push_back((kind, name.to_string(), start, values.to_vec()));
        }
        self.shared.changed.notify_all();
    }

    /// No more pieces.
    pub fn close(&self) {
        self.shared.lock().closed = true;
        self.shared.changed.notify_all();
    }

    /// Waits for the outcome, the same on all ranks: the checkpoint's folder, or what went wrong.
    pub fn wait(mut self, place: &SavePlace) -> Result<PathBuf> {
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        let outcome = self.store.get(&key(place, self.step, "done"), 3 * place.patience)?;
        let outcome = String::from_utf8_lossy(&outcome);
        match outcome.split_once(' ') {
            None => Ok(checkpoint::step_dir(&place.folder, self.step)),
            Some((rank, why)) => Err(Error::Checkpoint { rank: rank.parse().unwrap_or_default(), why: why.into() }),
        }
    }
}

impl Drop for Save {
    fn drop(&mut self) {
        self.shared.abandoned.store(true, Ordering::Relaxed);
        self.close();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The thread: write this rank's file, tell the others, and on rank 0 commit.
fn run(place: &SavePlace, manifest: Manifest, shared: &Shared, store: &dyn Store) {
    let step = manifest.step;
    let tmp = checkpoint::tmp_dir(&place.folder, step, &place.nonce);
    let written = write_file(&tmp, place.rank, shared);
    {
        let mut q = shared.lock();
        q.dead = true;
        q.pieces.clear();
        q.bytes = 0;
    }
    shared.changed.notify_all();
    let word = written.err().unwrap_or_default();
    // If the store is gone, so is the job; the temporary folder is swept at the next start.
    let _ = store.set(&key(place, step, &place.rank.to_string()), word.as_bytes());
    if place.rank != 0 {
        return;
    }
    let outcome = others(place, step, store, &shared.abandoned).inspect_err(|_| checkpoint::abandon(&tmp)).and_then(|()| {
        checkpoint::commit(&tmp, manifest, &checkpoint::step_dir(&place.folder, step)).map(drop).map_err(|e| (0, e.to_string()))
    });
    if outcome.is_ok()
        && let Err(e) = checkpoint::keep_latest(&place.folder, place.keep)
    {
        tracing::warn!("old checkpoints stay: {e}");
    }
    let word = outcome.map_or_else(|(rank, why)| format!("{rank} {why}"), |()| "ok".into());
    let _ = store.set(&key(place, step, "done"), word.as_bytes());
}

/// Until all ranks have finished their files; an error is of the first rank that could not.
fn others(place: &SavePlace, step: u64, store: &dyn Store, abandoned: &AtomicBool) -> Result<(), (usize, String)> {
    let until = Instant::now() + place.patience;
    for rank in 0..place.ranks {
        let word = loop {
            match store.get(&key(place, step, &rank.to_string()), Duration::from_millis(500)) {
                Ok(word) => break word,
                Err(_) if !abandoned.load(Ordering::Relaxed) && Instant::now() < until => {}
                Err(e) => return Err((rank, format!("it did not finish its file: {e}"))),
            }
        };
        if !word.is_empty() {
            return Err((rank, String::from_utf8_lossy(&word).into_owned()));
        }
    }
    Ok(())
}

fn write_file(tmp: &Path, rank: usize, shared: &Shared) -> Result<(), String> {
    let mut writer = ShardWriter::create(tmp, rank).map_err(|e| e.to_string())?;
    loop {
        let mut q = shared.lock();
        let piece = loop {
            match q.pieces.pop_front() {
                Some(piece) => break Some(piece),
                None if q.closed => break None,
                None => q = shared.wait(q),
            }
        };
        drop(q);
        let Some((kind, name, start, values)) = piece else { break };
        writer.write(kind, &name, start, &values).map_err(|e| e.to_string())?;
        shared.lock().bytes -= values.len() * 4;
        shared.changed.notify_all();
    }
    writer.finish().map(|_| ()).map_err(|e| e.to_string())
}
