//! What does each collective move in a step? Every function here maps a collective onto fill and take of staging slots.
//!
//! A slot holds either one piece of a rank's data (all_gather, broadcast, short all_reduce) or one piece for every rank
//! (reduce_scatter, all_to_all, long all_reduce). The operands are the rank's own memory, the slots are shared.
#![allow(unsafe_code)]

use super::steps::Pass;
use crate::Result;
use crate::operands::Op;
use crate::tree::{self, Leaf};
use half::bf16;
use zrt_kernels::DType;

/// The operands' addresses, in this rank's memory. For calls in place both are the same.
#[derive(Clone, Copy)]
pub(super) struct Operands {
    pub dst: *mut u8,
    pub src: *const u8,
}

/// An all_reduce of at most this many bytes is summed whole by every rank: one meeting instead of two.
const WHOLE_BYTES: usize = 16 << 10;

/// Copies within checked bounds.
///
/// # Safety
/// `bytes` bytes must be valid at both addresses, disjoint, and not written by others meanwhile.
unsafe fn copy(dst: *mut u8, src: *const u8, bytes: usize) {
    // SAFETY: by the contract above.
    unsafe { std::ptr::copy_nonoverlapping(src, dst, bytes) }
}

impl Pass<'_> {
    /// Runs the collective on operands of the lengths that the call says.
    ///
    /// # Safety
    /// The operands must be valid for those lengths and, until this returns, used by nobody else.
    pub unsafe fn perform(&self, operands: Operands) -> Result<()> {
        match self.call.op {
            Op::AllGather => self.all_gather(operands),
            Op::ReduceScatter => self.reduce_scatter(operands),
            Op::AllReduce if self.ranks() <= 2 || self.call.bytes() <= WHOLE_BYTES => self.all_reduce_whole(operands),
            Op::AllReduce => self.all_reduce_parts(operands),
            Op::AllToAll => self.all_to_all(operands),
            Op::Broadcast => self.broadcast(operands),
            Op::Barrier | Op::SharePages => self.run(0, &|_| {}, &|_| {}),
        }
    }

    fn ranks(&self) -> usize {
        self.seat.shared().ranks
    }

    /// (bytes per piece, pieces) to move `bytes` with `per_slot` pieces in a slot. Pieces end at cache lines, so that
    /// elements are never cut and slices of a slot are aligned.
    fn pieces(&self, bytes: usize, per_slot: usize) -> (usize, usize) {
        let piece = (self.seat.shared().segment_bytes / per_slot) & !63;
        (piece, bytes.div_ceil(piece))
    }

    fn all_gather(&self, at: Operands) -> Result<()> {
        let (rank, ranks) = (self.seat.rank, self.ranks());
        let part = self.call.bytes() / ranks;
        let (piece, steps) = self.pieces(part, 1);
        let length = |k: usize| piece.min(part - k * piece);
        // SAFETY (both closures): piece k lies within a part of `part` bytes and within a slot; the step protocol gives the
        // slot to this rank in `fill` and to its readers in `take`.
        self.run(steps, &|k| unsafe { copy(self.slot(rank, k), at.src.add(k * piece), length(k)) }, &|k| {
            for peer in (0..ranks).filter(|p| *p != rank) {
                unsafe { copy(at.dst.add(peer * part + k * piece), self.slot(peer, k), length(k)) }
            }
        })?;
        // SAFETY: the own part of dst has `part` bytes; it is src itself, or apart from it.
        unsafe {
            let own = at.dst.add(rank * part);
            if own.cast_const() != at.src {
                copy(own, at.src, part);
            }
        }
        Ok(())
    }

    fn reduce_scatter(&self, at: Operands) -> Result<()> {
        let (rank, ranks) = (self.seat.rank, self.ranks());
        let part = self.call.bytes() / ranks;
        let (piece, steps) = self.pieces(part, ranks);
        let length = |k: usize| piece.min(part - k * piece);
        self.run(
            steps,
            &|k| {
                for to in 0..ranks {
                    // SAFETY: piece k of part `to` of src; sub-slot `to` of the own slot, which is ours in `fill`.
                    unsafe { copy(self.slot(rank, k).add(to * piece), at.src.add(to * part + k * piece), length(k)) }
                }
            },
            // SAFETY: sub-slot `rank` of every rank is filled; piece k of dst is ours, and the slots never overlap it.
            &|k| unsafe { self.sum(at.dst.add(k * piece), k, rank * piece, length(k)) },
        )
    }

    /// Sums the bytes `[offset, offset + bytes)` of all ranks' slots of step `k` into `dst`, in the tree's order.
    ///
    /// # Safety
    /// The slots must be filled, and `dst` valid for `bytes` bytes and apart from them.
    unsafe fn sum(&self, dst: *mut u8, k: usize, offset: usize, bytes: usize) {
        // SAFETY (all arms): passed on; the element type is the call's.
        match self.call.dtype {
            DType::F32 => unsafe { self.sum_as::<f32>(dst, k, offset, bytes) },
            DType::BF16 => unsafe { self.sum_as::<bf16>(dst, k, offset, bytes) },
            DType::I32 => unsafe { self.sum_as::<i32>(dst, k, offset, bytes) },
            DType::U8 => {}
        }
    }

    /// # Safety
    /// As [`Pass::sum`].
    unsafe fn sum_as<E: Leaf>(&self, dst: *mut u8, k: usize, offset: usize, bytes: usize) {
        let elems = bytes / size_of::<E>();
        // SAFETY: slots and offsets are multiples of a cache line, so aligned; operands are aligned by their view.
        let leaf = |rank: usize| unsafe { std::slice::from_raw_parts(self.slot(rank, k).add(offset) as *const E, elems) };
        let mut leaves = [&[][..]; tree::MAX_RANKS];
        let leaves = &mut leaves[..self.ranks()];
        for (rank, slice) in leaves.iter_mut().enumerate() {
            *slice = leaf(rank);
        }
        // SAFETY: dst is valid for these elements and nobody else uses it, by the contract of `perform`.
        tree::sum(unsafe { std::slice::from_raw_parts_mut(dst as *mut E, elems) }, leaves);
    }

    fn all_reduce_whole(&self, at: Operands) -> Result<()> {
        let bytes = self.call.bytes();
        let (piece, steps) = self.pieces(bytes, 1);
        let length = |k: usize| piece.min(bytes - k * piece);
        self.run(
            steps,
            // SAFETY: piece k of the data, and the own slot, which is ours in `fill`. Sums of piece k are written after it was copied.
            &|k| unsafe { copy(self.slot(self.seat.rank, k), at.src.add(k * piece), length(k)) },
            // SAFETY: the slots are filled; piece k of the data is ours.
            &|k| unsafe { self.sum(at.dst.add(k * piece), k, 0, length(k)) },
        )
    }

    /// Each rank sums its share of every segment, then all collect the shares. Segment m is filled at step `2m - 1` (0 for the first) and
    /// its sums are filled at step `2m + 2`, after the sums were taken at step `2m - 1` and before step `2m + 3` is taken:
    /// filling runs one step ahead.
    fn all_reduce_parts(&self, at: Operands) -> Result<()> {
        let (rank, ranks) = (self.seat.rank, self.ranks());
        let bytes = self.call.bytes();
        let (segment, segments) = self.pieces(bytes, 1);
        let length = |m: usize| segment.min(bytes - m * segment);
        // A segment's shares end at cache lines; the last ones of a short segment may be empty.
        let share = |m: usize, r: usize| {
            let each = length(m).div_ceil(ranks).next_multiple_of(64);
            let start = (r * each).min(length(m));
            (start, (start + each).min(length(m)) - start)
        };
        enum Step {
            Data(usize),
            Sums(usize),
            Idle,
        }
        let kind = |k: usize| match k {
            0 => Step::Data(0),
            k if k % 2 == 0 => Step::Sums(k / 2 - 1),
            k if k.div_ceil(2) < segments => Step::Data(k.div_ceil(2)),
            _ => Step::Idle,
        };
        let steps = if segments == 0 { 0 } else { 2 * segments + 1 };
        self.run(
            steps,
            &|k| match kind(k) {
                // SAFETY: segment m of the data; the own slot is ours in `fill`.
                Step::Data(m) => unsafe { copy(self.slot(rank, k), at.src.add(m * segment), length(m)) },
                Step::Sums(m) => {
                    let (start, bytes) = share(m, rank);
                    // SAFETY: the own share of segment m, summed at an earlier step; the own slot is ours in `fill`.
                    unsafe { copy(self.slot(rank, k), at.dst.add(m * segment + start), bytes) }
                }
                Step::Idle => {}
            },
            &|k| match kind(k) {
                Step::Data(m) => {
                    let (start, bytes) = share(m, rank);
                    // SAFETY: the slots are filled; the own share of segment m was copied to the slot before, so it may be overwritten.
                    unsafe { self.sum(at.dst.add(m * segment + start), k, start, bytes) }
                }
                Step::Sums(m) => {
                    for peer in (0..ranks).filter(|p| *p != rank) {
                        let (start, bytes) = share(m, peer);
                        // SAFETY: the peer's share of segment m; its slot is filled.
                        unsafe { copy(at.dst.add(m * segment + start), self.slot(peer, k), bytes) }
                    }
                }
                Step::Idle => {}
            },
        )
    }

    fn all_to_all(&self, at: Operands) -> Result<()> {
        let (rank, ranks) = (self.seat.rank, self.ranks());
        let part = self.call.bytes() / ranks;
        let (piece, steps) = self.pieces(part, ranks);
        let length = |k: usize| piece.min(part - k * piece);
        let others = || (0..ranks).filter(move |p| *p != rank);
        self.run(
            steps,
            &|k| {
                for to in others() {
                    // SAFETY: piece k of part `to` of src; sub-slot `to` of the own slot, which is ours in `fill`.
                    unsafe { copy(self.slot(rank, k).add(to * piece), at.src.add(to * part + k * piece), length(k)) }
                }
            },
            &|k| {
                for from in others() {
                    // SAFETY: sub-slot `rank` of the sender is filled. In place, piece k of src was copied away before.
                    unsafe { copy(at.dst.add(from * part + k * piece), self.slot(from, k).add(rank * piece), length(k)) }
                }
            },
        )?;
        // SAFETY: the own part, unless both operands are the same memory.
        unsafe {
            if at.dst.cast_const() != at.src {
                copy(at.dst.add(rank * part), at.src.add(rank * part), part);
            }
        }
        Ok(())
    }

    fn broadcast(&self, at: Operands) -> Result<()> {
        let (rank, root) = (self.seat.rank, self.call.root);
        let bytes = self.call.bytes();
        let (piece, steps) = self.pieces(bytes, 1);
        let length = |k: usize| piece.min(bytes - k * piece);
        self.run(
            steps,
            &|k| {
                if rank == root {
                    // SAFETY: piece k of the data; the own slot is ours in `fill`.
                    unsafe { copy(self.slot(rank, k), at.src.add(k * piece), length(k)) }
                }
            },
            &|k| {
                if rank != root {
                    // SAFETY: the root's slot is filled; piece k of the data is ours.
                    unsafe { copy(at.dst.add(k * piece), self.slot(root, k), length(k)) }
                }
            },
        )
    }
}
