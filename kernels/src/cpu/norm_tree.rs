//! How can a gradient norm have the same bits however a segment was sharded? Squares are summed along one binary tree whose
//! leaves are chunks of 1024 elements of the whole segment. A rank sends the maximal aligned nodes of its chunk range (two per
//! level at most), and merging the nodes of all ranks continues the very tree. Missing leaves count as zeros, which change no
//! bit of a sum, so the padding at a segment's end does not matter either. Within a chunk the sum is pairwise too: over 2^30
//! elements a value passes at most 31 roundings, so the norm is off by less than 31 * 2^-24 / 2 = 9.3e-7 at the very worst.
#![allow(unsafe_code)]

use super::operand::Raw;
use super::pool::Pool;
use super::simd::simd_fn;
use crate::ops::{SUM_SQUARES_CHUNK as CHUNK, SUM_SQUARES_NODES as NODES};
use crate::{Error, Result};

/// Levels of the tree: a chunk index stays below `2^(LEVELS - 1)`, so the top level has one node.
const LEVELS: usize = NODES / 2;

/// Added to the norm before dividing by it, as `torch.nn.utils.clip_grad_norm_` does.
const CLIP_EPS: f32 = 1e-6;

/// Chunks of `elems` elements; the last may be short.
pub fn chunks(elems: usize) -> usize {
    elems.div_ceil(CHUNK)
}

simd_fn! {
    /// For each chunk of `x`, its sum of squares as a balanced tree over 1024 slots, the missing ones zero.
    fn chunk_sums[S](s: S, sums: &mut [f32], x: &[f32]) {
        const QUARTER: usize = CHUNK / 4;
        for (sum, x) in sums.iter_mut().zip(x.chunks(CHUNK)) {
            let mut tree = [0f32; 2 * QUARTER];
            if x.len() == CHUNK {
                // The two widest levels at once: as many lanes at four places are one vector of the third.
                let mut i = 0;
                while i < QUARTER {
                    let (a, c) = (s.load_slice(&x[i..]), s.load_slice(&x[2 * QUARTER + i..]));
                    let (b, d) = (s.load_slice(&x[QUARTER + i..]), s.load_slice(&x[3 * QUARTER + i..]));
                    let low = s.add(s.mul(a, a), s.mul(c, c));
                    let high = s.add(s.mul(b, b), s.mul(d, d));
                    s.store_slice(&mut tree[i..], s.add(low, high));
                    i += S::LANES;
                }
            } else {
                let (low, high) = x.split_at(x.len().min(2 * QUARTER));
                for (t, x) in tree.iter_mut().zip(low) {
                    *t = x * x;
                }
                for (t, x) in tree.iter_mut().zip(high) {
                    *t += x * x;
                }
                let (a, b) = tree.split_at_mut(QUARTER);
                for (a, b) in a.iter_mut().zip(b) {
                    *a += *b;
                }
            }
            let mut half = QUARTER / 2;
            while half > 0 {
                let (a, b) = tree.split_at_mut(half);
                for (a, b) in a.iter_mut().zip(b) {
                    *a += *b;
                }
                half /= 2;
            }
            *sum = tree[0];
        }
    }
}

/// [`crate::Ops::sum_squares`]: `nodes [96]`, `x` from chunk `first` of its segment on, `work [chunks(x.len())]`.
pub fn sum_squares(pool: &Pool, nodes: &mut [f32], x: &[f32], first: usize, work: &mut [f32]) {
    // Chunks per work item: 256 KiB of input, enough to hide the cost of handing out the item.
    const GRAIN: usize = 64;
    let n = chunks(x.len());
    let sums = &mut work[..n];
    let shared = Raw::new(sums);
    pool.for_each(n.div_ceil(GRAIN), |item| {
        let start = item * GRAIN;
        // SAFETY: items cover disjoint ranges of chunks.
        let out = unsafe { shared.slice(start, GRAIN.min(n - start)) };
        chunk_sums(pool.isa(), out, &x[start * CHUNK..x.len().min((start + GRAIN) * CHUNK)]);
    });

    nodes.fill(0.0);
    // At each level the range sheds its odd ends, which are the maximal nodes, and the rest pairs up in place.
    let (mut lo, mut hi) = (first, first + n);
    for level in 0..LEVELS {
        if lo >= hi {
            break;
        }
        let mut start = 0;
        if lo % 2 == 1 {
            nodes[2 * level] = sums[0];
            (start, lo) = (1, lo + 1);
        }
        if hi % 2 == 1 {
            hi -= 1;
            nodes[2 * level + 1] = sums[start + hi - lo];
        }
        for i in 0..(hi - lo) / 2 {
            sums[i] = sums[start + 2 * i] + sums[start + 2 * i + 1];
        }
        (lo, hi) = (lo / 2, hi / 2);
    }
}

/// [`crate::Ops::clip_scale`]: `nodes [ranks, segments, 96]`, `ranges [ranks, segments]` of (first chunk, chunks) that passed
/// [`check_disjoint`]; returns (norm, scale).
pub fn clip_scale(nodes: &[f32], ranges: &[(u64, u64)], ranks: usize, segments: usize, max_norm: Option<f32>) -> (f32, f32) {
    let total = (0..segments).fold(0f32, |sum, segment| sum + segment_sum(nodes, ranges, ranks, segments, segment));
    let norm = total.sqrt();
    let scale = match max_norm {
        _ if !norm.is_finite() => f32::NAN,
        Some(max) => (max / (norm + CLIP_EPS)).min(1.0),
        None => 1.0,
    };
    (norm, scale)
}

/// The root over the nodes of all ranks for one segment.
fn segment_sum(nodes: &[f32], ranges: &[(u64, u64)], ranks: usize, segments: usize, segment: usize) -> f32 {
    let mut ends: Vec<(u64, u64)> = (0..ranks).map(|r| ranges[r * segments + segment]).map(|(first, n)| (first, first + n)).collect();
    // (index within the level, value), by index; siblings are 2i and 2i + 1.
    let mut alive: Vec<(u64, f32)> = Vec::new();
    for level in 0..LEVELS {
        for (rank, (lo, hi)) in ends.iter_mut().enumerate() {
            let slots = &nodes[(rank * segments + segment) * NODES..][..NODES];
            if *lo < *hi {
                if *lo % 2 == 1 {
                    alive.push((*lo, slots[2 * level]));
                    *lo += 1;
                }
                if *hi % 2 == 1 {
                    *hi -= 1;
                    alive.push((*hi, slots[2 * level + 1]));
                }
            }
            (*lo, *hi) = (*lo / 2, *hi / 2);
        }
        alive.sort_by_key(|node| node.0);
        let mut parents: Vec<(u64, f32)> = Vec::with_capacity(alive.len());
        for &(index, value) in &alive {
            match parents.last_mut() {
                Some(parent) if parent.0 == index / 2 => parent.1 += value,
                _ => parents.push((index / 2, value)),
            }
        }
        alive = parents;
    }
    // Chunk indices are below 2^(LEVELS - 1), so one node is left, or none of an empty segment.
    alive.first().map_or(0.0, |node| node.1)
}

/// Fails when two ranks claim the same chunk of a segment: its squares would be counted twice.
pub fn check_disjoint(ranges: &[(u64, u64)], ranks: usize, segments: usize) -> Result<()> {
    for segment in 0..segments {
        let mut sorted: Vec<(u64, u64, usize)> = (0..ranks)
            .map(|rank| (ranges[rank * segments + segment], rank))
            .filter_map(|((first, n), rank)| (n > 0).then_some((first, n, rank)))
            .collect();
        sorted.sort_unstable();
        for pair in sorted.windows(2) {
            let ((first, n, rank), (next, _, other)) = (pair[0], pair[1]);
            if first + n > next {
                let what = format!(
                    "segment {segment}: rank {rank} has chunks {first}..{}, rank {other} starts at {next}; give a chunk to one rank only",
                    first + n
                );
                return Err(Error::Shape { op: "clip_scale", what });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pool() -> std::sync::Arc<Pool> {
        Pool::new(2).unwrap()
    }

    fn nodes_of(x: &[f32], first: usize) -> Vec<f32> {
        let mut nodes = vec![f32::NAN; NODES];
        sum_squares(&pool(), &mut nodes, x, first, &mut vec![f32::NAN; chunks(x.len())]);
        nodes
    }

    /// Values over a wide range of magnitudes, so that another order of additions would show.
    fn values(n: usize, seed: u32) -> Vec<f32> {
        (0..n as u32)
            .map(|i| {
                let w = crate::philox::philox4x32([i, 0, 0, 0], [seed, 0]);
                (crate::philox::unit_f32(w[0]) - 0.5) * 2f32.powi((w[1] % 9) as i32 - 4)
            })
            .collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn any_split_and_any_padding_give_the_same_bits(
            elems in 1usize..40_000, ranks in 1usize..=5, pad in 0usize..9000, cuts in prop::collection::vec(0usize..1000, 4), seed: u32,
        ) {
            let x = values(elems, seed);
            let (norm, scale) = clip_scale(&nodes_of(&x, 0), &[(0, chunks(elems) as u64)], 1, 1, Some(0.5));
            let exact = x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
            // The documented bound of the tree.
            prop_assert!((f64::from(norm) / exact - 1.0).abs() <= 1e-6);

            let mut padded = x;
            padded.resize(elems + pad, 0.0);
            let n = chunks(padded.len());
            let mut bounds: Vec<usize> = cuts[..ranks - 1].iter().map(|c| c * n / 999).map(|c| c.min(n)).collect();
            bounds.extend([0, n]);
            bounds.sort_unstable();
            // A second segment that is empty everywhere adds nothing.
            let (mut nodes, mut ranges) = (Vec::new(), Vec::new());
            for pair in bounds.windows(2) {
                let (a, b) = (pair[0] * CHUNK, (pair[1] * CHUNK).min(padded.len()));
                nodes.extend(nodes_of(&padded[a.min(b)..b], pair[0]));
                nodes.extend([0.0; NODES]);
                ranges.extend([(pair[0] as u64, (pair[1] - pair[0]) as u64), (0, 0)]);
            }
            let split = clip_scale(&nodes, &ranges, ranks, 2, Some(0.5));
            prop_assert_eq!((norm.to_bits(), scale.to_bits()), (split.0.to_bits(), split.1.to_bits()));
        }
    }

    /// The tree of the contract, written as its recursion.
    fn sum_of(x: &[f32]) -> f32 {
        if let [one] = x {
            return one * one;
        }
        let n = x.len();
        // Halves are added slot by slot, so the leaves of one subtree are every second element.
        let part = |odd: usize| -> Vec<f32> { (odd..n).step_by(2).map(|i| x[i]).collect() };
        sum_of(&part(0)) + sum_of(&part(1))
    }

    #[test]
    fn every_instruction_set_follows_the_tree() {
        let x = values(70 * CHUNK + 300, 5);
        let mut last = x[70 * CHUNK..].to_vec();
        last.resize(CHUNK, 0.0);
        let mut want: Vec<f32> = x[..70 * CHUNK].chunks(CHUNK).map(sum_of).collect();
        want.push(sum_of(&last));
        for got in super::super::reference::on_every_pool(|pool| {
            let mut sums = vec![f32::NAN; 71];
            chunk_sums(pool.isa(), &mut sums, &x);
            vec![sums]
        }) {
            assert_eq!(got[0], want);
        }
    }

    #[test]
    fn a_norm_that_is_not_finite_has_no_scale() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e30] {
            let mut x = vec![1f32; 5000];
            x[4097] = bad;
            for max_norm in [None, Some(1.0)] {
                let (norm, scale) = clip_scale(&nodes_of(&x, 0), &[(0, 5)], 1, 1, max_norm);
                assert!(!norm.is_finite() && scale.is_nan(), "{bad}");
            }
        }
    }

    #[test]
    fn the_factor_is_that_of_torch() {
        let nodes = nodes_of(&[3.0, 4.0], 0);
        assert_eq!(clip_scale(&nodes, &[(0, 1)], 1, 1, None), (5.0, 1.0));
        assert_eq!(clip_scale(&nodes, &[(0, 1)], 1, 1, Some(6.0)), (5.0, 1.0));
        assert_eq!(clip_scale(&nodes, &[(0, 1)], 1, 1, Some(1.0)), (5.0, 1.0 / (5.0 + 1e-6)));
    }

    #[test]
    fn overlapping_ranges_are_refused() {
        assert!(check_disjoint(&[(0, 2), (7, 1), (2, 2), (0, 0)], 2, 2).is_ok());
        assert!(check_disjoint(&[(0, 2), (1, 2)], 2, 1).unwrap_err().to_string().contains("rank 1 starts at 1"));
    }
}
