//! What may this process use? Locked memory, shared memory, open files, memory of its container, and the device files of GPUs.

use super::finding::{Finding, Group, Level};
use super::tree::{Owner, Tree, Unread, bytes, kib, line};

const GIB: u64 = 1 << 30;

/// All limits; `gpus`: whether the machine has some.
pub fn findings(tree: &Tree, gpus: bool) -> Vec<Finding> {
    let mut found = vec![locked_memory(tree), shared_memory(tree)];
    if !gpus {
        // Ranks on the CPU pin nothing and share memory without a name.
        found = found.into_iter().map(Finding::softened).collect();
    }
    found.push(memory(tree));
    found.extend([files(tree), processes(tree)]);
    found
}

/// (soft, hard) of a line of `/proc/self/limits`; `None` is unlimited.
fn limit(tree: &Tree, name: &str) -> Result<(Option<u64>, Option<u64>), Unread> {
    const FILE: &str = "/proc/self/limits";
    let text = tree.read(FILE)?;
    let missing = || Unread::Refused(FILE.into(), format!("no line '{name}'"));
    let mut words = line(&text, name).ok_or_else(missing)?.split_whitespace().map(|w| w.parse::<u64>().ok());
    words.next().zip(words.next()).ok_or_else(missing)
}

fn locked_memory(tree: &Tree) -> Finding {
    const WHAT: &str = "locked memory (ulimit -l)";
    /// Bit of the capability that lifts the limit.
    const IPC_LOCK: u64 = 1 << 14;
    let (soft, hard) = match limit(tree, "Max locked memory") {
        Ok(found) => found,
        Err(why) => return Finding::unread(Group::Limits, WHAT, &why),
    };
    let Some(most) = soft else { return Finding::ok(Group::Limits, WHAT, "unlimited") };
    let status = tree.read("/proc/self/status").unwrap_or_default();
    let lifted = line(&status, "CapEff").and_then(|hex| u64::from_str_radix(hex, 16).ok()).is_some_and(|caps| caps & IPC_LOCK != 0);
    if lifted {
        return Finding::ok(Group::Limits, WHAT, format!("{}, which does not bind this process (CAP_IPC_LOCK)", bytes(most)));
    }
    let total = tree.read("/proc/meminfo").ok().and_then(|text| kib(&text, "MemTotal")).unwrap_or(u64::MAX);
    if most >= total / 2 {
        return Finding::ok(Group::Limits, WHAT, bytes(most));
    }
    let now = if hard.is_none() { "for this shell: ulimit -l unlimited; " } else { "" };
    let fix = format!(
        "{now}for users: a line '* - memlock unlimited' in /etc/security/limits.d/90-zlaunch.conf, then log in again; \
         containers: --ulimit memlock=-1; services: LimitMEMLOCK=infinity; Slurm: PropagateResourceLimitsExcept=MEMLOCK"
    );
    Finding::new(
        Level::Problem,
        Group::Limits,
        WHAT,
        format!("{}: host buffers cannot be pinned, copies take about twice as long", bytes(most)),
    )
    .expected("unlimited")
    .fix(fix)
}

/// Bytes of a tmpfs as its mount says, such as `size=65536k`.
fn mounted_bytes(mounts: &str, at: &str) -> Option<u64> {
    // The last mount covers earlier ones.
    let options =
        mounts.lines().rev().map(|l| l.split_whitespace().collect::<Vec<_>>()).find(|w| w.get(1) == Some(&at))?.get(3).copied()?;
    let text = options.split(',').find_map(|o| o.strip_prefix("size="))?;
    let unit = match text.bytes().last()? {
        b'k' => 1 << 10,
        b'm' => 1 << 20,
        b'g' => 1 << 30,
        _ => 1,
    };
    text.trim_end_matches(['k', 'm', 'g']).parse::<u64>().ok().map(|n| n * unit)
}

fn shared_memory(tree: &Tree) -> Finding {
    const WHAT: &str = "shared memory (/dev/shm)";
    const FIX: &str = "sudo mount -o remount,size=16G /dev/shm; containers: --shm-size=16g or --ipc=host; Kubernetes: an emptyDir with medium Memory at /dev/shm";
    let space = tree.space("/dev/shm");
    let mounted = tree.read("/proc/mounts").ok().and_then(|text| mounted_bytes(&text, "/dev/shm"));
    let (total, free) = match (mounted, space) {
        (Some(total), Ok((seen, free))) if seen == total => (total, free),
        // A made-up tree has a mount's text only.
        (Some(total), _) => (total, total),
        (None, Ok(found)) => found,
        (None, Err(why)) => return Finding::unread(Group::Limits, WHAT, &why),
    };
    let found = format!("{}, {} in use", bytes(total), bytes(total - free.min(total)));
    let expected = "1 GiB free at least: NCCL and RCCL keep buffers of about 10 MB for each pair of ranks there, other programs more";
    // What container engines give unasked is 64 MiB.
    let level = match free {
        0..=0x400_0000 => Level::Problem,
        n if n < GIB => Level::Warning,
        _ => return Finding::ok(Group::Limits, WHAT, found),
    };
    Finding::new(level, Group::Limits, WHAT, found).expected(expected).fix(FIX)
}

/// The least limit of the control groups that this process is in, of either version.
fn container_bytes(tree: &Tree) -> Option<u64> {
    let own = tree.read("/proc/self/cgroup").unwrap_or_default();
    let mut files = Vec::new();
    for entry in own.lines() {
        let (base, path, name) = match entry.splitn(3, ':').collect::<Vec<_>>()[..] {
            [_, "", path] => ("/sys/fs/cgroup", path, "memory.max"),
            [_, kinds, path] if kinds.split(',').any(|k| k == "memory") => ("/sys/fs/cgroup/memory", path, "memory.limit_in_bytes"),
            _ => continue,
        };
        // Every group above limits too; what lies above a namespace's root is not to be seen.
        let mut at = path.trim_end_matches('/');
        loop {
            files.push(format!("{base}{at}/{name}"));
            let Some((above, _)) = at.rsplit_once('/') else { break };
            at = above;
        }
    }
    files.iter().filter_map(|f| tree.value::<u64>(f)).min()
}

fn memory(tree: &Tree) -> Finding {
    const WHAT: &str = "host memory";
    let text = match tree.read("/proc/meminfo") {
        Ok(text) => text,
        Err(why) => return Finding::unread(Group::Limits, WHAT, &why),
    };
    let total = kib(&text, "MemTotal").unwrap_or(0);
    let mut found = format!("{}, {} available", bytes(total), bytes(kib(&text, "MemAvailable").unwrap_or(0)));
    if let (Some(swap), Some(left)) = (kib(&text, "SwapTotal"), kib(&text, "SwapFree"))
        && swap > left
    {
        found += &format!(", {} swapped out", bytes(swap - left));
    }
    // Without a limit the first version gives a number near 2^63.
    match container_bytes(tree).filter(|most| *most < total) {
        Some(most) => Finding::new(Level::Note, Group::Limits, WHAT, format!("{found}; this container may use {}", bytes(most)))
            .expected("the whole, if parameters or optimizer state are to live on the host")
            .fix("containers: --memory=0 (no limit); Kubernetes: resources.limits.memory; Slurm: --mem=0"),
        None => Finding::ok(Group::Limits, WHAT, found),
    }
}

fn count(tree: &Tree, what: &str, name: &str, least: u64, why: &str, fix: &str) -> Finding {
    match limit(tree, name) {
        Ok((None, _)) => Finding::ok(Group::Limits, what, "unlimited"),
        Ok((Some(n), _)) if n >= least => Finding::ok(Group::Limits, what, n.to_string()),
        Ok((Some(n), _)) => {
            Finding::new(Level::Warning, Group::Limits, what, n.to_string()).expected(format!("{least} at least: {why}")).fix(fix)
        }
        Err(e) => Finding::unread(Group::Limits, what, &e),
    }
}

fn files(tree: &Tree) -> Finding {
    let fix = "ulimit -n 65536; for users: a line '* - nofile 65536' in /etc/security/limits.d/90-zlaunch.conf; containers: --ulimit nofile=65536";
    count(tree, "open files (ulimit -n)", "Max open files", 4096, "weights in many files, sockets and pipes of ranks", fix)
}

fn processes(tree: &Tree) -> Finding {
    let fix = "ulimit -u 65536; for users: a line '* - nproc 65536' in /etc/security/limits.d/90-zlaunch.conf; containers: --pids-limit=-1";
    count(tree, "processes (ulimit -u)", "Max processes", 4096, "each rank has a thread for every core", fix)
}

/// Who this process is, as `/proc/self/status` says.
struct Identity {
    user: u32,
    groups: Vec<u32>,
}

impl Identity {
    fn of(tree: &Tree) -> Option<Identity> {
        let text = tree.read("/proc/self/status").ok()?;
        // Real, effective, saved, file system.
        let second = |key: &str| line(&text, key)?.split_whitespace().nth(1)?.parse::<u32>().ok();
        let mut groups: Vec<u32> = line(&text, "Groups").unwrap_or_default().split_whitespace().filter_map(|g| g.parse().ok()).collect();
        groups.extend(second("Gid"));
        Some(Identity { user: second("Uid")?, groups })
    }

    fn may_use(&self, file: Owner) -> bool {
        const READ_WRITE: u32 = 0o6;
        let bits = match () {
            () if self.user == 0 => return true,
            () if self.user == file.user => file.mode >> 6,
            () if self.groups.contains(&file.group) => file.mode >> 3,
            () => file.mode,
        };
        bits & READ_WRITE == READ_WRITE
    }
}

/// Whether this process may use the device files of AMD's or NVIDIA's driver.
pub fn device_files(tree: &Tree, amd: bool, nvidia: bool) -> Vec<Finding> {
    let nodes = tree.names("/dev/dri").unwrap_or_default();
    let render = nodes.iter().find(|n| n.starts_with("renderD")).map_or_else(|| "renderD128".into(), String::clone);
    let mut found = Vec::new();
    if amd {
        let container = "in a container: start it with --device=/dev/kfd --device=/dev/dri";
        found.extend(["/dev/kfd".to_string(), format!("/dev/dri/{render}")].map(|file| device_file(tree, &file, container)));
    }
    if nvidia {
        let container = "sudo nvidia-modprobe -u -c 0; in a container: start it with --gpus all";
        found.extend(["/dev/nvidiactl", "/dev/nvidia-uvm"].map(|file| device_file(tree, file, container)));
    }
    found
}

fn device_file(tree: &Tree, file: &str, create: &str) -> Finding {
    let bad =
        |found: &str, fix: String| Finding::new(Level::Problem, Group::Devices, file, found).expected("may be read and written").fix(fix);
    let owner = match tree.owner(file) {
        Ok(owner) => owner,
        Err(Unread::Missing(_)) => return bad("missing", create.into()),
        Err(why) => return Finding::unread(Group::Devices, file, &why),
    };
    let Some(own) = Identity::of(tree) else {
        return Finding::new(Level::Note, Group::Devices, file, "there; who this process is could not be read");
    };
    if own.may_use(owner) {
        return Finding::ok(Group::Devices, file, "may be used");
    }
    let groups = tree.read("/etc/group").unwrap_or_default();
    let name = groups.lines().find_map(|l| {
        let fields: Vec<&str> = l.split(':').collect();
        (fields.get(2)?.parse::<u32>().ok()? == owner.group).then(|| fields[0].to_string())
    });
    let group = name.unwrap_or_else(|| owner.group.to_string());
    let fix = format!("sudo usermod -aG {group} $USER, then log in again; in a container: --group-add {}", owner.group);
    bad(&format!("belongs to group {group}, which this user is not in"), fix)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_mounts() {
        let mounts = "tmpfs /dev/shm tmpfs rw,size=12k 0 0\nshm /dev/shm tmpfs rw,nosuid,size=65536k,inode64 0 0\ntmpfs /run tmpfs rw 0 0";
        assert_eq!(mounted_bytes(mounts, "/dev/shm"), Some(64 << 20));
        assert_eq!(mounted_bytes(mounts, "/run"), None);
    }

    #[test]
    fn who_may_use_a_file() {
        let me = Identity { user: 1000, groups: vec![1000, 44] };
        let may = |user, group, mode| me.may_use(Owner { user, group, mode });
        assert!(may(0, 44, 0o660) && may(0, 0, 0o666) && may(1000, 0, 0o600));
        assert!(!may(0, 109, 0o660) && !may(0, 44, 0o640) && !may(0, 0, 0o600));
        assert!(Identity { user: 0, groups: vec![] }.may_use(Owner { user: 5, group: 5, mode: 0 }));
    }
}
