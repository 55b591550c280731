//! How are bytes stored: through the caches, or around them?
//!
//! A line that another core has read is expensive to store to: the core must first take it away from the other, 0.3 us between cores that are
//! far apart. The C library's copy of a long block is the processor's own copying, which takes many lines at once: 512 KiB into slots that the
//! other rank has read and out of its slots take 31 us in blocks of 64 KiB (29 in 128), 50 us in blocks of 4 KiB and 89 us with vector moves. So pieces
//! are copied in one go. A store around the caches ("non-temporal") asks nobody, but then the other core reads from memory (32 us, and 47
//! where cores are near): only a result that is larger than the caches is streamed, since it would be read from memory to be overwritten.
#![allow(unsafe_code)]

/// How the destination is stored.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Store {
    /// As usual.
    Cached,
    /// Around the caches, where the processor can. [`publish_streamed`] must come before others are told.
    Streamed,
}

/// Copies.
///
/// # Safety
/// `bytes` bytes must be valid at both addresses, disjoint, and not written by others meanwhile.
pub(super) unsafe fn copy(dst: *mut u8, src: *const u8, bytes: usize, store: Store) {
    #[cfg(target_arch = "x86_64")]
    if store == Store::Streamed && is_x86_feature_detected!("avx2") {
        // SAFETY: passed on; the processor has AVX2.
        return unsafe { stream_avx2(dst, src, bytes) };
    }
    let _ = store;
    // SAFETY: passed on.
    unsafe { std::ptr::copy_nonoverlapping(src, dst, bytes) }
}

/// Orders streamed stores before what is stored later.
pub(super) fn publish_streamed() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has SSE.
    unsafe {
        std::arch::x86_64::_mm_sfence()
    }
}

/// # Safety
/// As of [`copy`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn stream_avx2(dst: *mut u8, src: *const u8, bytes: usize) {
    use std::arch::x86_64::{__m256i, _mm256_loadu_si256, _mm256_stream_si256};
    // Whole lines only: a part of a line that is streamed must be merged in memory.
    let head = dst.align_offset(64).min(bytes);
    let lines = (bytes - head) / 64;
    // SAFETY: head + 64 x lines <= bytes; the stores are to multiples of 64.
    unsafe {
        std::ptr::copy_nonoverlapping(src, dst, head);
        let (mut to, mut from) = (dst.add(head), src.add(head));
        for _ in 0..lines {
            let low = _mm256_loadu_si256(from.cast::<__m256i>());
            let high = _mm256_loadu_si256(from.add(32).cast::<__m256i>());
            _mm256_stream_si256(to.cast::<__m256i>(), low);
            _mm256_stream_si256(to.add(32).cast::<__m256i>(), high);
            (to, from) = (to.add(64), from.add(64));
        }
        std::ptr::copy_nonoverlapping(from, to, bytes - head - 64 * lines);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_alignment_and_length() {
        let from: Vec<u8> = (0..400).map(|i| (i % 251) as u8).collect();
        for (start, shift, bytes) in
            (0..70).flat_map(|s| [0, 1, 31].map(|t| (s, t))).flat_map(|(s, t)| [0, 1, 63, 64, 65, 200].map(|b| (s, t, b)))
        {
            let mut to = vec![255u8; 400];
            // SAFETY: both ends are within the vectors.
            unsafe { copy(to.as_mut_ptr().add(start), from.as_ptr().add(shift), bytes, Store::Streamed) };
            publish_streamed();
            assert_eq!(to[start..start + bytes], from[shift..shift + bytes]);
            assert!(to[..start].iter().chain(&to[start + bytes..]).all(|b| *b == 255), "{start} {shift} {bytes}");
        }
    }
}
