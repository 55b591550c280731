//! What does each collective move? Every function here maps a collective onto mail, or onto fill and take of staging slots.
//!
//! A slot holds either one piece of a rank's data (all_gather, broadcast, all_reduce of two ranks) or one piece for every rank
//! (reduce_scatter, all_to_all, all_reduce of more). What a rank has itself it never stages: it is read where it lies. The operands are
//! the rank's own memory, slots and mail are shared.
#![allow(unsafe_code)]

use super::copy::{Store, copy};
use super::shared::{MAIL_BYTES, MAIL_LINES};
use super::steps::Pass;
use crate::Result;
use crate::operands::Op;
use crate::tree::{self, Leaf};
use half::bf16;
use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use zrt_kernels::DType;

/// The operands' addresses, in this rank's memory. For calls in place both are the same.
#[derive(Clone, Copy)]
pub(super) struct Operands {
    pub dst: *mut u8,
    pub src: *const u8,
}

/// A result of at least this many bytes does not stay in a cache of today's cores anyway: it is stored around them.
const STREAM_BYTES: usize = 8 << 20;
/// Bytes that are summed at a time where the sums cannot be made in their place.
const TURN_BYTES: usize = 4096;
/// Lines of mail that are summed at a time, and their bytes: a whole number of elements of every type.
const BLOCK_LINES: usize = 8;
const BLOCK_BYTES: usize = BLOCK_LINES * MAIL_BYTES;

/// A block of a peer's mail.
#[repr(C, align(64))]
struct Block(MaybeUninit<[u8; BLOCK_BYTES]>);

/// Where sums are made that are streamed, or in place of more than two ranks: in the first-level cache, apart from all operands. So the
/// inner loops know that nothing overlaps.
#[repr(C, align(64))]
struct Scratch<const BYTES: usize>(UnsafeCell<[u8; BYTES]>);

impl<const BYTES: usize> Scratch<BYTES> {
    fn new() -> Self {
        Scratch(UnsafeCell::new([0; BYTES]))
    }
    /// The address, and the bytes there.
    fn at(&self) -> (*mut u8, usize) {
        (self.0.get().cast(), BYTES)
    }
}

impl Pass<'_> {
    /// Runs the collective on operands of the lengths that the call says.
    ///
    /// # Safety
    /// The operands must be valid for those lengths and, until this returns, used by nobody else.
    pub unsafe fn perform(&self, operands: Operands) -> Result<()> {
        let (bytes, ranks) = (self.call.bytes(), self.ranks());
        let part = bytes / ranks;
        let fits = |bytes: usize, parts: usize| parts * bytes.div_ceil(MAIL_BYTES) <= MAIL_LINES;
        match self.call.op {
            Op::AllGather if fits(part, 1) => self.mail_gather(operands, part),
            Op::AllGather => self.all_gather(operands),
            Op::ReduceScatter if fits(part, ranks - 1) => self.mail_scatter(operands, part),
            Op::ReduceScatter => self.reduce_scatter(operands),
            Op::AllReduce if fits(bytes, 1) => self.mail_reduce(operands, bytes),
            Op::AllReduce if ranks <= 2 => self.all_reduce_whole(operands),
            Op::AllReduce => self.all_reduce_parts(operands),
            Op::AllToAll => self.all_to_all(operands),
            Op::Broadcast => self.broadcast(operands),
            Op::Barrier | Op::SharePages => self.run(0, &|_| {}, &|_| {}),
        }
    }

    fn ranks(&self) -> usize {
        self.seat.shared().ranks
    }

    /// How the result is stored.
    fn result(&self) -> Store {
        if self.call.bytes() >= STREAM_BYTES { Store::Streamed } else { Store::Cached }
    }

    /// (bytes per piece, pieces) to move `bytes` with `per_slot` pieces in a slot. Pieces end at cache lines, so that
    /// elements are never cut and slices of a slot are aligned.
    fn pieces(&self, bytes: usize, per_slot: usize) -> (usize, usize) {
        let piece = (self.seat.ring.slot_bytes / per_slot) & !63;
        (piece, bytes.div_ceil(piece))
    }

    /// Posts `bytes` bytes in lines from `first` on.
    ///
    /// # Safety
    /// `src` valid for `bytes`; lines within the letter; inside `exchange`'s `post`.
    unsafe fn post(&self, first: usize, src: *const u8, bytes: usize) {
        for (line, at) in (0..bytes).step_by(MAIL_BYTES).enumerate() {
            // SAFETY: by the contract.
            unsafe { self.letter().line(first + line).post(src.add(at), MAIL_BYTES.min(bytes - at), self.sequence) }
        }
    }

    /// Takes `bytes` bytes of `peer`'s lines from `first` on.
    ///
    /// # Safety
    /// `dst` valid for `bytes`; inside `exchange`'s `take`, for lines that `peer` posts.
    unsafe fn collect(&self, dst: *mut u8, peer: usize, first: usize, bytes: usize) -> Result<()> {
        for (line, at) in (0..bytes).step_by(MAIL_BYTES).enumerate() {
            let line = self.line(peer, first + line)?;
            // SAFETY: by the contract; the line has arrived.
            unsafe { line.take(dst.add(at), MAIL_BYTES.min(bytes - at)) }
        }
        Ok(())
    }

    fn mail_gather(&self, at: Operands, part: usize) -> Result<()> {
        // SAFETY: src has `part` bytes.
        let post = || unsafe { self.post(0, at.src, part) };
        self.exchange(part.div_ceil(MAIL_BYTES), post, || {
            // SAFETY: parts of dst are `part` bytes.
            self.peers().try_for_each(|peer| unsafe { self.collect(at.dst.add(peer * part), peer, 0, part) })
        })?;
        // SAFETY: as the contract of `perform`.
        unsafe { self.keep_own(at, part) };
        Ok(())
    }

    /// The own part of an all_gather: src itself, or apart from it.
    ///
    /// # Safety
    /// As of [`Pass::perform`].
    unsafe fn keep_own(&self, at: Operands, part: usize) {
        // SAFETY: dst has a part of `part` bytes for every rank.
        unsafe {
            let own = at.dst.add(self.seat.rank * part);
            if own.cast_const() != at.src {
                copy(own, at.src, part, Store::Cached);
            }
        }
    }

    fn mail_scatter(&self, at: Operands, part: usize) -> Result<()> {
        let rank = self.seat.rank;
        let lines = part.div_ceil(MAIL_BYTES);
        // Lines of the ranks but the own.
        let first = |from: usize, to: usize| (to - (to > from) as usize) * lines;
        // SAFETY: src has a part of `part` bytes for every rank.
        let post = || self.peers().for_each(|to| unsafe { self.post(first(rank, to), at.src.add(to * part), part) });
        // SAFETY: as above.
        let own = unsafe { at.src.add(rank * part) };
        // SAFETY: dst has a part, in place the own part of src; the peers post these lines.
        self.exchange(lines * (self.ranks() - 1), post, || unsafe { self.mail_sum(at.dst, own, part, |from| first(from, rank)) })
    }

    fn mail_reduce(&self, at: Operands, bytes: usize) -> Result<()> {
        // SAFETY: the data has `bytes` bytes.
        let post = || unsafe { self.post(0, at.src, bytes) };
        // SAFETY: as above; the data is overwritten after it was posted.
        self.exchange(bytes.div_ceil(MAIL_BYTES), post, || unsafe { self.mail_sum(at.dst, at.src, bytes, |_| 0) })
    }

    /// `dst` = tree sum of `own` and what the peers posted from line `first(peer)` on.
    ///
    /// # Safety
    /// As of [`Pass::collect`], for all peers; `own` is `dst` or apart from it.
    unsafe fn mail_sum(&self, dst: *mut u8, own: *const u8, bytes: usize, first: impl Fn(usize) -> usize) -> Result<()> {
        let mut blocks = [const { Block(MaybeUninit::uninit()) }; tree::MAX_RANKS];
        let scratch = Scratch::<BLOCK_BYTES>::new();
        for (block, at) in (0..bytes).step_by(BLOCK_BYTES).enumerate() {
            let here = BLOCK_BYTES.min(bytes - at);
            for peer in self.peers() {
                // SAFETY: a block of scratch per rank; lines of this block.
                unsafe { self.collect(blocks[peer].0.as_mut_ptr().cast(), peer, first(peer) + block * BLOCK_LINES, here)? };
            }
            let leaf = |peer: usize| blocks[peer].0.as_ptr().cast();
            // SAFETY: blocks are filled as far as `here`.
            unsafe { self.sum(dst.add(at), own.add(at), here, Store::Cached, scratch.at(), &leaf) };
        }
        Ok(())
    }

    fn all_gather(&self, at: Operands) -> Result<()> {
        let (rank, ranks) = (self.seat.rank, self.ranks());
        let part = self.call.bytes() / ranks;
        let (piece, steps) = self.pieces(part, 1);
        let here = |k: usize| piece.min(part - k * piece);
        let store = self.result();
        // SAFETY: the own part of dst has `part` bytes.
        let own = unsafe { at.dst.add(rank * part) };
        self.run(
            steps,
            // SAFETY: piece k lies within a part of `part` bytes and within a slot, which the step protocol gives to this rank in `fill`.
            &|k| unsafe {
                copy(self.slot(rank, k), at.src.add(k * piece), here(k), Store::Cached);
                // Here, while it is in the cache. In place there is nothing to do.
                if own.cast_const() != at.src {
                    copy(own.add(k * piece), at.src.add(k * piece), here(k), store);
                }
            },
            &|k| {
                for peer in self.peers() {
                    // SAFETY: as above; the protocol gives the peer's slot to its readers in `take`.
                    unsafe { copy(at.dst.add(peer * part + k * piece), self.slot(peer, k), here(k), store) }
                }
            },
        )
    }

    fn reduce_scatter(&self, at: Operands) -> Result<()> {
        let (rank, ranks) = (self.seat.rank, self.ranks());
        let part = self.call.bytes() / ranks;
        let (piece, steps) = self.pieces(part, ranks);
        let here = |k: usize| piece.min(part - k * piece);
        let scratch = Scratch::<TURN_BYTES>::new();
        self.run(
            steps,
            &|k| {
                for to in self.peers() {
                    // SAFETY: piece k of part `to` of src; sub-slot `to` of the own slot, which is ours in `fill`.
                    unsafe { copy(self.slot(rank, k).add(to * piece), at.src.add(to * part + k * piece), here(k), Store::Cached) }
                }
            },
            // SAFETY: sub-slot `rank` of every other rank is filled; piece k of dst is ours, in place it is the own part of src.
            &|k| unsafe {
                let own = at.src.add(rank * part + k * piece);
                let leaf = |peer: usize| self.slot(peer, k).add(rank * piece).cast_const();
                self.sum(at.dst.add(k * piece), own, here(k), self.result(), scratch.at(), &leaf)
            },
        )
    }

    /// `dst` = tree sum of `own` and the peers' `leaf(peer)`, over `bytes` bytes.
    ///
    /// # Safety
    /// All must be valid for `bytes` bytes; `own` is `dst` or apart from it, the leaves are apart from both.
    unsafe fn sum(
        &self,
        dst: *mut u8,
        own: *const u8,
        bytes: usize,
        store: Store,
        scratch: (*mut u8, usize),
        leaf: &dyn Fn(usize) -> *const u8,
    ) {
        match self.call.dtype {
            // SAFETY: passed on; the element type is the call's.
            DType::F32 => unsafe { self.sum_as::<f32>(dst, own, bytes, store, scratch, leaf) },
            // SAFETY: as above.
            DType::BF16 => unsafe { self.sum_as::<bf16>(dst, own, bytes, store, scratch, leaf) },
            // SAFETY: as above.
            DType::I32 => unsafe { self.sum_as::<i32>(dst, own, bytes, store, scratch, leaf) },
            DType::U8 => {}
        }
    }

    /// # Safety
    /// As of [`Pass::sum`].
    unsafe fn sum_as<E: Leaf>(
        &self,
        dst: *mut u8,
        own: *const u8,
        bytes: usize,
        store: Store,
        scratch: (*mut u8, usize),
        leaf: &dyn Fn(usize) -> *const u8,
    ) {
        let (rank, ranks, elems) = (self.seat.rank, self.ranks(), bytes / size_of::<E>());
        // SAFETY: slots and pieces are multiples of a cache line, so aligned; operands are aligned by their view.
        let slice = |r: usize| unsafe { std::slice::from_raw_parts(if r == rank { own } else { leaf(r) }.cast::<E>(), elems) };
        // Into the result's place at once, where that is nobody's leaf or the only other leaf is apart from it.
        let in_place = dst.cast_const() == own;
        if store == Store::Cached && (!in_place || ranks == 2) {
            // SAFETY: dst is valid for these bytes and nobody else uses it, by the contract of `perform`; in place, `slice(rank)` is not made.
            let sums = unsafe { std::slice::from_raw_parts_mut(dst.cast::<E>(), elems) };
            return match in_place {
                true => tree::add(sums, slice(1 - rank), rank == 0),
                false => self.sum_slices(sums, slice),
            };
        }
        let turn = scratch.1 / size_of::<E>();
        for at in (0..elems).step_by(turn) {
            let here = turn.min(elems - at);
            // SAFETY: at most the scratch's bytes, aligned to a line; nobody else uses it during this call.
            let sums = unsafe { std::slice::from_raw_parts_mut(scratch.0.cast::<E>(), here) };
            self.sum_slices(sums, |r| &slice(r)[at..at + here]);
            // SAFETY: dst is valid for these bytes and nobody else uses it, by the contract of `perform`.
            unsafe { copy(dst.cast::<E>().add(at).cast(), scratch.0, here * size_of::<E>(), store) };
        }
    }

    fn sum_slices<'s, E: Leaf>(&self, sums: &mut [E], slice: impl Fn(usize) -> &'s [E]) {
        match self.ranks() {
            1 => tree::sum(sums, &[slice(0)]),
            2 => tree::sum(sums, &[slice(0), slice(1)]),
            ranks => {
                let mut leaves = [&[][..]; tree::MAX_RANKS];
                let leaves = &mut leaves[..ranks];
                for (r, leaf) in leaves.iter_mut().enumerate() {
                    *leaf = slice(r);
                }
                tree::sum(sums, leaves);
            }
        }
    }

    fn all_reduce_whole(&self, at: Operands) -> Result<()> {
        let rank = self.seat.rank;
        let bytes = self.call.bytes();
        let (piece, steps) = self.pieces(bytes, 1);
        let here = |k: usize| piece.min(bytes - k * piece);
        let scratch = Scratch::<TURN_BYTES>::new();
        self.run(
            steps,
            // SAFETY: piece k of the data, and the own slot, which is ours in `fill`. Sums of piece k are written after it was copied.
            &|k| unsafe { copy(self.slot(rank, k), at.src.add(k * piece), here(k), Store::Cached) },
            // SAFETY: the slots are filled; piece k of the data is ours. It was read just now, so its lines are in the cache.
            &|k| unsafe {
                let data = at.dst.add(k * piece);
                self.sum(data, data, here(k), Store::Cached, scratch.at(), &|peer| self.slot(peer, k))
            },
        )
    }

    /// Each rank sums its share of every segment, then all collect the shares. A segment has a share per rank, each but the last `piece`
    /// long. Segment m is filled at step `2m - 1` (0 for the first) and its sums are filled at step `2m + 2`, after the sums were taken
    /// at step `2m - 1` and before step `2m + 3` is taken: filling runs one step ahead.
    fn all_reduce_parts(&self, at: Operands) -> Result<()> {
        let (rank, ranks) = (self.seat.rank, self.ranks());
        let bytes = self.call.bytes();
        let (full, _) = self.pieces(bytes, ranks);
        let segment = full * ranks;
        let segments = bytes.div_ceil(segment);
        // A segment's shares end at cache lines; the last ones of a short segment may be short or empty.
        let share = |m: usize| (segment.min(bytes - m * segment)).div_ceil(ranks).next_multiple_of(64);
        // Rank r's share of segment m, as (start in the data, bytes).
        let place = |m: usize, r: usize| {
            let start = m * segment + r * share(m);
            let end = (start + share(m)).min(bytes).min((m + 1) * segment);
            (start, end.saturating_sub(start))
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
        let scratch = Scratch::<TURN_BYTES>::new();
        self.run(
            steps,
            &|k| match kind(k) {
                Step::Data(m) => {
                    for to in self.peers() {
                        let (data, bytes) = place(m, to);
                        // SAFETY: the share of `to` of segment m; sub-slot `to` of the own slot, which is ours in `fill`.
                        unsafe {
                            if bytes > 0 {
                                copy(self.slot(rank, k).add(to * full), at.src.add(data), bytes, Store::Cached)
                            }
                        }
                    }
                }
                Step::Sums(m) => {
                    let (data, bytes) = place(m, rank);
                    // SAFETY: the own share of segment m, summed at an earlier step; the own slot is ours in `fill`.
                    unsafe {
                        if bytes > 0 {
                            copy(self.slot(rank, k), at.dst.add(data), bytes, Store::Cached)
                        }
                    }
                }
                Step::Idle => {}
            },
            &|k| match kind(k) {
                Step::Data(m) => {
                    let (data, bytes) = place(m, rank);
                    // SAFETY: the slots are filled; the own share of segment m is nobody else's.
                    unsafe {
                        if bytes > 0 {
                            let data = at.dst.add(data);
                            let leaf = |peer: usize| self.slot(peer, k).add(rank * full).cast_const();
                            self.sum(data, data, bytes, Store::Cached, scratch.at(), &leaf)
                        }
                    }
                }
                Step::Sums(m) => {
                    for peer in self.peers() {
                        let (data, bytes) = place(m, peer);
                        // SAFETY: the peer's share of segment m, which was copied to the slot before; its slot is filled.
                        unsafe {
                            if bytes > 0 {
                                copy(at.dst.add(data), self.slot(peer, k), bytes, self.result())
                            }
                        }
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
        let here = |k: usize| piece.min(part - k * piece);
        self.run(
            steps,
            &|k| {
                for to in self.peers() {
                    // SAFETY: piece k of part `to` of src; sub-slot `to` of the own slot, which is ours in `fill`.
                    unsafe { copy(self.slot(rank, k).add(to * piece), at.src.add(to * part + k * piece), here(k), Store::Cached) }
                }
            },
            &|k| {
                for from in self.peers() {
                    // SAFETY: sub-slot `rank` of the sender is filled. In place, piece k of src was copied away before.
                    unsafe { copy(at.dst.add(from * part + k * piece), self.slot(from, k).add(rank * piece), here(k), self.result()) }
                }
            },
        )?;
        // SAFETY: the own part, unless both operands are the same memory.
        unsafe {
            if at.dst.cast_const() != at.src {
                copy(at.dst.add(rank * part), at.src.add(rank * part), part, Store::Cached);
            }
        }
        Ok(())
    }

    fn broadcast(&self, at: Operands) -> Result<()> {
        let (rank, root) = (self.seat.rank, self.call.root);
        let bytes = self.call.bytes();
        let (piece, steps) = self.pieces(bytes, 1);
        let here = |k: usize| piece.min(bytes - k * piece);
        self.run(
            steps,
            &|k| {
                if rank == root {
                    // SAFETY: piece k of the data; the own slot is ours in `fill`.
                    unsafe { copy(self.slot(rank, k), at.src.add(k * piece), here(k), Store::Cached) }
                }
            },
            &|k| {
                if rank != root {
                    // SAFETY: the root's slot is filled; piece k of the data is ours.
                    unsafe { copy(at.dst.add(k * piece), self.slot(root, k), here(k), self.result()) }
                }
            },
        )
    }
}
