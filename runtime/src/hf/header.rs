//! What does a safetensors file hold? Its header, read by one range read and checked once, then trusted.
//!
//! Format: 8 bytes little-endian header length, JSON `{name: {dtype, shape, data_offsets}}`, then the data. Offsets are
//! relative to the data. Checked: the length fits file and limit, shape x dtype = bytes without overflow, ranges inside the
//! file, pairwise disjoint, no name twice.

use super::{Error, Result};
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Longest header that is accepted, as in the reference implementation.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Element type in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stored {
    /// IEEE binary32.
    F32,
    /// bfloat16.
    BF16,
    /// IEEE binary16; converted on reading.
    F16,
    /// Anything else, with its name and bits per element; listed, never read.
    Other(&'static str, u32),
}

impl Stored {
    /// Bytes of one element; 0 for types of less than a byte.
    pub const fn bytes(self) -> usize {
        match self {
            Stored::F32 => 4,
            Stored::BF16 | Stored::F16 => 2,
            Stored::Other(_, bits) => bits as usize / 8,
        }
    }

    /// Name in the header.
    pub const fn name(self) -> &'static str {
        match self {
            Stored::F32 => "F32",
            Stored::BF16 => "BF16",
            Stored::F16 => "F16",
            Stored::Other(name, _) => name,
        }
    }

    fn parse(name: &str) -> Option<Stored> {
        const OTHERS: [(&str, u32); 15] = [
            ("F64", 64),
            ("I64", 64),
            ("U64", 64),
            ("I32", 32),
            ("U32", 32),
            ("I16", 16),
            ("U16", 16),
            ("I8", 8),
            ("U8", 8),
            ("BOOL", 8),
            ("F8_E4M3", 8),
            ("F8_E5M2", 8),
            ("F8_E8M0", 8),
            ("C64", 64),
            ("F4", 4),
        ];
        match name {
            "F32" => Some(Stored::F32),
            "BF16" => Some(Stored::BF16),
            "F16" => Some(Stored::F16),
            _ => OTHERS.iter().find(|(n, _)| *n == name).map(|(n, bits)| Stored::Other(n, *bits)),
        }
    }

    /// The kernel's storage type with the same bits, if there is one.
    pub const fn dtype(self) -> Option<zrt_kernels::DType> {
        match self {
            Stored::F32 => Some(zrt_kernels::DType::F32),
            Stored::BF16 => Some(zrt_kernels::DType::BF16),
            _ => None,
        }
    }
}

impl std::fmt::Display for Stored {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Where one tensor lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Element type in the file.
    pub dtype: Stored,
    /// Shape.
    pub shape: Vec<usize>,
    /// Index of the file in [`super::Weights::files`].
    pub file: usize,
    /// Byte offset of the first element in that file.
    pub offset: u64,
}

impl TensorInfo {
    /// Number of elements.
    pub fn elems(&self) -> usize {
        self.shape.iter().product()
    }
}

/// Header of one file: its tensors in name order, and `__metadata__`.
#[derive(Debug, Default)]
pub struct Header {
    /// Name and place of each tensor, sorted by name; `file` is 0.
    pub tensors: Vec<(String, TensorInfo)>,
    /// `__metadata__`.
    pub metadata: Vec<(String, String)>,
    /// Bytes read to get it.
    pub bytes: u64,
}

#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

enum Item {
    Tensor(String, Entry),
    Metadata(Vec<(String, String)>),
}

/// The header's JSON as a list, so that a name that comes twice is seen.
struct Items(Vec<Item>);

impl<'de> Deserialize<'de> for Items {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<Self, D::Error> {
        struct List;
        impl<'de> Visitor<'de> for List {
            type Value = Items;
            fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
                f.write_str("an object of tensors")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Items, A::Error> {
                let mut all = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    all.push(if name == "__metadata__" {
                        let pairs: std::collections::BTreeMap<String, String> = map.next_value()?;
                        Item::Metadata(pairs.into_iter().collect())
                    } else {
                        Item::Tensor(name, map.next_value()?)
                    });
                }
                Ok(Items(all))
            }
        }
        d.deserialize_map(List)
    }
}

/// Reads and checks the header of an open file.
///
/// # Errors
/// The file is truncated or breaks the format, with what was expected and found.
pub fn read(file: &File, path: &Path) -> Result<Header> {
    let total = file.metadata().map_err(Error::io("read", path))?.len();
    let bad = |what: String| Error::Header { path: path.into(), what };
    if total < 8 {
        return Err(bad(format!("{total} bytes, expected at least 8: the file is truncated (an interrupted download?)")));
    }
    let mut length = [0u8; 8];
    file.read_exact_at(&mut length, 0).map_err(Error::io("read", path))?;
    let length = u64::from_le_bytes(length);
    if length > MAX_HEADER_BYTES {
        return Err(bad(format!(
            "the header says it has {length} bytes, at most {MAX_HEADER_BYTES} are accepted; is this really safetensors?"
        )));
    }
    if length + 8 > total {
        return Err(bad(format!(
            "the header says it has {length} bytes, the file has {total}: the file is truncated (an interrupted download?)"
        )));
    }
    let mut text = vec![0u8; length as usize];
    file.read_exact_at(&mut text, 8).map_err(Error::io("read", path))?;
    let mut header = parse(&text, total - 8 - length).map_err(bad)?;
    for (_, t) in &mut header.tensors {
        t.offset += 8 + length;
    }
    header.bytes = 8 + length;
    Ok(header)
}

/// Checks a header's text against `data` bytes of data; offsets stay relative to the data.
fn parse(text: &[u8], data: u64) -> std::result::Result<Header, String> {
    let items: Items = serde_json::from_slice(text).map_err(|e| format!("the header is not the expected JSON: {e}"))?;
    let mut header = Header::default();
    let mut ranges = Vec::new();
    for item in items.0 {
        let (name, entry) = match item {
            Item::Metadata(pairs) => {
                header.metadata = pairs;
                continue;
            }
            Item::Tensor(name, entry) => (name, entry),
        };
        let dtype = Stored::parse(&entry.dtype).ok_or_else(|| format!("tensor '{name}' has unknown dtype {:?}", entry.dtype))?;
        let bits = match dtype {
            Stored::Other(_, bits) => u64::from(bits),
            _ => dtype.bytes() as u64 * 8,
        };
        let elems = entry.shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d));
        let wanted = elems
            .and_then(|n| n.checked_mul(bits))
            .map(|b| b / 8)
            .ok_or_else(|| format!("tensor '{name}': shape {:?} overflows", entry.shape))?;
        let (begin, end) = entry.data_offsets;
        if begin > end || end > data {
            return Err(format!("tensor '{name}' lies at bytes {begin}..{end} of {data} bytes of data: the file is truncated or damaged"));
        }
        if end - begin != wanted {
            return Err(format!(
                "tensor '{name}': shape {:?} of {dtype} needs {wanted} bytes, the offsets give {}",
                entry.shape,
                end - begin
            ));
        }
        if begin < end {
            ranges.push((begin, end, header.tensors.len()));
        }
        let shape = entry.shape.iter().map(|d| *d as usize).collect();
        header.tensors.push((name, TensorInfo { dtype, shape, file: 0, offset: begin }));
    }
    ranges.sort_unstable();
    for pair in ranges.windows(2) {
        if pair[1].0 < pair[0].1 {
            let (a, b) = (&header.tensors[pair[0].2].0, &header.tensors[pair[1].2].0);
            return Err(format!("tensors '{a}' and '{b}' overlap"));
        }
    }
    header.tensors.sort_by(|a, b| a.0.cmp(&b.0));
    if let Some(pair) = header.tensors.windows(2).find(|p| p[0].0 == p[1].0) {
        return Err(format!("tensor '{}' comes twice", pair[0].0));
    }
    Ok(header)
}

#[cfg(test)]
mod tests {
    use super::parse;

    fn err(text: &str, data: u64) -> String {
        parse(text.as_bytes(), data).err().unwrap_or_default()
    }

    #[test]
    fn accepts_and_sorts() {
        let h = parse(br#"{"__metadata__":{"format":"pt"},"b":{"dtype":"BF16","shape":[2,2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[],"data_offsets":[8,12]}}"#, 12).unwrap();
        assert_eq!(h.tensors.iter().map(|t| t.0.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(h.metadata, [("format".to_owned(), "pt".to_owned())]);
    }

    #[test]
    fn refuses_hostile_headers() {
        let one = |dtype: &str, shape: &str, at: &str| format!(r#"{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{at}}}}}"#);
        assert!(err(&one("F32", "[2]", "[0,9]"), 100).contains("needs 8 bytes"));
        assert!(err(&one("F32", "[2]", "[96,104]"), 100).contains("truncated"));
        assert!(err(&one("F32", "[2]", "[8,0]"), 100).contains("8..0"));
        assert!(err(&one("F32", "[4294967296,4294967296]", "[0,0]"), 100).contains("overflows"));
        assert!(err(&one("F32", "[4611686018427387904]", "[0,0]"), 100).contains("overflows"));
        assert!(err(&one("X", "[2]", "[0,8]"), 100).contains("unknown dtype"));
        assert!(err(&one("F32", "[-1]", "[0,8]"), 100).contains("not the expected JSON"));
        assert!(err("[]", 0).contains("object of tensors"));
        let twice = r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}"#;
        assert!(err(twice, 2).contains("twice"));
        let over = r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}"#;
        assert!(err(over, 3).contains("overlap"));
    }
}
