//! How do few GPUs gather without spending their compute units on it? Each copies its part into memory that the others have mapped, all meet, and
//! the copy engines fetch the others' parts: for a pair, one copy each way over the link between them.
//!
//! Memory for parts on their way is two slots: a rank writes a slot again when all have met once more since it was fetched. Whether this is
//! faster than the library is measured when the group begins, with data that is checked. Only for long gathers: ranks meet once for each slot.

use super::CclComm;
use super::issue::Issue;
use super::join::await_key;
use crate::operands::Counters;
use crate::store::Store;
use crate::{Communicator, Error, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};
use zrt_kernels::{Buffer, Category, DType, Device, Place, Stream, View, ViewMut};

/// Memory of a device that other processes of this host can map.
pub trait PeerMemory: Send + Sync {
    /// By what another process finds `buffer`.
    fn export(&self, buffer: &Buffer) -> zrt_kernels::Result<[u8; HANDLE_BYTES]>;
    /// Maps what another process exported, as memory that this device's streams can copy from. `bytes` is its length.
    fn import(&self, name: &str, handle: [u8; HANDLE_BYTES], bytes: usize) -> zrt_kernels::Result<Buffer>;
}

/// Bytes of a driver's handle of memory.
pub const HANDLE_BYTES: usize = 64;

/// When gathers are copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyWhen {
    /// Where they were measured to be faster.
    Faster,
    /// Wherever the memory can be mapped.
    Possible,
}

/// How gathers by copies work.
#[derive(Clone, Debug)]
pub struct CopyOptions {
    /// When they are used.
    pub when: CopyWhen,
    /// Bytes of one slot of device memory; a rank has two.
    pub slot_bytes: usize,
    /// A rank's part from which on a gather is worth it, in bytes.
    pub least_bytes: usize,
}

impl CopyOptions {
    fn slot(&self) -> usize {
        self.slot_bytes.next_multiple_of(256)
    }

    /// Device memory that a rank holds for it, for plans: name and bytes.
    pub fn memory(&self) -> (&'static str, usize) {
        ("slots of gathers", 2 * self.slot())
    }
}

impl Default for CopyOptions {
    fn default() -> Self {
        CopyOptions { when: CopyWhen::Faster, slot_bytes: 32 << 20, least_bytes: 1 << 20 }
    }
}

/// Copies must beat the library by this factor: what was measured is not quite what a step sees.
const MARGIN: f64 = 0.95;
/// Timed rounds; the best counts.
const ROUNDS: usize = 3;
/// For a measurement to end; ranks that are lost end it before.
const DEADLINE: Duration = Duration::from_secs(60);

/// Memory for parts on their way.
pub(super) struct Copies {
    slot_bytes: usize,
    least_bytes: usize,
    /// By rank: its two slots, as this device sees them.
    slots: Vec<Buffer>,
    /// Slots used so far; the same on all ranks, which gather the same.
    used: AtomicUsize,
}

impl Copies {
    /// Whether a gather of parts of `bytes` goes this way.
    pub fn take(&self, bytes: usize) -> bool {
        bytes >= self.least_bytes
    }

    /// Lets go of the others' memory; what is left is this rank's, to be freed when the others did the same.
    pub fn into_own(mut self, rank: usize) -> Buffer {
        self.slots.swap_remove(rank)
    }

    fn slot(&self, rank: usize, number: usize, bytes: usize) -> Result<ViewMut> {
        Ok(self.slots[rank].view_mut(DType::U8, number % 2 * self.slot_bytes, bytes)?)
    }
}

impl Issue<'_> {
    /// All arrive before any goes on.
    pub fn meet(&self) -> Result<()> {
        let flag = self.comm.flag.view_mut(DType::I32, 0, 1)?;
        let span = self.span(&flag)?;
        self.native(vec![], vec![flag], move |library| library.all_reduce(span))
    }

    /// As the library's all_gather.
    pub fn gather_by_copies(&self, copies: &Copies, dst: &ViewMut, src: &View) -> Result<()> {
        let (s, rank) = (self.stream, self.comm.check.rank);
        let (dst, src) = (dst.reinterpret(DType::U8)?, src.reinterpret(DType::U8)?);
        let part = src.bytes();
        let own = dst.slice(rank * part, part)?;
        if own.span() != src.span() {
            s.copy(&own, &src)?;
        }
        for at in (0..part).step_by(copies.slot_bytes) {
            let bytes = copies.slot_bytes.min(part - at);
            let number = copies.used.fetch_add(1, Relaxed);
            s.copy(&copies.slot(rank, number, bytes)?, &src.slice(at, bytes)?)?;
            self.meet()?;
            for peer in self.comm.link.control.peers() {
                s.copy(&dst.slice(peer * part + at, bytes)?, &copies.slot(peer, number, bytes)?.view())?;
            }
        }
        Ok(())
    }
}

impl CclComm {
    /// Lets gathers be copies where that is possible and, if asked for, faster; returns whether it is. All ranks call it, with the same options,
    /// before they share the communicator.
    ///
    /// # Errors
    /// A rank is lost, or the device fails. That memory cannot be mapped is none: the library gathers then.
    pub fn use_copies(&mut self, store: &dyn Store, memory: &dyn PeerMemory, options: &CopyOptions) -> Result<bool> {
        if self.check.ranks == 1 {
            return Ok(false);
        }
        let until = Instant::now() + DEADLINE;
        let (slot_bytes, (name, bytes)) = (options.slot(), options.memory());
        let mine = self.device.alloc(name, bytes, Place::Device, Category::Libraries)?;
        let handle = memory.export(&mine);
        let said = handle.as_ref().map_or(vec![], |handle| handle.to_vec());
        let handles = self.exchange(store, "memory", said, until)?;
        let map = |rank: usize| -> zrt_kernels::Result<Buffer> {
            if rank == self.check.rank {
                return handle.clone().map(|_| mine.clone());
            }
            let unmapped = || zrt_kernels::Error::Library { library: "peer memory".to_string(), why: format!("rank {rank} has none") };
            let handle = <[u8; HANDLE_BYTES]>::try_from(&handles[rank][..]).map_err(|_| unmapped())?;
            memory.import(&format!("slots of rank {rank}"), handle, bytes)
        };
        let slots: zrt_kernels::Result<Vec<Buffer>> = (0..self.check.ranks).map(map).collect();
        if let Err(why) = &slots {
            tracing::info!("gathers stay with {}: {why}", self.library());
        }
        let mapped = self.exchange(store, "mapped", vec![slots.is_ok() as u8], until)?;
        let Some(slots) = slots.ok().filter(|_| mapped.iter().all(|one| one == &[1])) else {
            self.exchange(store, "unmapped", vec![], until)?;
            return Ok(false);
        };
        self.copies = Some(Copies { slot_bytes, least_bytes: options.least_bytes, slots, used: AtomicUsize::new(0) });
        let wins = self.copies_win(store, options, until)?;
        // What was measured was none of the caller's.
        self.counters = Counters::default();
        if let Some(copies) = self.copies.take_if(|_| !wins) {
            let mine = copies.into_own(self.check.rank);
            // Nobody frees what another still has mapped.
            self.exchange(store, "unmapped", vec![], until)?;
            drop(mine);
        }
        Ok(wins)
    }

    /// Measures, and decides as all ranks do.
    fn copies_win(&mut self, store: &dyn Store, options: &CopyOptions, until: Instant) -> Result<bool> {
        let device = self.device.clone();
        let stream = device.stream("measuring gathers")?;
        let elems = options.slot_bytes.max(options.least_bytes).div_ceil(DType::F32.bytes());
        let dst = device.alloc("measuring gathers", elems * self.check.ranks * DType::F32.bytes(), Place::Device, Category::Libraries)?;
        let dst = dst.all(DType::F32)?;
        let (copied, right) = self.time_gathers(&device, &dst, &*stream, until)?;
        let copies = self.copies.take();
        let (library, _) = self.time_gathers(&device, &dst, &*stream, until)?;
        self.copies = copies;
        let said = format!("{} {} {}", copied.as_nanos(), library.as_nanos(), right as u8);
        let all = self.exchange(store, "times", said.into_bytes(), until)?;
        // The slowest rank is the one that the others wait for.
        let mut worst = [0.0f64, 0.0];
        let mut right = true;
        for said in all {
            let text = String::from_utf8_lossy(&said).into_owned();
            let numbers: Vec<f64> = text.split(' ').filter_map(|n| n.parse().ok()).collect();
            let [copied, library, good] = numbers[..] else {
                return Err(Error::Rendezvous(format!("a rank measured '{text}', expected three numbers; do all run the same version?")));
            };
            worst = [worst[0].max(copied), worst[1].max(library)];
            right &= good == 1.0;
        }
        let wins = right && (options.when == CopyWhen::Possible || worst[0] < MARGIN * worst[1]);
        if self.check.rank == 0 {
            let speed = |ns: f64| ((self.check.ranks - 1) * elems * DType::F32.bytes()) as f64 / ns;
            let (by_copies, by_library) = (speed(worst[0]), speed(worst[1]));
            let note = if right { "" } else { "; copies gave wrong data" };
            let chosen = if wins { "copies" } else { self.library() };
            tracing::info!("gathers: {by_copies:.1} GB/s by copies, {by_library:.1} GB/s by {}{note}; using {chosen}", self.library());
        }
        Ok(wins)
    }

    /// The best time of a gather into `dst` as they go now, and whether all of them gave what they should.
    fn time_gathers(&self, device: &Arc<dyn Device>, dst: &ViewMut, s: &dyn Stream, until: Instant) -> Result<(Duration, bool)> {
        let (rank, ranks) = (self.check.rank, self.check.ranks);
        let part = dst.elems() / ranks;
        let own = dst.slice(rank * part, part)?;
        let (mut best, mut right) = (Duration::MAX, true);
        for round in 0..=ROUNDS {
            // Other values each time: a part that was not fetched would show.
            let value = |r: usize| (1 + r + ranks * round) as f32;
            s.fill(dst, 0.0)?;
            s.fill(&own, value(rank))?;
            self.barrier("measuring gathers", s)?;
            self.wait_for(device, s, until)?;
            let begun = Instant::now();
            self.all_gather(dst, &own, "measuring gathers", s)?;
            self.wait_for(device, s, until)?;
            if round > 0 {
                best = best.min(begun.elapsed());
            }
            for r in 0..ranks {
                for at in [0, part / 2, part - 1] {
                    let got = s.read(&dst.slice(r * part + at, 1)?.view())?.f32s(until.saturating_duration_since(Instant::now()))?;
                    right &= got == [value(r)];
                }
            }
        }
        Ok((best, right))
    }

    fn wait_for(&self, device: &Arc<dyn Device>, s: &dyn Stream, until: Instant) -> Result<()> {
        let event = device.event()?;
        s.record(&event)?;
        let waited = event.sync(until.saturating_duration_since(Instant::now()));
        waited.map_err(|error| self.link.control.error().unwrap_or(Error::Device(error)))
    }

    /// What every rank says under `topic`.
    fn exchange(&self, store: &dyn Store, topic: &str, said: Vec<u8>, until: Instant) -> Result<Vec<Vec<u8>>> {
        let key = |rank: usize| format!("ccl/{}/{topic}/{rank}", self.name);
        store.set(&key(self.check.rank), &said)?;
        (0..self.check.ranks).map(|rank| await_key(&self.link, store, &key(rank), until)).collect()
    }
}
