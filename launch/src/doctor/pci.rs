//! Which GPUs are on the bus, who drives them, and do their links run as they could? From `/sys/bus/pci`, which needs no driver and no
//! rights.

use super::finding::{Finding, Group, Level};
use super::tree::{Tree, Unread};
use zrt_kernels::gpu::driver::Vendor;

const DEVICES: &str = "/sys/bus/pci/devices";

/// (vendor, device, name in the hardware catalogue), as the registry of PCI ids has them; `VF`: a part of the card, lent to a virtual machine.
const PARTS: [(u32, u32, &str); 17] = [
    (AMD, 0x74a1, "MI300X"),
    (AMD, 0x74b5, "MI300X"),
    (AMD, 0x74a5, "MI325X"),
    (AMD, 0x74b9, "MI325X"),
    (AMD, 0x75a3, "MI355X"),
    (AMD, 0x75b3, "MI355X"),
    (NVIDIA, 0x20b0, "A100-40"),
    (NVIDIA, 0x20b2, "A100"),
    (NVIDIA, 0x20b5, "A100"),
    (NVIDIA, 0x20f1, "A100-40"),
    (NVIDIA, 0x2330, "H100"),
    (NVIDIA, 0x2331, "H100"),
    (NVIDIA, 0x2335, "H200"),
    (NVIDIA, 0x233b, "H200"),
    (NVIDIA, 0x2901, "B200"),
    (NVIDIA, 0x26b9, "L40S"),
    (NVIDIA, 0x2684, "RTX4090"),
];

const AMD: u32 = 0x1002;
const NVIDIA: u32 = 0x10de;

/// One GPU on the bus.
#[derive(Clone, Debug)]
pub struct PciGpu {
    /// `0000:c1:00.0`
    pub address: String,
    /// Who made it.
    pub vendor: Vendor,
    /// PCI device id.
    pub device: u32,
    /// NUMA node; `None` where the firmware does not say.
    pub node: Option<usize>,
    /// Cores near it, as a list.
    pub cores: String,
    /// Kernel driver.
    pub driver: Option<String>,
    /// How the IOMMU treats it: `identity`, `DMA`, `DMA-FQ`; `None` without an IOMMU.
    pub iommu: Option<String>,
    /// (GT/s, lanes) now and at most; `None` where a virtual function does not show them.
    pub link: Option<[(f64, u32); 2]>,
}

impl PciGpu {
    /// Its name in the hardware catalogue.
    pub fn part(&self) -> Option<&'static str> {
        let vendor = if self.vendor == Vendor::Amd { AMD } else { NVIDIA };
        PARTS.iter().find(|p| (p.0, p.1) == (vendor, self.device)).map(|p| p.2)
    }

    fn title(&self) -> String {
        let vendor = if self.vendor == Vendor::Amd { "AMD" } else { "NVIDIA" };
        let name = self.part().map_or_else(|| format!("device {:#06x}", self.device), str::to_string);
        format!("{vendor} {name} at {}", self.address)
    }
}

/// All GPUs, in the order of addresses.
pub fn gpus(tree: &Tree) -> Result<Vec<PciGpu>, Unread> {
    let one = |address: String| {
        let file = |name: &str| format!("{DEVICES}/{address}/{name}");
        let vendor = match tree.hex(&file("vendor"))? {
            AMD => Vendor::Amd,
            NVIDIA => Vendor::Nvidia,
            _ => return None,
        };
        // Display controllers, and accelerators without a display.
        if !matches!(tree.hex(&file("class"))? >> 16, 0x03 | 0x12) {
            return None;
        }
        let speed = |name: &str| tree.read(&file(name)).ok()?.split_whitespace().next()?.parse::<f64>().ok();
        let link =
            |speed_file: &str, width_file: &str| Some((speed(speed_file)?, tree.value::<u32>(&file(width_file)).filter(|w| *w > 0)?));
        let now = link("current_link_speed", "current_link_width");
        Some(PciGpu {
            vendor,
            device: tree.hex(&file("device")).unwrap_or(0),
            node: tree.value::<i64>(&file("numa_node")).and_then(|n| usize::try_from(n).ok()),
            cores: tree.read(&file("local_cpulist")).unwrap_or_default(),
            driver: tree.link(&file("driver")),
            iommu: tree.read(&file("iommu_group/type")).ok(),
            link: now.zip(link("max_link_speed", "max_link_width")).map(|(now, most)| [now, most]),
            address,
        })
    };
    let mut gpus: Vec<PciGpu> = tree.names(DEVICES)?.into_iter().filter_map(one).collect();
    gpus.sort_by(|a, b| a.address.cmp(&b.address));
    Ok(gpus)
}

/// A GPU driver's file, which containers may have while they see no bus.
pub fn driver_file(tree: &Tree) -> Option<&'static str> {
    ["/dev/kfd", "/dev/nvidiactl"].into_iter().find(|file| tree.has(file))
}

/// What follows for each of them.
pub fn findings(gpus: &Result<Vec<PciGpu>, Unread>, tree: &Tree) -> Vec<Finding> {
    let gpus = match gpus {
        Ok(gpus) if gpus.is_empty() => {
            if let Some(file) = driver_file(tree) {
                return vec![Finding::new(
                    Level::Note,
                    Group::Devices,
                    "GPUs",
                    format!("none on the PCI bus as it is seen here, though there is {file}"),
                )];
            }
            return vec![Finding::new(Level::Note, Group::Devices, "GPUs", "there is no GPU on the PCI bus: runs use the CPU")];
        }
        Ok(gpus) => gpus,
        Err(why) => return vec![Finding::unread(Group::Devices, "PCI bus", why)],
    };
    let mut found: Vec<Finding> = gpus.iter().flat_map(|g| [driver(g), link(g)]).collect();
    for (vendor, path, what) in
        [(Vendor::Amd, "/sys/module/amdgpu/version", "amdgpu module"), (Vendor::Nvidia, "/proc/driver/nvidia/version", "NVIDIA module")]
    {
        if gpus.iter().any(|g| g.vendor == vendor) {
            found.push(match tree.read(path) {
                Ok(text) => {
                    Finding::ok(Group::Devices, what, text.lines().next().unwrap_or_default().trim_start_matches("NVRM version:").trim())
                }
                // The kernel's own amdgpu has no version.
                Err(_) if vendor == Vendor::Amd && tree.has("/sys/module/amdgpu") => {
                    Finding::ok(Group::Devices, what, "that of the kernel")
                }
                Err(why) => Finding::unread(Group::Devices, what, &why),
            });
        }
    }
    if gpus.iter().any(|g| g.vendor == Vendor::Amd) {
        found.push(match tree.read("/opt/rocm/.info/version") {
            Ok(version) => Finding::ok(Group::Devices, "ROCm", version),
            Err(why) => Finding::unread(Group::Devices, "ROCm", &why),
        });
    }
    found
}

fn driver(gpu: &PciGpu) -> Finding {
    let (good, module) = match gpu.vendor {
        Vendor::Amd => ("amdgpu", "sudo modprobe amdgpu; if it is not installed: the amdgpu-dkms package of ROCm"),
        Vendor::Nvidia => ("nvidia", "sudo modprobe nvidia; if it is not installed: the distribution's NVIDIA data-centre driver"),
    };
    let bad = |found: String, fix: &str| {
        Finding::new(Level::Problem, Group::Devices, gpu.title(), found).expected(format!("driver {good}")).fix(fix)
    };
    match gpu.driver.as_deref() {
        Some(name) if name == good => Finding::ok(Group::Devices, gpu.title(), format!("driver {name}")),
        Some("vfio-pci") => bad(
            "driver vfio-pci: it is lent to a virtual machine".into(),
            "use it there, or bind it to its own driver: driverctl unset-override ADDRESS",
        ),
        Some(name) => bad(format!("driver {name}"), module),
        None => bad("no driver".into(), module),
    }
}

fn link(gpu: &PciGpu) -> Finding {
    let what = format!("PCIe of {}", gpu.address);
    let Some([(speed, width), (most_speed, most_width)]) = gpu.link else {
        return Finding::new(Level::Note, Group::Links, what, "could not be read: virtual functions do not show their link");
    };
    let found = format!("{speed} GT/s x{width}");
    let expected = format!("{most_speed} GT/s x{most_width}");
    if width < most_width {
        return Finding::new(Level::Warning, Group::Links, what, found)
            .expected(expected)
            .fix("fewer lanes than the card has: reseat card and riser, look for a slot that shares its lanes (firmware setup: bifurcation), and read dmesg for AER errors");
    }
    if speed < most_speed {
        return Finding::new(Level::Note, Group::Links, what, found)
            .expected(expected)
            .fix("idle cards may lower their speed: look again while a job runs; if it stays, firmware setup: PCIe speed to its highest, ASPM off");
    }
    Finding::ok(Group::Links, what, found)
}
