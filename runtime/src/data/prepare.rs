//! All rows of all files to tokens, once, before ranks start: in parallel, in the order of the files, cached on disk by a hash of
//! everything the result depends on. Ranks call the same function and find the cache.

use super::rows::{RowReader, RowTokens};
use super::set::{Source, TokenSet};
use super::tokenizer::TokenizerFiles;
use super::{DataError, cache};
use crate::config::{Config, DatasetConfig, DatasetKind};
use indicatif::{ProgressBar, ProgressStyle};
use rayon::prelude::*;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{BufRead, BufReader, IsTerminal, Read};
use std::path::{Path, PathBuf};

/// Part of the cache key: raise it when the same input gives other tokens.
const FORMAT_VERSION: u32 = 1;
const LINE_LIMIT_BYTES: usize = 256 << 20;
/// Rows are read, encoded in parallel and appended in blocks of about this size.
const BLOCK_BYTES: usize = 8 << 20;
/// Rows of a kind (dropped, truncated) that are named in the report.
const NAMED_EXAMPLES: usize = 5;

/// What to tokenize, and how.
#[derive(Clone, Debug, PartialEq)]
pub struct PrepareSpec {
    /// Files, concatenated.
    pub datasets: Vec<DatasetConfig>,
    /// Model folder with the tokenizer. Not needed when all data is tokenized already.
    pub tokenizer_folder: PathBuf,
    /// Replaces the model's chat template.
    pub chat_template: Option<PathBuf>,
    /// Train on prompts and user turns too.
    pub train_on_inputs: bool,
    /// Longer documents are cut (text: split).
    pub seq_len: usize,
    /// Folder of the cache; `None`: the default one, see [`default_cache_folder`].
    pub cache_folder: Option<PathBuf>,
    /// Seconds since 1970 for templates that print the date (`strftime_now`); `None`: now. Only the day matters.
    pub now_secs: Option<i64>,
}

impl PrepareSpec {
    /// The request for `datasets` (`config.dataset` or `config.eval_dataset`) under the rest of `config`.
    pub fn new(config: &Config, datasets: &[DatasetConfig], model_folder: &Path) -> PrepareSpec {
        PrepareSpec {
            datasets: datasets.to_vec(),
            tokenizer_folder: model_folder.to_path_buf(),
            chat_template: config.data.chat_template.clone(),
            train_on_inputs: config.data.train_on_inputs,
            seq_len: config.training.seq_len,
            cache_folder: config.data.cache_folder.clone(),
            now_secs: config.data.now_secs,
        }
    }

    fn needs_tokenizer(&self) -> bool {
        self.datasets.iter().any(|d| d.kind != DatasetKind::Tokenized)
    }
}

/// `$XDG_CACHE_HOME/zlaunch/tokens`, else `~/.cache/zlaunch/tokens`; `None` without a home.
pub fn default_cache_folder() -> Option<PathBuf> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let base = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))?;
    Some(base.join("zlaunch").join("tokens"))
}

/// Tokenizes the data of `spec`, or loads it from the cache. With `progress`, a bar is shown if standard error is a terminal.
/// A cache that cannot be written is a warning; the result is the same.
pub fn prepare(spec: &PrepareSpec, progress: bool) -> Result<TokenSet, DataError> {
    if spec.datasets.is_empty() {
        return Err(DataError::Empty("no [[dataset]] is given: add one with a path".into()));
    }
    if spec.seq_len < 2 {
        return Err(DataError::Invalid(format!("training.seq_len is {}: a target needs at least 2 tokens", spec.seq_len)));
    }
    let tokenizer = match TokenizerFiles::read(&spec.tokenizer_folder, spec.chat_template.as_deref()) {
        Ok(tokenizer) => Some(tokenizer),
        Err(e) if spec.needs_tokenizer() => return Err(e),
        Err(_) => None,
    };
    let now_secs = spec.now_secs.unwrap_or_else(|| {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        since.map_or(0, |d| d.as_secs() as i64)
    });
    let bytes: u64 = spec.datasets.iter().map(|d| std::fs::metadata(&d.path).map_or(0, |m| m.len())).sum();
    let bar = bar(progress, bytes);
    let digests = spec.datasets.par_iter().map(|d| digest(&d.path)).collect::<Result<Vec<_>, _>>()?;
    let key = key(spec, tokenizer.as_ref(), now_secs, &digests);
    let files: Vec<PathBuf> = spec.datasets.iter().map(|d| d.path.clone()).collect();
    let cached = spec.cache_folder.clone().or_else(default_cache_folder).map(|folder| cache::path_of(&folder, &key));
    if let Some(set) = cached.as_ref().and_then(|path| cache::load(path, &key, files.clone())) {
        bar.finish_and_clear();
        return Ok(set);
    }
    let tokenizer = match tokenizer.map(TokenizerFiles::parse) {
        Some(Err(e)) if spec.needs_tokenizer() => return Err(e),
        parsed => parsed.and_then(Result::ok),
    };
    let pad_id = tokenizer.as_ref().and_then(|t| t.special_id("pad_token").or_else(|| t.special_id("eos_token"))).unwrap_or(0);
    let mut set = TokenSet::empty(files, pad_id);
    set.fingerprint = key;
    let reader = RowReader {
        tokenizer: tokenizer.as_ref(),
        train_on_inputs: spec.train_on_inputs,
        seq_len: spec.seq_len,
        now_secs: now_secs.div_euclid(86_400) * 86_400,
    };
    for (file, (dataset, digest)) in spec.datasets.iter().zip(&digests).enumerate() {
        read_file(&mut set, &reader, dataset, file as u32, digest, &bar)?;
    }
    bar.finish_and_clear();
    check(&set, spec)?;
    if let Some(path) = cached
        && let Err(e) = cache::store(&path, &set)
    {
        tracing::warn!("the token cache {} cannot be written ({e}): every start will tokenize again", path.display());
    }
    Ok(set)
}

fn bar(progress: bool, bytes: u64) -> ProgressBar {
    if !progress || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("tokenizing {wide_bar} {bytes}/{total_bytes} {eta}");
    ProgressBar::new(bytes).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

fn digest(path: &Path) -> Result<[u8; 32], DataError> {
    let mut file = File::open(path).map_err(|e| DataError::io("read", path, e))?;
    let mut hash = Sha256::new();
    let mut block = vec![0; 1 << 20];
    loop {
        match file.read(&mut block).map_err(|e| DataError::io("read", path, e))? {
            0 => return Ok(hash.finalize().into()),
            n => hash.update(&block[..n]),
        }
    }
}

/// Hash of all that the tokens depend on, each part preceded by its length.
fn key(spec: &PrepareSpec, tokenizer: Option<&TokenizerFiles>, now_secs: i64, digests: &[[u8; 32]]) -> [u8; 32] {
    let mut hash = Sha256::new();
    let mut part = |bytes: &[u8]| {
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    part(&FORMAT_VERSION.to_le_bytes());
    part(&(spec.seq_len as u64).to_le_bytes());
    part(&[u8::from(spec.train_on_inputs)]);
    for (dataset, digest) in spec.datasets.iter().zip(digests) {
        part(format!("{:?}", dataset.kind).as_bytes());
        part(digest);
    }
    let chat = |d: &DatasetConfig| matches!(d.kind, DatasetKind::Messages | DatasetKind::PromptCompletion);
    if let Some(tokenizer) = tokenizer {
        tokenizer.material(&mut part);
        if tokenizer.dated() && spec.datasets.iter().any(chat) {
            part(&now_secs.div_euclid(86_400).to_le_bytes());
        }
    }
    hash.finalize().into()
}

/// Appends the rows of one file.
fn read_file(
    set: &mut TokenSet,
    reader: &RowReader<'_>,
    dataset: &DatasetConfig,
    file: u32,
    expected: &[u8; 32],
    bar: &ProgressBar,
) -> Result<(), DataError> {
    let path = &dataset.path;
    let io = |e| DataError::io("read", path, e);
    let row_error = |line: u32, message: String| DataError::Row { path: path.clone(), line: u64::from(line), message };
    let mut input = BufReader::with_capacity(1 << 20, File::open(path).map_err(io)?);
    if input.fill_buf().map_err(io)?.starts_with(b"PAR1") {
        return Err(row_error(1, "this is a Parquet file, expected JSONL: convert it, one JSON object per line".into()));
    }
    let mut hash = Sha256::new();
    let mut line_number = 0u32;
    let rows_before = set.report.rows;
    let mut end = false;
    while !end {
        let mut block: Vec<(u32, Vec<u8>)> = Vec::new();
        let mut bytes = 0;
        while bytes < BLOCK_BYTES && !end {
            let mut line = Vec::new();
            let n = input.by_ref().take(LINE_LIMIT_BYTES as u64 + 1).read_until(b'\n', &mut line).map_err(io)?;
            if n == 0 {
                end = true;
                break;
            }
            line_number = line_number
                .checked_add(1)
                .ok_or_else(|| DataError::Invalid(format!("{}: more than 2^32 lines: split the file", path.display())))?;
            if n > LINE_LIMIT_BYTES {
                return Err(row_error(line_number, format!("longer than {LINE_LIMIT_BYTES} bytes, expected one JSON object per line")));
            }
            hash.update(&line);
            bytes += n;
            let content = if line_number == 1 { line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&line) } else { &line };
            if !content.trim_ascii().is_empty() {
                block.push((line_number, content.to_vec()));
            }
        }
        let encoded: Vec<Result<RowTokens, String>> = block.par_iter().map(|(_, line)| reader.read(dataset.kind, line)).collect();
        for ((line, _), tokens) in block.iter().zip(encoded) {
            append(set, tokens.map_err(|message| row_error(*line, message))?, Source { file, line: *line });
        }
        bar.inc(bytes as u64);
    }
    if set.report.rows == rows_before {
        return Err(DataError::Empty(format!("{} has no rows, expected JSONL: one JSON object per line", path.display())));
    }
    if hash.finalize().as_slice() != expected {
        return Err(DataError::Invalid(format!("{} changed while it was read: start again when nothing writes to it", path.display())));
    }
    Ok(())
}

fn append(set: &mut TokenSet, row: RowTokens, source: Source) {
    set.report.rows += 1;
    let mut kept = 0u64;
    for (ids, trained) in &row.documents {
        kept += u64::from(set.push(ids, trained, source));
    }
    let name = set.name(source);
    let report = &mut set.report;
    if row.cut_tokens > 0 {
        report.truncated += 1;
        report.truncated_tokens += row.cut_tokens as u64;
        if report.truncated_examples.len() < NAMED_EXAMPLES {
            report.truncated_examples.push(name.clone());
        }
    }
    report.split += kept.saturating_sub(1);
    if kept == 0 {
        report.dropped += 1;
        if report.dropped_examples.len() < NAMED_EXAMPLES {
            report.dropped_examples.push(name);
        }
    }
}

/// What no run should start with: nothing trained, or conversations in which everything is.
fn check(set: &TokenSet, spec: &PrepareSpec) -> Result<(), DataError> {
    let report = set.report();
    if report.trained == 0 {
        let cut = if report.truncated > 0 { "; many rows were cut: raise training.seq_len" } else { "" };
        return Err(DataError::Empty(format!(
            "none of the {} rows has a trained token (first: {}){cut}; rows need assistant turns, completions or labels other than -100",
            report.rows,
            report.dropped_examples.join(", ")
        )));
    }
    let chat_only = spec.datasets.iter().all(|d| d.kind == DatasetKind::Messages);
    if chat_only && !spec.train_on_inputs && report.trained + report.documents == report.tokens {
        return Err(DataError::Invalid(
            "every token of these conversations is trained, so the chat template's {% generation %} blocks cover prompts too: fix the \
             template, or set data.train_on_inputs = true if it is meant"
                .into(),
        ));
    }
    Ok(())
}
