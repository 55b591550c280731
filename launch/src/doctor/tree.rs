//! Where do facts about the host come from? From files below a root: `/` on a real host, a made-up tree in tests. What cannot be read
//! is a value that says why: containers and rented machines hide much.

use std::fmt;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The files of a host.
pub struct Tree {
    root: PathBuf,
}

/// Why nothing was read.
#[derive(Clone, Debug, PartialEq)]
pub enum Unread {
    /// It does not exist here.
    Missing(String),
    /// It exists, or may, and was refused.
    Refused(String, String),
}

impl fmt::Display for Unread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unread::Missing(path) => write!(f, "could not be read: there is no {path} here"),
            Unread::Refused(path, why) => write!(f, "could not be read: {path}: {why}"),
        }
    }
}

/// To whom a file belongs.
#[derive(Clone, Copy, Debug)]
pub struct Owner {
    /// User.
    pub user: u32,
    /// Group.
    pub group: u32,
    /// Permission bits.
    pub mode: u32,
}

impl Tree {
    /// The tree below `root`.
    pub fn new(root: impl Into<PathBuf>) -> Tree {
        Tree { root: root.into() }
    }

    fn at(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    fn unread(path: &str, e: &std::io::Error) -> Unread {
        match e.kind() {
            ErrorKind::NotFound | ErrorKind::NotADirectory => Unread::Missing(path.into()),
            _ => Unread::Refused(path.into(), e.to_string()),
        }
    }

    /// The text of a file, without blanks at its ends.
    pub fn read(&self, path: &str) -> Result<String, Unread> {
        let bytes = std::fs::read(self.at(path)).map_err(|e| Tree::unread(path, &e))?;
        Ok(String::from_utf8_lossy(&bytes).trim().to_string())
    }

    /// The value that is a file's whole text.
    pub fn value<T: FromStr>(&self, path: &str) -> Option<T> {
        self.read(path).ok()?.parse().ok()
    }

    /// A hexadecimal number such as `0x1002`.
    pub fn hex(&self, path: &str) -> Option<u32> {
        u32::from_str_radix(self.read(path).ok()?.trim_start_matches("0x"), 16).ok()
    }

    /// The names in a folder, numbers by their value.
    pub fn names(&self, path: &str) -> Result<Vec<String>, Unread> {
        let entries = std::fs::read_dir(self.at(path)).map_err(|e| Tree::unread(path, &e))?;
        let mut names: Vec<String> = entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect();
        names.sort_by_key(|n| (n.len(), n.clone()));
        Ok(names)
    }

    /// The last part of what a symbolic link points to.
    pub fn link(&self, path: &str) -> Option<String> {
        Some(std::fs::read_link(self.at(path)).ok()?.file_name()?.to_string_lossy().into_owned())
    }

    /// Whether there is such a file or folder.
    pub fn has(&self, path: &str) -> bool {
        self.at(path).exists()
    }

    /// To whom a file belongs.
    pub fn owner(&self, path: &str) -> Result<Owner, Unread> {
        let meta = std::fs::metadata(self.at(path)).map_err(|e| Tree::unread(path, &e))?;
        Ok(Owner { user: meta.uid(), group: meta.gid(), mode: meta.mode() & 0o777 })
    }

    /// (bytes in all, bytes free) of the file system that holds a path.
    pub fn space(&self, path: &str) -> Result<(u64, u64), Unread> {
        let stat = rustix::fs::statvfs(&self.at(path) as &Path).map_err(|e| Tree::unread(path, &e.into()))?;
        Ok((stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize))
    }
}

/// The words behind `key` on its line of a text such as `/proc/self/status`.
pub fn line<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    text.lines().find_map(|l| l.trim_start().strip_prefix(key)).map(|rest| rest.trim_start_matches([':', ' ', '\t']).trim_end())
}

/// Bytes of a line of `/proc/meminfo` or of a node's.
pub fn kib(text: &str, key: &str) -> Option<u64> {
    let at = text.lines().find_map(|l| l.split_once(key))?.1;
    at.trim_start_matches(':').split_whitespace().next()?.parse::<u64>().ok().map(|k| k * 1024)
}

/// The numbers of a list such as `0-3,8`.
pub fn numbers(list: &str) -> Vec<usize> {
    let range = |piece: &str| {
        let (first, last) = piece.split_once('-').unwrap_or((piece, piece));
        Some(first.trim().parse().ok()?..=last.trim().parse::<usize>().ok()?)
    };
    list.split(',').filter_map(range).flatten().collect()
}

/// `64 MiB`, `1.5 TiB`
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["bytes", "KiB", "MiB", "GiB", "TiB"];
    let unit = (0..UNITS.len()).rev().find(|u| n >= 1 << (10 * u)).unwrap_or(0);
    let value = n as f64 / (1u64 << (10 * unit)) as f64;
    if value.fract() == 0.0 || value >= 100.0 { format!("{value:.0} {}", UNITS[unit]) } else { format!("{value:.1} {}", UNITS[unit]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_the_kernel() {
        assert_eq!(line("Uid:\t0\t0\nGroups:\t4 27 \n", "Groups"), Some("4 27"));
        assert_eq!(kib("Node 0 MemFree:   12 kB\n", "MemFree"), Some(12 << 10));
        assert_eq!(kib("MemTotal:  8 kB\n", "MemTotal"), Some(8192));
        assert_eq!(numbers("0-2,8,10-11\n"), [0, 1, 2, 8, 10, 11]);
        assert_eq!(numbers(""), Vec::<usize>::new());
        assert_eq!([bytes(65536), bytes(3 << 29), bytes(12), bytes(0)], ["64 KiB", "1.5 GiB", "12 bytes", "0 bytes"]);
    }
}
