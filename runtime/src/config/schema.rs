//! Which keys exist: asked of serde itself, so that the list in an error is the list that is accepted.
//!
//! A probe deserializer asks each section's struct for its fields (aliases included) and gives up; nothing is written twice.
//! Around it: where a value is tried alone against its section, the nearest name, and names that people bring from elsewhere.

use super::*;
use serde::de::value::Error as Refusal;
use serde::de::{Deserializer, Error as _, Visitor};
use toml::{Table, Value};

/// One `[section]` or `[[section]]`.
pub(super) struct Section {
    /// Name in the file.
    pub name: &'static str,
    /// `[[name]]`.
    pub list: bool,
    /// Keys that must be there, each with a stand-in that lets the others be checked without it.
    pub required: &'static [(&'static str, StandIn)],
    /// Keys that serde takes.
    pub keys: fn() -> &'static [&'static str],
    /// Reads a table as the section's struct.
    pub check: fn(Table) -> Result<(), String>,
}

/// A value for a missing key.
#[derive(Clone, Copy)]
pub(super) enum StandIn {
    /// Any text.
    Text,
    /// Any count.
    One,
}

impl StandIn {
    pub fn value(self) -> Value {
        match self {
            StandIn::Text => Value::String("missing".into()),
            StandIn::One => Value::Integer(1),
        }
    }
}

const fn section<T: for<'de> Deserialize<'de>>(name: &'static str) -> Section {
    Section { name, list: false, required: &[], keys: keys_of::<T>, check: check::<T> }
}

/// All sections, in the order of [`Config`].
pub(super) static SECTIONS: &[Section] = &[
    Section { required: &[("path", StandIn::Text)], ..section::<ModelConfig>("model") },
    section::<LoraConfig>("lora"),
    Section { list: true, required: &[("path", StandIn::Text)], ..section::<DatasetConfig>("dataset") },
    Section { list: true, required: &[("path", StandIn::Text)], ..section::<DatasetConfig>("eval_dataset") },
    section::<DataConfig>("data"),
    Section { required: &[("seq_len", StandIn::One)], ..section::<TrainingConfig>("training") },
    section::<OptimizerConfig>("optimizer"),
    section::<LrSchedulerConfig>("lr_scheduler"),
    section::<PrecisionConfig>("precision"),
    section::<ZeroConfig>("zero"),
    section::<ActivationCheckpointConfig>("activation_checkpoint"),
    section::<CheckpointConfig>("checkpoint"),
    section::<EvalConfig>("eval"),
    section::<MetricsConfig>("metrics"),
    section::<CommConfig>("comm"),
    section::<DeviceConfig>("device"),
];

/// Fields and aliases that serde takes for `T`.
pub(super) fn keys_of<T: for<'de> Deserialize<'de>>() -> &'static [&'static str] {
    let mut fields: &'static [&'static str] = &[];
    // The probe always refuses; what it was asked for is the answer.
    let _ = T::deserialize(Probe(&mut fields));
    fields
}

struct Probe<'a>(&'a mut &'static [&'static str]);

impl<'de> Deserializer<'de> for Probe<'_> {
    type Error = Refusal;

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        _visitor: V,
    ) -> Result<V::Value, Refusal> {
        *self.0 = fields;
        Err(Refusal::custom("probe"))
    }

    fn deserialize_any<V: Visitor<'de>>(self, _visitor: V) -> Result<V::Value, Refusal> {
        Err(Refusal::custom("not a struct"))
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

fn check<T: for<'de> Deserialize<'de>>(table: Table) -> Result<(), String> {
    T::deserialize(Value::Table(table)).map(drop).map_err(|e| e.message().to_owned())
}

/// What a key takes, where serde's own message does not say it.
pub(super) fn takes(path: &str) -> Option<&'static str> {
    Some(match path {
        "zero.stage" => "0, 1, 2, 3 or \"auto\"",
        "training.micro_batch_size" => "a number of sequences or \"auto\"",
        "zero.offload_param" | "zero.offload_optimizer" => "\"none\", \"cpu\", \"auto\", or a table with device and pin_memory",
        "zero.resident_bytes" => "a number of bytes, \"all\" or \"auto\"",
        "training.micro_batch_group" => "a power of two, \"all\" or \"auto\"",
        "lora.target_modules" => "\"all-linear\" or a list such as [\"q_proj\", \"v_proj\"]",
        "optimizer.betas" => "two numbers such as [0.9, 0.999]",
        _ => return None,
    })
}

/// The candidate that `name` most likely meant.
pub(super) fn nearest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let plain = |s: &str| s.to_lowercase().replace('-', "_");
    let name = plain(name);
    let scored = candidates.into_iter().map(|c| {
        let distance = strsim::damerau_levenshtein(&name, &plain(c));
        // A word left out (`min_ratio` for `min_lr_ratio`) is many letters but an obvious slip.
        let part = name.len() >= 4 && (c.contains(name.as_str()) || name.contains(c) && c.len() >= 4);
        (if part { distance.min(2) } else { distance }, c)
    });
    let (distance, best) = scored.min_by_key(|(d, _)| *d)?;
    (distance <= (name.chars().count() / 3).max(1)).then_some(best)
}

/// `[training]`, `[[dataset]]` for `dataset.0`.
fn heading(section: &str) -> String {
    match section.split_once('.') {
        Some((name, index)) if index.parse::<usize>().is_ok() => format!("[[{name}]]"),
        _ => format!("[{section}]"),
    }
}

/// What to say of an unknown key in `section` (`""`: top level), and our key that was probably meant.
pub(super) fn unknown(section: &str, key: &str, keys: &[&'static str]) -> (String, Option<String>) {
    let join = |s: &str, k: &str| if s.is_empty() { k.to_owned() } else { format!("{s}.{k}") };
    let path = join(section, key);
    let known = |what: &str| format!("{what}: {}", keys.join(", "));
    let list = if section.is_empty() { known("sections") } else { known(&format!("keys of {}", heading(section))) };
    if section == "lora" && foreign::PEFT_UNSUPPORTED.contains(&key) {
        return (format!("{path} is known to PEFT, not supported here: remove it; {list}"), None);
    }
    if section.starts_with("zero") && foreign::DEEPSPEED_UNSUPPORTED.contains(&key) {
        return (format!("{path} is known to DeepSpeed, not needed or not supported here: remove it; {list}"), None);
    }
    let home = SECTIONS.iter().find(|s| s.name != section && !s.list && key != "path" && (s.keys)().contains(&key));
    if let Some(home) = home {
        let ours = join(home.name, key);
        return (format!("unknown key {path}: {key} belongs in [{}]", home.name), Some(ours));
    }
    if let Some((_, ours)) = foreign::NAMES.iter().find(|(theirs, _)| *theirs == key) {
        let written = ours.split([' ', '[']).next().unwrap_or(ours);
        return (format!("unknown key {path}: here it is {ours}"), Some(written.to_owned()));
    }
    match nearest(key, keys.iter().copied()) {
        Some(near) => (format!("unknown key {path}: did you mean {}? {list}", join(section, near)), Some(join(section, near))),
        None => (format!("unknown key {path}; {list}"), None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_are_the_fields_of_config() {
        let names: Vec<&str> = SECTIONS.iter().map(|s| s.name).collect();
        assert_eq!(names, keys_of::<Config>());
    }

    #[test]
    fn every_section_lists_keys_and_its_required_ones_are_enough() {
        for section in SECTIONS {
            let keys = (section.keys)();
            assert!(!keys.is_empty(), "{}: serde was not asked for a struct", section.name);
            let table: Table = section.required.iter().map(|(k, v)| (k.to_string(), v.value())).collect();
            (section.check)(table).unwrap_or_else(|e| panic!("{}: {e}", section.name));
        }
    }

    #[test]
    fn aliases_are_known_keys() {
        let keys = keys_of::<LoraConfig>();
        for key in ["r", "alpha", "lora_alpha", "dropout", "lora_dropout", "target_modules", "rank_pattern", "adapter_path"] {
            assert!(keys.contains(&key), "{key} in {keys:?}");
        }
        assert!(keys_of::<DatasetConfig>().contains(&"type"));
    }

    #[test]
    fn foreign_names_point_at_keys_that_exist() {
        for (theirs, ours) in foreign::NAMES {
            let written = ours.split([' ', '[', ',']).next().unwrap_or(ours);
            let Some((section, key)) = written.split_once('.') else { continue };
            let section = SECTIONS.iter().find(|s| s.name == section).unwrap_or_else(|| panic!("{theirs}: {ours}"));
            assert!((section.keys)().contains(&key), "{theirs}: {ours}");
        }
    }

    #[test]
    fn nearest_finds_slips_and_nothing_far() {
        let keys = ["steps", "seq_len", "micro_batch_size", "min_lr_ratio"];
        assert_eq!(nearest("stpes", keys), Some("steps"));
        assert_eq!(nearest("seqlen", keys), Some("seq_len"));
        assert_eq!(nearest("micro-batch-size", keys), Some("micro_batch_size"));
        assert_eq!(nearest("banana", keys), None);
    }
}
