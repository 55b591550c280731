//! From a TOML file and `--set` overrides to a [`Config`] that holds together, or to all that is wrong with it.
//!
//! Each key is tried alone against its section's struct, so that one bad value hides no other; bad ones are taken out and the
//! rest is read and checked for contradictions. A contradiction that only follows from a key already named is not told again.

use super::problem::{ConfigErrors, Place, Problem};
use super::schema::{self, SECTIONS, Section};
use super::source::Source;
use super::{Config, paths, validate};
use std::collections::BTreeSet;
use std::path::Path;
use toml::{Table, Value};

impl Config {
    /// Reads `path`, applies `sets` (`section.key=value`, TOML values or bare strings, `dataset.0.path=...`; an empty value
    /// removes the key), checks everything, and makes paths absolute: those in the file (and defaults) count from the file's
    /// folder, those in `sets` from the working directory; an input that is not there is looked for at the other of the two.
    /// Errors list all problems, each with its file:line:column.
    pub fn load(path: &Path, sets: &[String]) -> Result<Config, ConfigErrors> {
        let fail = |problems| ConfigErrors { file: path.to_path_buf(), problems };
        let text = std::fs::read_to_string(path)
            .map_err(|e| fail(vec![Problem { place: Place::Nowhere, what: format!("cannot be read: {e}") }]))?;
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        Config::parse(&text, path, folder, sets)
    }

    /// The same from text. `file` is the name in errors, `folder` what relative paths count from.
    pub fn parse(text: &str, file: &Path, folder: &Path, sets: &[String]) -> Result<Config, ConfigErrors> {
        let mut source = Source::parse(text).map_err(|mut errors| {
            errors.file = file.to_path_buf();
            errors
        })?;
        let mut problems: Vec<Problem> = sets.iter().filter_map(|argument| source.set(argument).err()).collect();
        let mut reader = Reader { source: &source, problems: Vec::new(), touched: BTreeSet::new() };
        let table = reader.accepted();
        let config = Config::deserialize_table(table);
        let touched = reader.touched;
        problems.append(&mut reader.problems);
        match config {
            Ok(mut config) => {
                for finding in validate::findings(&config) {
                    if !finding.keys.iter().any(|k| touched.contains(k.as_str())) {
                        problems.push(finding.problem(&source));
                    }
                }
                match ConfigErrors::of(file, problems) {
                    Some(errors) => Err(errors),
                    None => {
                        paths::resolve(&mut config, folder, |path| source.is_typed(path));
                        Ok(config)
                    }
                }
            }
            Err(what) => {
                problems.push(Problem { place: Place::Nowhere, what });
                Err(ConfigErrors { file: file.to_path_buf(), problems })
            }
        }
    }

    /// The whole configuration as TOML, defaults included: what is saved beside the run. Loading it gives `self` again.
    pub fn to_toml(&self) -> Result<String, ConfigErrors> {
        toml::to_string(self).map_err(|e| ConfigErrors {
            file: Default::default(),
            problems: vec![Problem { place: Place::Nowhere, what: format!("cannot be written as TOML: {e}") }],
        })
    }

    fn deserialize_table(table: Table) -> Result<Config, String> {
        serde::Deserialize::deserialize(Value::Table(table)).map_err(|e: toml::de::Error| e.message().to_owned())
    }
}

/// Takes what is good out of what was written, and notes the rest.
struct Reader<'a> {
    source: &'a Source,
    problems: Vec<Problem>,
    /// Keys named in a problem, and keys that were meant by one.
    touched: BTreeSet<String>,
}

impl Reader<'_> {
    fn problem(&mut self, path: &str, what: String) {
        self.problems.push(Problem { place: self.source.place(path), what });
        self.touched.insert(path.to_owned());
    }

    /// What an unknown key stood for counts as told about, unless it is there as well.
    fn meant(&mut self, key: Option<String>) {
        self.touched.extend(key.filter(|k| !self.source.has(k)));
    }

    /// The table that serde will take.
    fn accepted(&mut self) -> Table {
        let mut out = Table::new();
        let names: Vec<&'static str> = SECTIONS.iter().map(|s| s.name).collect();
        for (name, value) in &self.source.table {
            match SECTIONS.iter().find(|s| s.name == name) {
                Some(section) => {
                    if let Some(value) = self.section(section, value) {
                        out.insert(name.clone(), value);
                    }
                }
                None => {
                    let (what, meant) = schema::unknown("", name, &names);
                    self.problem(name, what);
                    self.meant(meant);
                }
            }
        }
        for section in SECTIONS.iter().filter(|s| !s.required.is_empty() && !s.list) {
            if out.contains_key(section.name) {
                continue;
            }
            let reported = self.touched.contains(section.name);
            let filled = self.keys(section, &Table::new(), section.name, reported);
            out.insert(section.name.into(), Value::Table(filled));
        }
        out
    }

    fn section(&mut self, section: &Section, value: &Value) -> Option<Value> {
        let name = section.name;
        match (section.list, value) {
            (false, Value::Table(t)) => Some(Value::Table(self.keys(section, t, name, false))),
            (true, Value::Array(items)) => {
                let mut out = Vec::new();
                for (i, item) in items.iter().enumerate() {
                    let path = format!("{name}.{i}");
                    match item {
                        Value::Table(t) => out.push(Value::Table(self.keys(section, t, &path, false))),
                        other => self.problem(&path, format!("{path} is of type {}, expected a [[{name}]] table", other.type_str())),
                    }
                }
                Some(Value::Array(out))
            }
            (true, other) => {
                self.problem(name, format!("{name} is of type {}: write [[{name}]], a list of tables", other.type_str()));
                None
            }
            (false, other) => {
                self.problem(name, format!("{name} is of type {}: write [{name}], a section", other.type_str()));
                None
            }
        }
    }

    /// The keys of one table that are good; those that must be there and are not get a stand-in.
    /// `silent`: the whole table is already named in a problem.
    fn keys(&mut self, section: &Section, table: &Table, path: &str, silent: bool) -> Table {
        let stand_ins = || section.required.iter().map(|(k, v)| (k.to_string(), v.value()));
        let known = (section.keys)();
        let mut out = Table::new();
        for (key, value) in table {
            let full = format!("{path}.{key}");
            if !known.contains(&key.as_str()) {
                let (what, meant) = schema::unknown(path, key, known);
                self.problem(&full, what);
                self.meant(meant);
                continue;
            }
            if key.starts_with("offload_") && self.offload(&full, value) {
                continue;
            }
            let mut alone: Table = stand_ins().collect();
            alone.insert(key.clone(), value.clone());
            let mut together = out.clone();
            together.extend(stand_ins().filter(|(k, _)| !out.contains_key(k)));
            together.insert(key.clone(), value.clone());
            match (section.check)(alone).and_then(|()| (section.check)(together)) {
                Ok(()) => drop(out.insert(key.clone(), value.clone())),
                Err(why) => {
                    let what = match schema::takes(&full) {
                        Some(takes) => format!("{full} = {value}: expected {takes}"),
                        None => format!("{full} = {value}: {why}"),
                    };
                    self.problem(&full, what);
                }
            }
        }
        for (key, stand_in) in section.required {
            let full = format!("{path}.{key}");
            if !out.contains_key(*key) {
                if !silent && !self.touched.contains(&full) {
                    self.problem(&full, format!("{full} is missing"));
                }
                out.insert((*key).into(), stand_in.value());
            }
        }
        out
    }

    /// Unknown keys of a DeepSpeed offload table; true when there was one.
    fn offload(&mut self, path: &str, value: &Value) -> bool {
        let Value::Table(table) = value else { return false };
        let known = ["device", "pin_memory"];
        let mut any = false;
        for key in table.keys().filter(|k| !known.contains(&k.as_str())) {
            let (what, _) = schema::unknown(path, key, &known);
            self.problem(&format!("{path}.{key}"), what);
            any = true;
        }
        if any {
            self.touched.insert(path.to_owned());
        }
        any
    }
}
