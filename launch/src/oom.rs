//! Did the kernel kill for want of memory? Its counters of such kills, before the ranks start and after one was killed.
//!
//! A rank that the kernel kills cannot say so itself: all it leaves is signal 9. Counters say nothing about which process it was,
//! so the result is a hint.

use std::path::PathBuf;

/// Counters at one moment, by the file they were read from.
pub struct Counters(Vec<(PathBuf, u64)>);

impl Counters {
    /// Reads what there is.
    pub fn read() -> Counters {
        let mut files = vec![PathBuf::from("/proc/vmstat"), PathBuf::from("/sys/fs/cgroup/memory.events")];
        let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        for line in own.lines() {
            match line.splitn(3, ':').collect::<Vec<_>>()[..] {
                [_, "", path] => files.push(format!("/sys/fs/cgroup{path}/memory.events").into()),
                [_, kinds, path] if kinds.split(',').any(|k| k == "memory") => {
                    files.push(format!("/sys/fs/cgroup/memory{path}/memory.oom_control").into())
                }
                _ => {}
            }
        }
        Counters(files.into_iter().filter_map(|f| Some((f.clone(), kills(&std::fs::read_to_string(&f).ok()?)?))).collect())
    }

    /// A sentence when a counter has grown since `self`.
    pub fn hint(&self) -> Option<String> {
        let now = Counters::read();
        let grown = self.0.iter().any(|(file, before)| now.0.iter().any(|(f, after)| f == file && after > before));
        grown.then(|| {
            "the kernel killed a process for want of memory meanwhile: probably this one; lower training.micro_batch_size or seq_len, \
             raise zero.stage, or give the job more memory"
                .to_owned()
        })
    }
}

fn kills(text: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix("oom_kill ")).and_then(|n| n.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_counter_is_found_among_others() {
        assert_eq!(super::kills("oom 3\noom_kill 2\noom_group_kill 1\n"), Some(2));
        assert_eq!(super::kills("low 0\n"), None);
    }
}
