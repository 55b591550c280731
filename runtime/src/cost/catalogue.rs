//! Which parts (a GPU, a processor) and machines (parts, their links, host, network, price) are known: data files, one a part or
//! machine, in `runtime/hw`, embedded. A user's folder adds files or replaces them by name; `zlaunch calibrate` writes such a file
//! for the machine it runs on.

use super::number::{How, Number};
use super::sheet::{Machine, Part, Price, Sheet};
use crate::error::{Error, Result};
use std::path::{Path, PathBuf};

/// All sheets that are known.
#[derive(Clone, Debug)]
pub struct Catalogue {
    parts: Vec<Part>,
    machines: Vec<Machine>,
}

macro_rules! sheets {
    ($($name:literal),* $(,)?) => { [$(($name, include_str!(concat!("../../hw/", $name, ".toml")))),*] };
}

/// The files of `runtime/hw`.
const BUILTIN: [(&str, &str); 22] = sheets![
    "parts/a100-40",
    "parts/a100-80",
    "parts/b200",
    "parts/cpu",
    "parts/h100",
    "parts/h200",
    "parts/l40s",
    "parts/mi300x",
    "parts/mi325x",
    "parts/mi355x",
    "parts/rtx4090",
    "machines/a100",
    "machines/a100-40",
    "machines/b200",
    "machines/cpu",
    "machines/h100",
    "machines/h200",
    "machines/l40s",
    "machines/mi300x",
    "machines/mi325x",
    "machines/mi355x",
    "machines/rtx4090",
];

/// Name of the built-in machine that stands for a host which nobody has measured.
pub const THIS_HOST: &str = "CPU";

/// `H100-80GB` and `h100_80gb` are one name.
fn plain(name: &str) -> String {
    name.chars().filter(|c| c.is_ascii_alphanumeric()).collect::<String>().to_lowercase()
}

fn is_called(wanted: &str, name: &str, aliases: &[String]) -> bool {
    let wanted = plain(wanted);
    plain(name) == wanted || aliases.iter().any(|a| plain(a) == wanted)
}

/// Name under which `zlaunch calibrate` writes the host it runs on.
pub const CALIBRATED: &str = "local";

impl Catalogue {
    /// The embedded files.
    pub fn builtin() -> Result<Catalogue> {
        let mut catalogue = Catalogue { parts: Vec::new(), machines: Vec::new() };
        for (name, text) in BUILTIN {
            catalogue.add(Sheet::parse(text, &format!("runtime/hw/{name}.toml"))?);
        }
        Ok(catalogue)
    }

    /// The embedded files and those of the user: `folder`, or `$XDG_CONFIG_HOME/zlaunch/hw` (`~/.config/zlaunch/hw`) where that exists.
    pub fn load(folder: Option<&Path>) -> Result<Catalogue> {
        let mut catalogue = Catalogue::builtin()?;
        match (folder, user_folder()) {
            (Some(folder), _) => catalogue.add_folder(folder)?,
            (None, Some(folder)) if folder.is_dir() => catalogue.add_folder(&folder)?,
            _ => {}
        }
        Ok(catalogue)
    }

    /// Adds every `*.toml` of a folder, in the order of names.
    pub fn add_folder(&mut self, folder: &Path) -> Result<()> {
        let io = |source| Error::Input(format!("hardware folder {}: {source}", folder.display()));
        let mut files: Vec<PathBuf> = std::fs::read_dir(folder).map_err(io)?.filter_map(|e| e.ok().map(|e| e.path())).collect();
        files.retain(|f| f.extension().is_some_and(|e| e == "toml"));
        files.sort();
        for file in files {
            let text = std::fs::read_to_string(&file).map_err(|e| Error::Input(format!("{}: {e}", file.display())))?;
            self.add(Sheet::parse(&text, &file.display().to_string())?);
        }
        Ok(())
    }

    /// Adds a sheet; what has the same name is replaced.
    pub fn add(&mut self, sheet: Sheet) {
        if let Some(part) = sheet.part {
            self.parts.retain(|p| plain(&p.name) != plain(&part.name));
            self.parts.push(part);
        }
        if let Some(machine) = sheet.machine {
            self.machines.retain(|m| plain(&m.name) != plain(&machine.name));
            self.machines.push(machine);
        }
    }

    /// All parts.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// All machines.
    pub fn machines(&self) -> &[Machine] {
        &self.machines
    }

    /// Whether this host was calibrated.
    pub fn knows_this_host(&self) -> bool {
        self.find(CALIBRATED).is_some()
    }

    /// A machine and its part. Later files win over earlier ones of the same alias.
    fn find(&self, name: &str) -> Option<(&Machine, &Part)> {
        let part = |m: &Machine| self.parts.iter().rev().find(|p| is_called(&m.part, &p.name, &p.aliases));
        let by_own_name = self.machines.iter().rev().find(|m| is_called(name, &m.name, &m.aliases));
        // A machine answers to its part's names too.
        let by_part = || self.machines.iter().rev().find(|m| part(m).is_some_and(|p| is_called(name, &p.name, &p.aliases)));
        let machine = by_own_name.or_else(by_part)?;
        Some((machine, part(machine)?))
    }

    /// Reads a machine spec: `2xMI300X`, `H100x8`, `H100x8x4` (four hosts), `16xH200` (two hosts of eight), with overrides such as
    /// `1xH100,host_memory=256GB,price=2.5`.
    ///
    /// # Errors
    /// The name is unknown, more devices than a host has that do not come out as whole hosts, several hosts without a network.
    pub fn cluster(&self, spec: &str) -> Result<Cluster> {
        let mut pieces = spec.split(',').map(str::trim);
        let wanted = pieces.next().unwrap_or_default();
        let (name, counts) = self.counts(wanted);
        let Some((machine, part)) = self.find(name) else {
            let mut known: Vec<&str> = self.machines.iter().map(|m| m.name.as_str()).collect();
            known.sort_unstable();
            return Err(Error::Input(format!(
                "machine {wanted}: {name} is not in the catalogue; known: {}; write 2xMI300X or H100x8, or add a file to the hardware folder",
                known.join(", ")
            )));
        };
        let mut cluster = Cluster { part: part.clone(), machine: machine.clone(), devices: 1, hosts: 1 };
        cluster.set_counts(wanted, &counts)?;
        for piece in pieces {
            cluster.set(piece)?;
        }
        Ok(cluster)
    }

    /// Splits counts off a spec: a leading `2x`, trailing `x8x4`.
    fn counts<'a>(&self, spec: &'a str) -> (&'a str, Vec<usize>) {
        let mut counts = Vec::new();
        let mut name = spec;
        if let Some((count, rest)) = spec.split_once(['x', 'X'])
            && let Ok(count) = count.parse()
        {
            (name, counts) = (rest, vec![count]);
        }
        // `RTX4090` ends in a number too: names first.
        while self.find(name).is_none()
            && let Some((rest, count)) = name.rsplit_once(['x', 'X'])
            && let Ok(count) = count.parse()
        {
            name = rest;
            counts.insert(usize::from(spec.starts_with(|c: char| c.is_ascii_digit())).min(counts.len()), count);
        }
        (name, counts)
    }
}

/// `$XDG_CONFIG_HOME/zlaunch/hw`, or `~/.config/zlaunch/hw`.
pub fn user_folder() -> Option<PathBuf> {
    let config = std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from).filter(|p| p.is_absolute());
    let config = config.or_else(|| std::env::var_os("HOME").map(|h| PathBuf::from(h).join(".config")));
    config.map(|c| c.join("zlaunch/hw"))
}

/// Hosts of one machine: what a job runs on, one rank a device.
#[derive(Clone, Debug, PartialEq)]
pub struct Cluster {
    /// The part.
    pub part: Part,
    /// The machine.
    pub machine: Machine,
    /// Devices used of each host.
    pub devices: usize,
    /// Hosts.
    pub hosts: usize,
}

impl Cluster {
    /// Ranks.
    pub fn ranks(&self) -> usize {
        self.devices * self.hosts
    }

    /// `8x H100`, `4 hosts of 8x H100`.
    pub fn name(&self) -> String {
        let one = format!("{}x {}", self.devices, self.machine.name);
        if self.hosts == 1 { one } else { format!("{} hosts of {one}", self.hosts) }
    }

    /// The same on so many hosts.
    pub fn with_hosts(&self, hosts: usize) -> Result<Cluster> {
        if hosts == 0 || hosts > 1 && self.machine.network.is_none() {
            return Err(Error::Input(format!(
                "{} on {hosts} hosts: expected at least 1, and [machine.network] in its file for more than one",
                self.machine.name
            )));
        }
        Ok(Cluster { hosts, ..self.clone() })
    }

    fn set_counts(&mut self, spec: &str, counts: &[usize]) -> Result<()> {
        let most = self.machine.devices;
        let (devices, hosts) = match counts {
            [] => (1, 1),
            [n] if *n > most && n.is_multiple_of(most) => (most, n / most),
            [n] => (*n, 1),
            [devices, hosts] => (*devices, *hosts),
            _ => return Err(Error::Input(format!("machine {spec}: expected devices, or devices x hosts"))),
        };
        if devices == 0 || hosts == 0 || devices > most {
            return Err(Error::Input(format!(
                "machine {spec}: {devices} devices on each of {hosts} hosts, a host of {} has 1 to {most}",
                self.machine.name
            )));
        }
        self.devices = devices;
        *self = self.with_hosts(hosts)?;
        Ok(())
    }

    /// One override of a spec.
    fn set(&mut self, piece: &str) -> Result<()> {
        let given = |value: f64| Number::new(value, How::Specification, "given with the machine");
        let wrong = |what: &str| Error::Input(format!("machine override {piece}: {what}"));
        let (key, value) = piece.split_once('=').ok_or_else(|| wrong("expected key=value"))?;
        let amount = parse_amount(value).filter(|v| *v >= 0.0).ok_or_else(|| wrong("expected a number such as 256GB or 2.5"))?;
        // A given number is taken as it is: it has no range.
        let exact = Number { low: Some(amount), high: Some(amount), ..given(amount) };
        match key.trim() {
            "host_memory" => self.machine.host.memory = exact,
            "device_memory" => self.part.memory.bytes = exact,
            "link" => {
                self.machine.links.bandwidth = exact;
                self.machine.links.bus.clear();
            }
            "host_link" => match &mut self.part.host_link {
                Some(link) => (link.to_device, link.to_host) = (exact.clone(), exact),
                None => return Err(wrong("this part has no link to the host")),
            },
            "network" => match &mut self.machine.network {
                Some(network) => network.bandwidth = exact,
                None => return Err(wrong("this machine has no network in its file")),
            },
            "price" => self.machine.price = Some(Price { per_device_hour: exact, date: "given".into() }),
            _ => return Err(wrong("known: host_memory, device_memory, link, host_link, network, price")),
        }
        Ok(())
    }

    /// This host's processor as the catalogue has it, one rank for each of `ranks`: a file that `zlaunch calibrate` wrote as
    /// [`CALIBRATED`], else the modest built-in one times the cores and memory found.
    pub fn this_host(catalogue: &Catalogue, ranks: usize) -> Result<Cluster> {
        if let Some((machine, part)) = catalogue.find(CALIBRATED) {
            return Ok(Cluster { part: part.clone(), machine: machine.clone(), devices: ranks, hosts: 1 });
        }
        let mut cluster = catalogue.cluster(THIS_HOST)?;
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let scale = |n: &mut Number| {
            n.value *= cores as f64;
            n.low = n.low.map(|v| v * cores as f64);
            n.high = n.high.map(|v| v * cores as f64);
        };
        for m in cluster.part.matmul.values_mut() {
            scale(&mut m.peak);
            scale(&mut m.ceiling);
        }
        scale(&mut cluster.part.memory.bandwidth);
        scale(&mut cluster.machine.host.bandwidth);
        let device = zrt_kernels::cpu::CpuDevice::new(zrt_kernels::cpu::CpuOptions {
            threads: 1,
            mode: zrt_kernels::cpu::Mode::Inline,
            track: false,
            trace: false,
        })?;
        let bytes = zrt_kernels::Device::info(&*device).memory_bytes;
        if bytes > 0 {
            let found = Number {
                low: Some(bytes as f64),
                high: Some(bytes as f64),
                ..Number::new(bytes as f64, How::Measured, "reported by the system")
            };
            cluster.part.memory.bytes = found.clone();
            cluster.machine.host.memory = found;
        }
        cluster.machine.host.cores = cores;
        cluster.devices = ranks;
        Ok(cluster)
    }
}

/// `256GB`, `1.5TB`, `64GiB`, `55e9`, `2.5`.
fn parse_amount(text: &str) -> Option<f64> {
    let text = text.trim();
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match text[digits.len()..].to_lowercase().as_str() {
        "" | "b" => 1.0,
        "k" | "kb" => 1e3,
        "m" | "mb" => 1e6,
        "g" | "gb" => 1e9,
        "t" | "tb" => 1e12,
        "gib" => 2f64.powi(30),
        "tib" => 2f64.powi(40),
        _ => return None,
    };
    digits.trim().parse::<f64>().ok().filter(|v| v.is_finite()).map(|v| v * unit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::sheet::PartKind;

    fn catalogue() -> Catalogue {
        Catalogue::builtin().unwrap()
    }

    #[test]
    fn every_file_is_embedded_and_every_number_has_an_origin() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("hw");
        let mut files = 0;
        for folder in ["parts", "machines"] {
            for file in std::fs::read_dir(root.join(folder)).unwrap() {
                let name = format!("{folder}/{}", file.unwrap().path().file_stem().unwrap().to_str().unwrap());
                assert!(BUILTIN.iter().any(|(n, _)| *n == name), "{name} is not embedded");
                files += 1;
            }
        }
        assert_eq!(files, BUILTIN.len());
        let c = catalogue();
        for m in c.machines() {
            assert!(c.find(&m.name).is_some(), "{}: its part {} is unknown", m.name, m.part);
        }
    }

    #[test]
    fn specs_are_read_in_all_their_forms() {
        let c = catalogue();
        let of = |spec: &str| c.cluster(spec).map(|k| (k.machine.name.clone(), k.devices, k.hosts));
        for (spec, name, devices, hosts) in [
            ("2xMI300X", "MI300X", 2, 1),
            ("mi300x", "MI300X", 1, 1),
            ("MI300Xx8", "MI300X", 8, 1),
            ("H100x8", "H100", 8, 1),
            ("8xh100-80gb", "H100", 8, 1),
            ("H100x8x4", "H100", 8, 4),
            ("16xH200", "H200", 8, 2),
            ("RTX4090", "RTX4090", 1, 1),
            ("2xrtx4090", "RTX4090", 2, 1),
            ("rtx-4090x4", "RTX4090", 4, 1),
        ] {
            assert_eq!(of(spec).unwrap(), (name.into(), devices, hosts), "{spec}");
        }
        for (spec, why) in [
            ("9xH100", "a host of H100 has 1 to 8"),
            ("2xH101", "H101 is not in the catalogue; known: A100"),
            ("16xRTX4090", "[machine.network]"),
            ("1xH100,ram=3", "known: host_memory"),
            ("0xH100", "0 devices"),
        ] {
            let e = of(spec).unwrap_err().to_string();
            assert!(e.contains(why), "{spec}: {e}");
        }
        let k = c.cluster("1xH100,host_memory=256GB,price=2.5").unwrap();
        assert_eq!((k.machine.host.memory.value, k.machine.price.unwrap().per_device_hour.value), (256e9, 2.5));
    }

    #[test]
    fn a_sheet_is_the_same_after_writing_and_reading() {
        for (name, text) in BUILTIN {
            let sheet = Sheet::parse(text, name).unwrap();
            assert_eq!(Sheet::parse(&sheet.to_toml().unwrap(), name).unwrap(), sheet);
        }
    }

    #[test]
    fn a_users_file_replaces_and_nonsense_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let text = BUILTIN.iter().find(|(n, _)| *n == "machines/mi300x").unwrap().1;
        std::fs::write(folder.path().join("mine.toml"), text.replace("devices = 8", "devices = 4")).unwrap();
        let c = Catalogue::load(Some(folder.path())).unwrap();
        assert_eq!(c.cluster("MI300X").unwrap().machine.devices, 4);
        let part = BUILTIN.iter().find(|(n, _)| *n == "parts/mi300x").unwrap().1;
        let e = Sheet::parse(&part.replace("value = 1307e12", "value = 600e12"), "bad.toml").unwrap_err().to_string();
        assert!(e.contains("bad.toml") && e.contains("above the peak"), "{e}");
        let e = Sheet::parse(&text.replace("graph", "grpah"), "bad.toml").unwrap_err().to_string();
        assert!(e.contains("grpah"), "{e}");
    }

    #[test]
    fn this_host_works_without_a_file() {
        let k = Cluster::this_host(&catalogue(), 2).unwrap();
        assert_eq!((k.ranks(), k.part.kind), (2, PartKind::Cpu));
        assert!(k.machine.host.memory.value > 1e8);
    }
}
