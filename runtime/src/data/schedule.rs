//! Which tokens each micro-batch of each step holds. Pure arithmetic over the lengths of documents: every rank computes the same
//! schedule from (data, seed, batch sizes), whatever the world size, so ranks cannot disagree on counts; and any step is found
//! directly, so that resuming is a seek.
//!
//! Documents -> rows of `seq_len` tokens (packed or one each) -> rows of all epochs, permuted per epoch, as one stream. Step `s`
//! takes rows `[s*global, (s+1)*global)` of the stream, its micro-batch `m` rows `[m*mbs, (m+1)*mbs)` of those. Rows past the end are
//! missing: all padding, no weight.

use super::packing::Rows;
use super::{DataError, TokenSet};
use std::sync::{Arc, Mutex};
use zrt_kernels::philox;

/// The label of a token that is not trained.
pub const IGNORE: i32 = -100;

/// How long training lasts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Length {
    /// Optimizer steps; the data repeats as needed.
    Steps(u64),
    /// Passes over the rows, also fractions of one.
    Epochs(f64),
}

/// What a schedule depends on beside the data.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScheduleSpec {
    /// Tokens of one row.
    pub seq_len: usize,
    /// Rows of one micro-batch.
    pub micro_batch_size: usize,
    /// Rows of one step over all ranks; a multiple of `micro_batch_size`.
    pub global_batch_size: usize,
    /// Several documents per row.
    pub packing: bool,
    /// A new order each epoch.
    pub shuffle: bool,
    /// Key of the order.
    pub seed: u64,
    /// Steps or epochs.
    pub length: Length,
}

/// A document within a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Index into the [`TokenSet`].
    pub document: usize,
    /// First token, as an index into the batch.
    pub start: usize,
    /// Its tokens.
    pub tokens: usize,
}

/// One micro-batch on the host, `N = micro_batch_size * seq_len` tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostBatch {
    /// `[N]` token ids; padding has the pad id.
    pub ids: Vec<i32>,
    /// `[N]` the token to predict at each position (already shifted), or [`IGNORE`].
    pub labels: Vec<i32>,
    /// `[N]` position within the document.
    pub positions: Vec<i32>,
    /// `[N+1]` boundaries of documents: entries `0..=documents` ascend from 0 to N, the rest are N.
    pub cu_seqlens: Vec<i32>,
    /// Intervals of `cu_seqlens`; the padding of a row counts as one.
    pub documents: usize,
    /// Labels that are not [`IGNORE`].
    pub trained: u64,
    /// Tokens that are not padding.
    pub tokens: u64,
    /// The documents, in order.
    pub samples: Vec<Sample>,
}

/// The schedule of a run.
#[derive(Debug)]
pub struct Schedule {
    set: Arc<TokenSet>,
    spec: ScheduleSpec,
    rows: Rows,
    /// Trained targets per row.
    row_targets: Vec<u64>,
    total_rows: u64,
    total_steps: u64,
    /// The permutations of the epochs used last; a cache, never a state.
    orders: Mutex<Vec<(u64, Arc<Vec<u32>>)>>,
}

impl Schedule {
    /// The schedule of `set` under `spec`. Fails on zero sizes, on a global batch that micro-batches do not fill evenly, and on documents longer than a row.
    pub fn new(set: Arc<TokenSet>, spec: ScheduleSpec) -> Result<Schedule, DataError> {
        let invalid = |message: String| Err(DataError::Invalid(message));
        let ScheduleSpec { seq_len, micro_batch_size: mbs, global_batch_size: global, .. } = spec;
        if seq_len < 2 || mbs == 0 || global == 0 {
            return invalid(format!(
                "seq_len {seq_len} must be at least 2, micro_batch_size {mbs} and global_batch_size {global} at least 1"
            ));
        }
        if !global.is_multiple_of(mbs) {
            let (low, high) = (global / mbs * mbs, global.div_ceil(mbs) * mbs);
            return invalid(format!(
                "global_batch_size {global} is not a multiple of micro_batch_size {mbs} ({global} = {} x {mbs} + {}): try {}{high}",
                global / mbs,
                global % mbs,
                if low > 0 { format!("{low} or ") } else { String::new() }
            ));
        }
        let Some(n) = mbs.checked_mul(seq_len).filter(|&n| n < i32::MAX as usize) else {
            return invalid(format!("micro_batch_size {mbs} x seq_len {seq_len} does not fit 31 bits: lower one of them"));
        };
        if set.documents() == 0 {
            return Err(DataError::Empty("the token set holds no documents".into()));
        }
        if set.documents() > u32::MAX as usize / 4 {
            return invalid(format!("{} documents are more than {}", set.documents(), u32::MAX / 4));
        }
        if let Some(d) = (0..set.documents()).find(|&d| set.document_tokens(d) > seq_len) {
            let (name, tokens) = (set.name(set.document(d).source), set.document_tokens(d));
            return invalid(format!("{name}: {tokens} tokens are longer than seq_len {seq_len}: tokenize with this seq_len"));
        }
        debug_assert!(n >= 2);
        let rows = if spec.packing {
            let lengths: Vec<u32> = (0..set.documents()).map(|d| set.document_tokens(d) as u32).collect();
            Rows::packed(&lengths, seq_len as u32)
        } else {
            Rows::single(set.documents())
        };
        let row_targets: Vec<u64> = (0..rows.len()).map(|r| rows.row(r).iter().map(|&d| set.document_targets(d as usize)).sum()).collect();
        let (total_rows, total_steps) = match spec.length {
            Length::Steps(0) => return invalid("training.steps is 0: give at least 1".into()),
            Length::Steps(steps) => (u64::MAX, steps),
            Length::Epochs(epochs) => {
                let all = (epochs * rows.len() as f64).ceil();
                if !(epochs > 0.0 && all < 9e15) {
                    return invalid(format!("training.epochs is {epochs}: give a positive number"));
                }
                (all as u64, (all as u64).div_ceil(global as u64))
            }
        };
        Ok(Schedule { set, spec, rows, row_targets, total_rows, total_steps, orders: Mutex::new(Vec::new()) })
    }

    /// All rows once, in order: step `s` is one micro-batch of `micro_batch_size` rows. For the evaluation loss.
    pub fn evaluation(set: Arc<TokenSet>, seq_len: usize, micro_batch_size: usize, packing: bool) -> Result<Schedule, DataError> {
        let global_batch_size = micro_batch_size;
        let spec =
            ScheduleSpec { seq_len, micro_batch_size, global_batch_size, packing, shuffle: false, seed: 0, length: Length::Epochs(1.0) };
        Schedule::new(set, spec)
    }

    /// Optimizer steps of the run.
    pub fn total_steps(&self) -> u64 {
        self.total_steps
    }

    /// Micro-batches of each step, over all ranks.
    pub fn micro_batches(&self) -> usize {
        self.spec.global_batch_size / self.spec.micro_batch_size
    }

    /// Rows of one epoch.
    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    /// Tokens `N` of one micro-batch, padding included.
    pub fn batch_tokens(&self) -> usize {
        self.spec.micro_batch_size * self.spec.seq_len
    }

    /// Share of one epoch's tokens that is not padding.
    pub fn fill(&self) -> f64 {
        self.set.tokens() as f64 / (self.rows.len() as f64 * self.spec.seq_len as f64)
    }

    /// The data.
    pub fn set(&self) -> &TokenSet {
        &self.set
    }

    /// What it was made from.
    pub fn spec(&self) -> &ScheduleSpec {
        &self.spec
    }

    /// Documents of row `row` of an unshuffled epoch.
    pub fn row_documents(&self, row: usize) -> &[u32] {
        self.rows.row(row)
    }

    /// Supervised targets of a step over all micro-batches: what its loss is divided by. 0 for a step past the end.
    pub fn trained_tokens(&self, step: u64) -> u64 {
        (0..self.spec.global_batch_size as u64).filter_map(|i| self.row_at(step, i)).map(|row| self.row_targets[row]).sum()
    }

    /// Micro-batch `micro_batch` of step `step`. Past the last step or micro-batch: all rows are missing, `trained` is 0.
    pub fn batch(&self, step: u64, micro_batch: usize) -> HostBatch {
        let ScheduleSpec { seq_len, micro_batch_size: mbs, .. } = self.spec;
        let n = mbs * seq_len;
        let pad = self.set.pad_id as i32;
        let mut batch = HostBatch {
            ids: vec![pad; n],
            labels: vec![IGNORE; n],
            positions: vec![0; n],
            cu_seqlens: Vec::with_capacity(n + 1),
            documents: 0,
            trained: 0,
            tokens: 0,
            samples: Vec::new(),
        };
        batch.cu_seqlens.push(0);
        for j in 0..mbs {
            let index = micro_batch.saturating_mul(mbs).saturating_add(j);
            let row = if index < self.spec.global_batch_size { self.row_at(step, index as u64) } else { None };
            let mut at = j * seq_len;
            for &document in row.map_or(&[][..], |r| self.rows.row(r)) {
                at = self.place(&mut batch, document as usize, at);
            }
            let end = (j + 1) * seq_len;
            if at < end {
                (at..end).for_each(|i| batch.positions[i] = (i - at) as i32);
                batch.cu_seqlens.push(end as i32);
            }
        }
        batch.documents = batch.cu_seqlens.len() - 1;
        batch.cu_seqlens.resize(n + 1, n as i32);
        batch
    }

    /// Writes a document at token `at` and returns the token after it.
    fn place(&self, batch: &mut HostBatch, document: usize, at: usize) -> usize {
        let doc = self.set.document(document);
        let tokens = doc.ids.len();
        for i in 0..tokens {
            batch.ids[at + i] = doc.ids[i] as i32;
            batch.positions[at + i] = i as i32;
            if i + 1 < tokens && doc.trained[i + 1] != 0 {
                batch.labels[at + i] = doc.ids[i + 1] as i32;
                batch.trained += 1;
            }
        }
        batch.tokens += tokens as u64;
        batch.cu_seqlens.push((at + tokens) as i32);
        batch.samples.push(Sample { document, start: at, tokens });
        at + tokens
    }

    /// The row that is number `index` of step `step`, if there is one.
    fn row_at(&self, step: u64, index: u64) -> Option<usize> {
        if step >= self.total_steps {
            return None;
        }
        let position = step.checked_mul(self.spec.global_batch_size as u64)?.checked_add(index)?;
        if position >= self.total_rows {
            return None;
        }
        let rows = self.rows.len() as u64;
        let (epoch, within) = (position / rows, (position % rows) as usize);
        Some(if self.spec.shuffle { self.order(epoch)[within] as usize } else { within })
    }

    /// The permutation of an epoch: rows sorted by random 64-bit keys, keyed by (seed, epoch, row).
    fn order(&self, epoch: u64) -> Arc<Vec<u32>> {
        // A poisoned lock only means that another thread panicked; the entries are complete or absent.
        let mut orders = self.orders.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some((_, order)) = orders.iter().find(|(e, _)| *e == epoch) {
            return order.clone();
        }
        let key = philox::key_of(self.spec.seed, "data.order");
        let mut keyed: Vec<(u64, u32)> = (0..self.rows.len() as u32)
            .map(|row| {
                let w = philox::philox4x32([row, epoch as u32, (epoch >> 32) as u32, 0], key);
                (u64::from(w[0]) << 32 | u64::from(w[1]), row)
            })
            .collect();
        keyed.sort_unstable();
        let order = Arc::new(keyed.into_iter().map(|(_, row)| row).collect::<Vec<u32>>());
        // A step that spans two epochs, and loaders that run ahead, need two at a time.
        if orders.len() >= 2 {
            orders.remove(0);
        }
        orders.push((epoch, order.clone()));
        order
    }
}
