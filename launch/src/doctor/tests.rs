//! Made-up hosts: a healthy pair of MI300X, the same with everything wrong, one that shows nothing, one without a GPU.

use super::gpu::{GpuRate, GpuReport, LibraryReport, Measured};
use super::*;
use std::path::Path;

struct Host {
    folder: tempfile::TempDir,
}

const GPUS: [&str; 2] = ["0000:0c:00.0", "0000:9f:00.0"];

impl Host {
    fn new() -> Host {
        Host { folder: tempfile::tempdir().unwrap() }
    }

    fn at(&self, path: &str) -> std::path::PathBuf {
        let at = self.folder.path().join(path);
        std::fs::create_dir_all(at.parent().unwrap()).unwrap();
        at
    }

    fn put(&self, path: &str, text: &str) {
        std::fs::write(self.at(path), text).unwrap();
    }

    /// A folder in place of a file fails to be read by anyone, also by root.
    fn hide(&self, path: &str) {
        let at = self.at(path);
        let _ = std::fs::remove_file(&at);
        std::fs::create_dir_all(at).unwrap();
    }

    fn link(&self, path: &str, to: &str) {
        std::os::unix::fs::symlink(to, self.at(path)).unwrap();
    }

    /// Two sockets, no GPU, all as it should be.
    fn healthy() -> Host {
        let host = Host::new();
        host.put("proc/sys/kernel/osrelease", "6.8.0-60-generic\n");
        host.put("proc/sys/kernel/numa_balancing", "0\n");
        host.put("proc/sys/kernel/nmi_watchdog", "0\n");
        host.put("proc/sys/vm/overcommit_memory", "0\n");
        host.put("proc/cmdline", "root=/dev/sda1 iommu=pt quiet\n");
        host.put("proc/cpuinfo", "flags\t\t: fpu sse2 avx512f\n");
        host.put("proc/meminfo", "MemTotal: 2113929216 kB\nMemAvailable: 2000000000 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n");
        host.put(
            "proc/self/limits",
            "Limit                     Soft Limit           Hard Limit           Units\n\
             Max processes             8000000              8000000              processes\n\
             Max open files            1048576              1048576              files\n\
             Max locked memory         unlimited            unlimited            bytes\n",
        );
        host.put(
            "proc/self/status",
            "Uid:\t4001\t4001\t4001\t4001\nGid:\t4001\t4001\t4001\t4001\nGroups:\t4001 4002\nCapEff:\t0000000000000000\n\
             Cpus_allowed_list:\t0-191\nMems_allowed_list:\t0-1\n",
        );
        host.put("proc/self/cgroup", "0::/user.slice/job\n");
        host.put("sys/fs/cgroup/user.slice/job/memory.max", "max\n");
        host.put("proc/mounts", "tmpfs /dev/shm tmpfs rw,nosuid,size=1056964608k 0 0\n");
        host.put("sys/kernel/mm/transparent_hugepage/enabled", "[always] madvise never\n");
        for core in [0, 1, 100] {
            host.put(&format!("sys/devices/system/cpu/cpu{core}/cpufreq/scaling_governor"), "performance\n");
        }
        for node in 0..2 {
            host.put(
                &format!("sys/devices/system/node/node{node}/meminfo"),
                &format!("Node {node} MemTotal: 1056964608 kB\nNode {node} MemFree: 1000000000 kB\n"),
            );
        }
        host.put("etc/hosts", "127.0.0.1 localhost\n10.0.0.7 trainer\n");
        host.put("sys/bus/pci/devices/0000:00:00.0/vendor", "0x8086\n");
        host.put("sys/bus/pci/devices/0000:00:00.0/class", "0x060000\n");
        host
    }

    /// The same with two MI300X, one at each socket, joined by a link, that this user may use.
    fn pair() -> Host {
        let host = Host::healthy();
        for (node, address) in GPUS.iter().enumerate() {
            let file = |name: &str| format!("sys/bus/pci/devices/{address}/{name}");
            for (name, text) in [
                ("vendor", "0x1002"),
                ("class", "0x120000"),
                ("device", "0x74a1"),
                ("current_link_speed", "32.0 GT/s PCIe"),
                ("max_link_speed", "32.0 GT/s PCIe"),
                ("current_link_width", "16"),
                ("max_link_width", "16"),
                ("iommu_group/type", "identity"),
            ] {
                host.put(&file(name), text);
            }
            host.put(&file("numa_node"), &node.to_string());
            host.put(&file("local_cpulist"), ["0-95\n", "96-191\n"][node]);
            host.link(&file("driver"), "../../../../bus/pci/drivers/amdgpu");
            let (gpu, other) = (node + 2, 3 - node);
            let folder = format!("sys/class/kfd/kfd/topology/nodes/{gpu}");
            host.put(&format!("{folder}/properties"), "cpu_cores_count 0\nsimd_count 1216\ngfx_target_version 90402\n");
            host.put(&format!("{folder}/io_links/0/properties"), &format!("type 2\nnode_from {gpu}\nnode_to {node}\n"));
            host.put(
                &format!("{folder}/io_links/1/properties"),
                &format!("type 11\nnode_from {gpu}\nnode_to {other}\nmax_bandwidth 64000\n"),
            );
            host.put(&format!("sys/class/kfd/kfd/topology/nodes/{node}/properties"), "cpu_cores_count 96\nsimd_count 0\n");
        }
        host.put("sys/module/amdgpu/version", "6.12.12\n");
        host.put("opt/rocm/.info/version", "6.4.1\n");
        for file in ["dev/kfd", "dev/dri/renderD128", "dev/dri/renderD129", "dev/dri/card0"] {
            host.put(file, "");
            open(&host.at(file), 0o666);
        }
        host
    }

    fn examine(&self) -> Vec<Finding> {
        examine(&Tree::new(self.folder.path()), "trainer", None)
    }
}

fn open(path: &Path, mode: u32) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

#[track_caller]
fn of<'a>(found: &'a [Finding], what: &str) -> &'a Finding {
    found.iter().find(|f| f.what.contains(what)).unwrap_or_else(|| panic!("nothing about {what} in {found:#?}"))
}

#[track_caller]
fn says(found: &[Finding], what: &str, level: Level, text: &str) {
    let f = of(found, what);
    assert!(f.level == level && f.found.contains(text), "{level:?} '{text}' expected, got {f:#?}");
}

#[test]
fn a_healthy_pair_has_nothing_to_fix() {
    let found = Host::pair().examine();
    assert!(found.iter().all(|f| f.level == Level::Ok), "{:#?}", found.iter().filter(|f| f.level != Level::Ok).collect::<Vec<_>>());
    says(&found, "AMD MI300X at 0000:0c:00.0", Level::Ok, "amdgpu");
    says(&found, "PCIe of 0000:9f:00.0", Level::Ok, "32 GT/s x16");
    says(&found, "compute topology", Level::Ok, "2 GPUs for compute (gfx942)");
    says(&found, "links between GPUs", Level::Ok, "each of 1 pairs has xGMI, at least 64 GB/s");
    says(&found, "pinned memory for 0000:9f:00.0", Level::Ok, "node 1, cores 96-191");
    says(&found, "ROCm", Level::Ok, "6.4.1");
    says(&found, "own host name", Level::Ok, "10.0.0.7");
}

#[test]
fn everything_wrong_is_found_with_its_fix() {
    let host = Host::pair();
    host.put("proc/sys/kernel/numa_balancing", "1\n");
    host.put("proc/sys/kernel/nmi_watchdog", "1\n");
    host.put("proc/sys/vm/overcommit_memory", "2\n");
    host.put("proc/cmdline", "root=/dev/sda1 quiet\n");
    host.put("sys/class/iommu/dmar0/devices", "");
    host.put("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n");
    host.put("sys/devices/system/cpu/cpu1/cpufreq/scaling_governor", "powersave\n");
    host.put("proc/mounts", "shm /dev/shm tmpfs rw,size=65536k 0 0\n");
    host.put(
        "proc/self/limits",
        "Max processes             1024                 2048                 processes\n\
         Max open files            1024                 1048576              files\n\
         Max locked memory         65536                unlimited            bytes\n",
    );
    host.put(
        "proc/self/status",
        "Uid:\t4001\t4001\t4001\t4001\nGid:\t4001\t4001\t4001\t4001\nGroups:\t\nCapEff:\t0\nCpus_allowed_list:\t0-95\nMems_allowed_list:\t0\n",
    );
    host.put("proc/self/cgroup", "0::/user.slice/job\n");
    host.put("sys/fs/cgroup/user.slice/memory.max", "68719476736\n");
    host.put("etc/hosts", "127.0.1.1 trainer # by the installer\n");
    for (file, text) in [("current_link_width", "8"), ("iommu_group/type", "DMA-FQ")] {
        host.put(&format!("sys/bus/pci/devices/{}/{file}", GPUS[0]), text);
    }
    host.put(&format!("sys/bus/pci/devices/{}/current_link_speed", GPUS[1]), "2.5 GT/s PCIe");
    for gpu in [2, 3] {
        std::fs::remove_dir_all(host.at(&format!("sys/class/kfd/kfd/topology/nodes/{gpu}/io_links/1"))).unwrap();
    }
    open(&host.at("dev/kfd"), 0o600);
    std::fs::remove_dir_all(host.at("dev/dri")).unwrap();
    let found = host.examine();
    for (what, level, text, fix) in [
        ("NUMA balancing", Level::Warning, "on (1)", "sysctl kernel.numa_balancing=0"),
        ("IOMMU", Level::Warning, "1 of 2 GPUs (DMA-FQ)", "iommu=pt"),
        ("transparent huge pages", Level::Warning, "never", "echo always"),
        ("clock governor", Level::Note, "performance, powersave", "cpupower"),
        ("NMI watchdog", Level::Note, "on", "nmi_watchdog=0"),
        ("overcommit", Level::Warning, "strict", "vm.overcommit_memory=0"),
        ("locked memory", Level::Problem, "64 KiB", "for this shell: ulimit -l unlimited"),
        ("shared memory", Level::Problem, "64 MiB", "--shm-size"),
        ("open files", Level::Warning, "1024", "ulimit -n"),
        ("processes", Level::Warning, "1024", "ulimit -u"),
        ("host memory", Level::Note, "this container may use 64 GiB", "--memory=0"),
        ("PCIe of 0000:0c:00.0", Level::Warning, "32 GT/s x8", "fewer lanes"),
        ("PCIe of 0000:9f:00.0", Level::Note, "2.5 GT/s x16", "while a job runs"),
        ("links between GPUs", Level::Note, "1 of 1 pairs have no xGMI: nodes 2 and 3", "zero.stage = 0"),
        ("pinned memory for 0000:9f:00.0", Level::Warning, "may not have memory on node 1", "--cpuset-mems"),
        ("/dev/kfd", Level::Problem, "not in", "usermod -aG"),
        ("/dev/dri/renderD128", Level::Problem, "missing", "--device=/dev/dri"),
        ("own host name", Level::Note, "127.0.1.1", "MASTER_ADDR"),
    ] {
        says(&found, what, level, text);
        assert!(of(&found, what).fix.contains(fix), "{fix}: {:#?}", of(&found, what));
    }
    // Without groups of its own, a GPU's IOMMU is known from the kernel's command line and its units.
    for gpu in GPUS {
        std::fs::remove_dir_all(host.at(&format!("sys/bus/pci/devices/{gpu}/iommu_group"))).unwrap();
    }
    says(&host.examine(), "IOMMU", Level::Warning, "not started with iommu=pt");
}

#[test]
fn less_usual_mistakes() {
    let host = Host::pair();
    std::fs::remove_file(host.at(&format!("sys/bus/pci/devices/{}/driver", GPUS[0]))).unwrap();
    host.put(&format!("sys/bus/pci/devices/{}/numa_node", GPUS[1]), "-1\n");
    host.put(&format!("sys/bus/pci/devices/{}/max_link_width", GPUS[1]), "0\n");
    host.put(
        "proc/self/status",
        "Uid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\nCapEff:\t000001ffffffffff\nCpus_allowed_list:\t96-191\nMems_allowed_list:\t0-1\n",
    );
    host.put("proc/self/limits", "Max locked memory         65536                65536                bytes\n");
    host.put("proc/self/cgroup", "4:memory:/docker/abc\n1:name=systemd:/\n");
    host.put("sys/fs/cgroup/memory/memory.limit_in_bytes", "17179869184\n");
    let found = host.examine();
    says(&found, "AMD MI300X at 0000:0c:00.0", Level::Problem, "no driver");
    says(&found, "PCIe of 0000:9f:00.0", Level::Note, "virtual functions");
    says(&found, "pinned memory for 0000:0c:00.0", Level::Warning, "no core of node 0");
    says(&found, "pinned memory for 0000:9f:00.0", Level::Note, "firmware does not say");
    says(&found, "locked memory", Level::Ok, "CAP_IPC_LOCK");
    says(&found, "open files", Level::Note, "could not be read");
    says(&found, "host memory", Level::Note, "16 GiB");
    // Both at one socket.
    host.put(&format!("sys/bus/pci/devices/{}/numa_node", GPUS[1]), "0\n");
    says(&host.examine(), "sockets of the GPUs", Level::Note, "all 2 are on node 0");
}

#[test]
fn what_cannot_be_read_is_said_and_no_more() {
    let host = Host::pair();
    for file in [
        "proc/sys/kernel/osrelease",
        "proc/sys/kernel/numa_balancing",
        "proc/meminfo",
        "proc/self/limits",
        "proc/self/status",
        "proc/mounts",
        "sys/kernel/mm/transparent_hugepage/enabled",
        "sys/module/amdgpu/version",
        "sys/class/kfd/kfd/topology/nodes/2/properties",
        "etc/hosts",
    ] {
        host.hide(file);
    }
    let found = host.examine();
    assert!(found.iter().all(|f| f.level <= Level::Note), "{found:#?}");
    for what in
        ["kernel", "NUMA balancing", "NUMA nodes", "host memory", "locked memory", "open files", "transparent huge pages", "own host name"]
    {
        says(&found, what, Level::Note, "could not be read");
    }
    says(&found, "compute topology", Level::Ok, "hidden from this process: 1");
    // Nothing at all.
    let found = Host::new().examine();
    assert!(found.iter().all(|f| f.level <= Level::Note), "{found:#?}");
    says(&found, "PCI bus", Level::Note, "could not be read");
}

#[test]
fn without_a_gpu_little_matters() {
    let host = Host::healthy();
    host.put("proc/sys/kernel/numa_balancing", "1\n");
    host.put(
        "proc/self/limits",
        "Max locked memory 65536 65536 bytes\nMax processes 9000 9000 processes\nMax open files 9000 9000 files\n",
    );
    host.put("proc/mounts", "shm /dev/shm tmpfs rw,size=65536k 0 0\n");
    let found = host.examine();
    says(&found, "GPUs", Level::Note, "no GPU on the PCI bus: runs use the CPU");
    assert!(found.iter().all(|f| f.level <= Level::Note), "{found:#?}");
    says(&found, "NUMA balancing", Level::Note, "on (1)");
    // A driver is there, though the bus is hidden.
    host.put("dev/kfd", "");
    says(&host.examine(), "GPUs", Level::Note, "/dev/kfd");
    says(&host.examine(), "NUMA balancing", Level::Warning, "on (1)");
}

#[test]
fn libraries_and_measurements_are_judged() {
    let host = Host::pair();
    let device = |pci: &str, peers: &[&str]| GpuReport {
        name: "AMD Instinct MI300X".into(),
        arch: "gfx942".into(),
        memory_bytes: 192 << 30,
        pci: pci.into(),
        driver: "6.4".into(),
        peers: peers.iter().map(|p| p.to_string()).collect(),
    };
    let library = |role, found: Result<&str, &str>| LibraryReport {
        role,
        name: format!("lib{role}.so"),
        found: found.map(str::to_string).map_err(str::to_string),
    };
    let rate = |what, pci: &str, bytes_per_s| GpuRate { what, pci: pci.into(), bytes_per_s: Ok(bytes_per_s) };
    let mut probe = GpuProbe {
        devices: vec![device(GPUS[0], &GPUS[1..]), device(GPUS[1], &GPUS[..1])],
        libraries: vec![library("driver", Ok("6.4")), library("blas", Err("not found")), library("collectives", Err("not found"))],
        rates: vec![rate(Measured::ToDevice, GPUS[0], 54e9), rate(Measured::ToHost, GPUS[1], 12e9), rate(Measured::AllReduce, "", 20e9)],
    };
    let of_probe = |probe: &GpuProbe| examine(&Tree::new(host.folder.path()), "trainer", Some(probe));
    let found = of_probe(&probe);
    says(&found, "device at 0000:0c:00.0", Level::Ok, "gfx942, 192 GiB, driver 6.4");
    says(&found, "blas library", Level::Warning, "not found");
    says(&found, "collectives library", Level::Problem, "not found");
    assert!(of(&found, "collectives library").fix.contains("[device.libraries] collectives = "));
    says(&found, "access to peers", Level::Ok, "each of 2");
    says(&found, "copy to the device", Level::Ok, "54.0 GB/s, 97 %");
    says(&found, "copy to the host, 0000:9f:00.0", Level::Warning, "12.0 GB/s, 22 %");
    says(&found, "all-reduce (bus", Level::Warning, "20.0 GB/s, 42 %");
    probe.devices.truncate(1);
    says(&of_probe(&probe), "device at 0000:9f:00.0", Level::Note, "not seen by the vendor's library");
    probe.devices = vec![device(GPUS[0], &[]), device(GPUS[1], &GPUS[..1])];
    probe.rates[2].bytes_per_s = Err("a rank did not come".into());
    let found = of_probe(&probe);
    says(&found, "access to peers", Level::Warning, "1 of 2");
    says(&found, "all-reduce (bus", Level::Note, "not measured: a rank did not come");
    // A container may hide the bus.
    let found = examine(&Tree::new(Host::healthy().folder.path()), "trainer", Some(&probe));
    says(&found, "GPUs", Level::Note, "drivers have 2");
    says(&found, "collectives library", Level::Problem, "not found");
}

#[test]
fn people_and_programs_read_the_same() {
    let found = in_groups(Host::healthy().examine());
    let (text, value) = (text(&found), serde_json::from_str::<serde_json::Value>(&json(&found)).unwrap());
    let list = value["findings"].as_array().unwrap();
    assert_eq!(list.len(), found.len());
    assert_eq!(value["counts"]["problems"], 0);
    assert_eq!(list[0]["level"], "note");
    for f in &found {
        assert!(text.contains(&format!("{}: {}", f.what, f.found)), "{text}");
    }
    assert!(text.starts_with("Devices and drivers\n  note     GPUs: ") && text.ends_with("0 problems, 0 warnings, 1 note"), "{text}");
}
