//! What tokenizing yields: every document of every file as flat ids, with a mask of what is trained. Immutable, the same on
//! every rank, and small (5 bytes a token), so that each rank simply holds it all.

use super::DataError;
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};

/// The line a document came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// Index into [`TokenSet::files`].
    pub file: u32,
    /// Line, counted from 1.
    pub line: u32,
}

/// One document.
#[derive(Clone, Copy, Debug)]
pub struct Document<'a> {
    /// Token ids.
    pub ids: &'a [u32],
    /// Per token: 1 if the model learns to predict it, else 0. By position, never by id.
    pub trained: &'a [u8],
    /// Where it came from.
    pub source: Source,
}

/// What happened on the way from rows to tokens. Counts are over all files.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Report {
    /// Rows read (blank lines are not rows).
    pub rows: u64,
    /// Documents kept.
    pub documents: u64,
    /// Tokens kept.
    pub tokens: u64,
    /// Tokens that are trained as targets (the first token of a document never is).
    pub trained: u64,
    /// Rows cut to `seq_len`.
    pub truncated: u64,
    /// Tokens lost by cutting.
    pub truncated_tokens: u64,
    /// Rows dropped because no token of them is trained (after cutting).
    pub dropped: u64,
    /// Pieces that long texts gave beyond their first.
    pub split: u64,
    /// `file:line` of the first truncated rows.
    pub truncated_examples: Vec<String>,
    /// `file:line` of the first dropped rows.
    pub dropped_examples: Vec<String>,
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let share = 100.0 * self.trained as f64 / (self.tokens.max(1)) as f64;
        write!(f, "{} rows -> {} documents, {} tokens, {} trained ({share:.1} %)", self.rows, self.documents, self.tokens, self.trained)?;
        if self.split > 0 {
            write!(f, "; long texts gave {} further pieces", self.split)?;
        }
        if self.truncated > 0 {
            let (n, lost, names) = (self.truncated, self.truncated_tokens, places(&self.truncated_examples));
            write!(f, "; {n} longer than seq_len were cut ({lost} tokens lost; first: {names})")?;
        }
        if self.dropped > 0 {
            write!(f, "; {} without a trained token were dropped (first: {})", self.dropped, places(&self.dropped_examples))?;
        }
        Ok(())
    }
}

/// `a.jsonl:1, 4, b.jsonl:2`: each file once for the lines that follow each other.
fn places(all: &[String]) -> String {
    let mut text = String::new();
    let mut last = None;
    for place in all {
        let (file, line) = place.rsplit_once(':').unwrap_or((place, ""));
        let shown = if last == Some(file) { line } else { place };
        text += &format!("{}{shown}", if text.is_empty() { "" } else { ", " });
        last = Some(file);
    }
    text
}

/// All documents, tokenized.
#[derive(Clone, Debug)]
pub struct TokenSet {
    pub(crate) ids: Vec<u32>,
    pub(crate) trained: Vec<u8>,
    /// `documents + 1` boundaries into `ids`.
    pub(crate) offsets: Vec<u64>,
    pub(crate) sources: Vec<Source>,
    pub(crate) files: Vec<PathBuf>,
    pub(crate) pad_id: u32,
    pub(crate) report: Report,
    pub(crate) fingerprint: [u8; 32],
}

impl TokenSet {
    /// A set from documents made elsewhere: `(ids, trained)` pairs of equal length. Documents without a trained target are dropped
    /// and counted, as [`prepare`](super::prepare()) does.
    pub fn from_documents(documents: impl IntoIterator<Item = (Vec<u32>, Vec<bool>)>, pad_id: u32) -> Result<TokenSet, DataError> {
        let mut set = TokenSet::empty(vec![PathBuf::from("memory")], pad_id);
        let mut hash = Sha256::new();
        for (line, (ids, trained)) in (1u32..).zip(documents) {
            if ids.len() != trained.len() {
                let (a, b) = (ids.len(), trained.len());
                return Err(DataError::Invalid(format!("document {line}: {a} ids but a mask of {b}: one entry per token is needed")));
            }
            set.report.rows += 1;
            let mask: Vec<u8> = trained.iter().map(|&t| u8::from(t)).collect();
            for (id, m) in ids.iter().zip(&mask) {
                hash.update(id.to_le_bytes());
                hash.update([*m]);
            }
            hash.update([2]);
            set.push(&ids, &mask, Source { file: 0, line });
        }
        set.fingerprint = hash.finalize().into();
        if set.documents() == 0 {
            return Err(DataError::Empty("no document has a trained token".into()));
        }
        Ok(set)
    }

    pub(crate) fn empty(files: Vec<PathBuf>, pad_id: u32) -> TokenSet {
        TokenSet {
            ids: Vec::new(),
            trained: Vec::new(),
            offsets: vec![0],
            sources: Vec::new(),
            files,
            pad_id,
            report: Report::default(),
            fingerprint: [0; 32],
        }
    }

    /// Appends a document, or counts it as dropped when none of its targets is trained.
    pub(crate) fn push(&mut self, ids: &[u32], trained: &[u8], source: Source) -> bool {
        let targets = count_targets(trained);
        if targets == 0 {
            return false;
        }
        self.ids.extend_from_slice(ids);
        self.trained.extend_from_slice(trained);
        self.offsets.push(self.ids.len() as u64);
        self.sources.push(source);
        self.report.documents += 1;
        self.report.tokens += ids.len() as u64;
        self.report.trained += targets;
        true
    }

    /// Number of documents.
    pub fn documents(&self) -> usize {
        self.sources.len()
    }

    /// Number of tokens.
    pub fn tokens(&self) -> u64 {
        self.ids.len() as u64
    }

    /// The document `index`, below [`documents`](Self::documents).
    pub fn document(&self, index: usize) -> Document<'_> {
        let range = self.offsets[index] as usize..self.offsets[index + 1] as usize;
        Document { ids: &self.ids[range.clone()], trained: &self.trained[range], source: self.sources[index] }
    }

    /// Tokens of document `index`.
    pub fn document_tokens(&self, index: usize) -> usize {
        (self.offsets[index + 1] - self.offsets[index]) as usize
    }

    /// Trained targets of document `index`: trained tokens but for the first, which nothing predicts.
    pub fn document_targets(&self, index: usize) -> u64 {
        count_targets(self.document(index).trained)
    }

    /// The longest document, in tokens.
    pub fn longest_tokens(&self) -> usize {
        (0..self.documents()).map(|d| self.document_tokens(d)).max().unwrap_or(0)
    }

    /// The largest token id, to be compared with the vocabulary of the model.
    pub fn max_id(&self) -> u32 {
        self.ids.iter().copied().max().unwrap_or(0)
    }

    /// The data files, in the order of the configuration.
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// `file:line` of a source.
    pub fn name(&self, source: Source) -> String {
        let path = self.files.get(source.file as usize).map_or(Path::new("?"), |p| p.as_path());
        format!("{}:{}", path.display(), source.line)
    }

    /// Pads with 0 where the tokenizer's padding token is none of the model's `vocab` ids (one that was added to the tokenizer alone).
    /// Padding is never trained and no document sees it, so any id will do.
    pub fn pad_within(&mut self, vocab: usize) {
        if self.pad_id as usize >= vocab {
            self.pad_id = 0;
        }
    }

    /// Id that fills the unused tail of a row.
    pub fn pad_id(&self) -> u32 {
        self.pad_id
    }

    /// What happened on the way from rows to tokens.
    pub fn report(&self) -> &Report {
        &self.report
    }

    /// Hash of everything the tokens depend on: equal on all ranks, and on resume.
    pub fn fingerprint(&self) -> [u8; 32] {
        self.fingerprint
    }
}

fn count_targets(trained: &[u8]) -> u64 {
    trained.iter().skip(1).map(|&t| u64::from(t)).sum()
}
