//! Which cores does a rank compute on? Where the ranks of a host use all its cores, each is bound to its own, so that no two
//! compute threads share a core while another idles, and memory is first touched where it is used. Elsewhere (fewer threads than
//! cores, more ranks than cores, a quota instead of a set) nothing is bound: another job may be on the same host, and only the
//! kernel knows.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The cores of rank `local_rank` of `local_ranks`, with `threads` threads each; `None` where they don't use all `allowed` cores.
pub fn own_cores(allowed: &[usize], local_rank: usize, local_ranks: usize, threads: usize) -> Option<&[usize]> {
    if local_ranks < 2 || local_rank >= local_ranks || local_ranks.checked_mul(threads)? != allowed.len() {
        return None;
    }
    allowed.get(local_rank * threads..(local_rank + 1) * threads)
}

/// Binds the calling thread, and all threads that it starts, to the rank's own cores, where it has some; returns them.
/// A system that forbids it costs speed, not correctness: nothing is bound then.
pub fn bind(local_rank: usize, local_ranks: usize, threads: usize) -> Option<Vec<usize>> {
    let set = sched_getaffinity(None).ok()?;
    let allowed: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect();
    let own = own_cores(&allowed, local_rank, local_ranks, threads)?;
    let mut set = CpuSet::new();
    own.iter().for_each(|&core| set.set(core));
    sched_setaffinity(None, &set).ok()?;
    Some(own.to_vec())
}

#[cfg(test)]
mod tests {
    use super::own_cores;
    use proptest::prelude::*;

    #[test]
    fn ranks_that_use_less_or_more_than_the_host_are_left_to_the_kernel() {
        let allowed = [0, 1, 4, 5];
        assert_eq!(own_cores(&allowed, 1, 2, 2), Some(&allowed[2..]));
        for (rank, ranks, threads) in [(0, 1, 4), (0, 2, 1), (0, 8, 1), (2, 2, 2), (0, 0, 4), (0, usize::MAX, usize::MAX)] {
            assert_eq!(own_cores(&allowed, rank, ranks, threads), None, "{rank} of {ranks} with {threads}");
        }
    }

    proptest! {
        #[test]
        fn cores_are_shared_out_once(ranks in 2usize..9, threads in 1usize..9, first in 0usize..5) {
            let allowed: Vec<usize> = (0..ranks * threads).map(|i| first + 2 * i).collect();
            let all: Vec<usize> = (0..ranks).flat_map(|r| own_cores(&allowed, r, ranks, threads).unwrap().to_vec()).collect();
            prop_assert_eq!(all, allowed);
        }
    }
}
