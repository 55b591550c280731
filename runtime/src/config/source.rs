//! What was written, and where: the TOML file and the `--set` overrides as one plain tree, plus the place of every key.
//!
//! Places are kept beside the tree by dotted path (`dataset.0.path`), so that the tree stays a `toml::Table` that serde reads,
//! and checks made long after parsing still point at a line.

use super::problem::{ConfigErrors, Place, Problem};
use std::collections::BTreeMap;
use std::path::Path;
use toml::de::{DeTable, DeValue};
use toml::{Table, Value};

/// The written configuration.
#[derive(Default)]
pub(super) struct Source {
    /// Values.
    pub table: Table,
    /// Where each dotted path was written.
    places: BTreeMap<String, Place>,
}

impl Source {
    /// Parses the file's text. All syntax errors are returned.
    pub fn parse(text: &str) -> Result<Source, ConfigErrors> {
        let (root, errors) = DeTable::parse_recoverable(text);
        let problems = errors.iter().map(|e| Problem {
            place: e.span().map_or(Place::Nowhere, |s| file_place(text, s.start)),
            what: format!("not TOML: {}", e.message()),
        });
        if let Some(errors) = ConfigErrors::of(Path::new(""), problems.collect()) {
            return Err(errors);
        }
        let mut places = BTreeMap::new();
        let table = plain_table(root.get_ref(), text, "", &mut places).map_err(|(offset, what)| ConfigErrors {
            file: Default::default(),
            problems: vec![Problem { place: file_place(text, offset), what }],
        })?;
        Ok(Source { table, places })
    }

    /// Where `path` was written, or the nearest table above it.
    pub fn place(&self, path: &str) -> Place {
        let mut path = path;
        loop {
            if let Some(place) = self.places.get(path) {
                return place.clone();
            }
            match path.rfind('.') {
                Some(dot) => path = &path[..dot],
                None => return Place::Nowhere,
            }
        }
    }

    /// True when `path` itself was written.
    pub fn has(&self, path: &str) -> bool {
        self.places.contains_key(path)
    }

    /// True when `path` itself was written by a `--set` argument.
    pub fn is_typed(&self, path: &str) -> bool {
        matches!(self.places.get(path), Some(Place::Set(_)))
    }

    /// Applies one `key.path=value`. The value is TOML, or a bare string; an empty value removes the key.
    pub fn set(&mut self, argument: &str) -> Result<(), Problem> {
        let problem = |what: String| Problem { place: Place::Set(argument.into()), what };
        let (path, text) =
            argument.split_once('=').ok_or_else(|| problem("no '=': write section.key=value, such as training.steps=20".into()))?;
        let segments = key_segments(path.trim()).map_err(problem)?;
        let value = written_value(text.trim()).map_err(problem)?;
        put(&mut self.table, &segments, value).map_err(problem)?;
        let full = segments.join(".");
        let below = format!("{full}.");
        self.places.retain(|p, _| !p.starts_with(&below));
        self.places.insert(full, Place::Set(argument.into()));
        Ok(())
    }
}

/// Line and column, from 1, of a byte offset.
fn file_place(text: &str, offset: usize) -> Place {
    let before = text.get(..offset.min(text.len())).unwrap_or(text);
    let line_start = before.rfind('\n').map_or(0, |n| n + 1);
    Place::File { line: before.matches('\n').count() + 1, column: before[line_start..].chars().count() + 1 }
}

type Misread = (usize, String);

fn plain_table(t: &DeTable<'_>, text: &str, path: &str, places: &mut BTreeMap<String, Place>) -> Result<Table, Misread> {
    let mut out = Table::new();
    for (key, value) in t.iter() {
        let name = key.get_ref().to_string();
        let full = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        places.insert(full.clone(), file_place(text, key.span().start));
        out.insert(name, plain_value(value, text, &full, places)?);
    }
    Ok(out)
}

fn plain_value(value: &toml::Spanned<DeValue<'_>>, text: &str, path: &str, places: &mut BTreeMap<String, Place>) -> Result<Value, Misread> {
    let start = value.span().start;
    Ok(match value.get_ref() {
        DeValue::String(s) => Value::String(s.to_string()),
        DeValue::Integer(i) => Value::Integer(
            i64::from_str_radix(i.as_str(), i.radix()).map_err(|_| (start, format!("the integer {i} is outside the 64-bit range")))?,
        ),
        DeValue::Float(x) => Value::Float(x.as_str().parse().map_err(|_| (start, format!("the number {} cannot be read", x.as_str())))?),
        DeValue::Boolean(b) => Value::Boolean(*b),
        DeValue::Datetime(d) => Value::Datetime(*d),
        DeValue::Array(items) => {
            let mut out = Vec::new();
            for (i, item) in items.iter().enumerate() {
                let full = format!("{path}.{i}");
                places.insert(full.clone(), file_place(text, item.span().start));
                out.push(plain_value(item, text, &full, places)?);
            }
            Value::Array(out)
        }
        DeValue::Table(t) => Value::Table(plain_table(t, text, path, places)?),
    })
}

/// Splits `lora.rank_pattern."layers.0.q_proj"` as TOML splits a dotted key.
fn key_segments(path: &str) -> Result<Vec<String>, String> {
    let wrong = || format!("'{path}' is not a dotted key such as training.steps or dataset.0.path");
    let mut table: Table = toml::from_str(&format!("{path} = 0")).map_err(|_| wrong())?;
    let mut out = Vec::new();
    loop {
        let (key, value) = std::mem::take(&mut table).into_iter().next().ok_or_else(wrong)?;
        out.push(key);
        match value {
            Value::Table(below) => table = below,
            _ => return Ok(out),
        }
    }
}

/// A TOML value, else a bare string; `None` for nothing.
fn written_value(text: &str) -> Result<Option<Value>, String> {
    if text.is_empty() {
        return Ok(None);
    }
    match toml::from_str::<Table>(&format!("v = {text}")) {
        Ok(mut t) if t.len() == 1 => Ok(t.remove("v")),
        Ok(_) => Err("one value only".into()),
        Err(e) if text.starts_with(['[', '{', '"', '\'']) => Err(format!("the value is not TOML: {}", e.message())),
        Err(_) => Ok(Some(Value::String(text.into()))),
    }
}

fn kind(value: &Value) -> &'static str {
    value.type_str()
}

/// Walks to the last segment, making tables (or a list, where the next segment is a number) on the way.
fn put(table: &mut Table, segments: &[String], value: Option<Value>) -> Result<(), String> {
    let (first, rest) = segments.split_first().ok_or("empty key")?;
    if rest.is_empty() {
        match value {
            Some(value) => table.insert(first.clone(), value),
            None => table.remove(first),
        };
        return Ok(());
    }
    let empty = if rest[0].parse::<usize>().is_ok() { Value::Array(Vec::new()) } else { Value::Table(Table::new()) };
    put_below(table.entry(first.clone()).or_insert(empty), first, rest, value)
}

fn put_below(node: &mut Value, name: &str, rest: &[String], value: Option<Value>) -> Result<(), String> {
    match node {
        Value::Table(t) => put(t, rest, value),
        Value::Array(items) => {
            let count = items.len();
            let index: usize = rest[0].parse().map_err(|_| format!("{name} is a list: write {name}.0, not {name}.{}", rest[0]))?;
            if index > count {
                return Err(format!("{name} has {count} entries; {name}.{index} would leave a gap, the next free one is {name}.{count}"));
            }
            if index == count {
                items.push(Value::Table(Table::new()));
            }
            match (&rest[1..], value) {
                ([], Some(value)) => items[index] = value,
                ([], None) => drop(items.remove(index)),
                (below, value) => put_below(&mut items[index], &format!("{name}.{index}"), below, value)?,
            }
            Ok(())
        }
        other => Err(format!("{name} is of type {}, it has no key '{}'", kind(other), rest[0])),
    }
}
