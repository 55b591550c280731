//! Where weights live and how a unit is opened: the one code path behind every stage.
//!
//! A segment's **home** is a copy (stages 0-2, or one rank), a shard (stage 3; on the device or on the host), or shared
//! pages laid out as the whole unit, of which each rank owns its shard. Opening a unit makes its parameters readable on the compute stream:
//!
//! | home | opening | memory |
//! |---|---|---|
//! | copy | nothing | `padded` |
//! | pages | a barrier for each new version | `padded / ranks` of shared memory |
//! | shard | copy my shard from the host (if there), all_gather into a slot | `shard` + slots |
//!
//! A **slot** knows the (segment, version) it holds: a frozen segment keeps its version for ever, so a hit costs nothing. Slots of
//! equal size form a ring of `1 + prefetch_depth` (times the units of that size in one visit); the resident set gives frozen segments slots of their own. States of a slot, and what may touch it:
//! *filling* (comm stream, after `free`), *ready* (after `ready`, compute stream), *finished* (after `free`, whoever fills it next).

use crate::error::{Error, Result};
use crate::model::VisitSpec;
use crate::plan::{Holds, ParamSpec, Placement, ShardPlan};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use zrt_collectives::Comm;
use zrt_kernels::{Category, DType, Device, Event, Place, Stream, View, ViewMut};

/// The queues of a rank. Collectives go to `comm` only, so their order is the order of issue.
#[derive(Clone)]
pub struct Streams {
    /// Forward and backward.
    pub compute: Arc<dyn Stream>,
    /// Collectives, and sums of what they deliver.
    pub comm: Arc<dyn Stream>,
    /// Copies between host and device.
    pub copy: Arc<dyn Stream>,
    /// The optimizer.
    pub update: Arc<dyn Stream>,
}

impl Streams {
    /// Makes the four queues of `device`.
    pub fn new(device: &dyn Device) -> Result<Streams> {
        Ok(Streams {
            compute: device.stream("compute")?,
            comm: device.stream("comm")?,
            copy: device.stream("copy")?,
            update: device.stream("update")?,
        })
    }
}

/// Where first values come from: any range of any parameter, in the type asked for.
pub trait WeightSource: Send + Sync {
    /// Fills `dst` with elements `[start, start + dst.len() / dtype.bytes())` of `param`, as `dtype`.
    fn read(&self, param: &ParamSpec, start: usize, dst: &mut [u8], dtype: DType) -> std::result::Result<(), String>;

    /// The same for several ranges at once, in any order: whoever can overlaps them. Stops at the first error.
    fn read_all(&self, parts: Vec<ReadPart<'_>>, dtype: DType) -> std::result::Result<(), String> {
        parts.into_iter().try_for_each(|p| self.read(p.param, p.start, p.dst, dtype))
    }
}

/// One range of [`WeightSource::read_all`].
pub struct ReadPart<'a> {
    /// The parameter.
    pub param: &'a ParamSpec,
    /// Its first element to read.
    pub start: usize,
    /// Receives the elements: its length says how many.
    pub dst: &'a mut [u8],
}

/// What the store needs to know of the configuration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StoreOptions {
    /// ZeRO stage, 0 to 3.
    pub stage: u8,
    /// Shards of weights live on the host.
    pub offload_param: bool,
    /// Optimizer state lives on the host.
    pub offload_optimizer: bool,
    /// Try to keep one copy per host in shared pages.
    pub share_pages: bool,
    /// Units opened ahead.
    pub prefetch_depth: usize,
    /// Bytes of the resident set; `u64::MAX` for all.
    pub resident_bytes: u64,
    /// Fill released slots with NaN (chaos mode).
    pub poison: bool,
}

enum Home {
    Copy(ViewMut),
    Pages(ViewMut),
    Shard(ViewMut),
}

struct SegmentState {
    home: Home,
    /// Number of updates so far; 0 for ever if frozen.
    version: u64,
    /// Recorded when the current version is in its home.
    updated: Arc<dyn Event>,
    /// Version for which all ranks met (pages) and the event that says so.
    met: Option<u64>,
    ready: Arc<dyn Event>,
    /// Slots that may hold it: indices into `slots`.
    class: Vec<usize>,
}

struct Slot {
    view: ViewMut,
    holds: Option<(usize, u64)>,
    open: u32,
    ready: Arc<dyn Event>,
    free: Arc<dyn Event>,
    used: u64,
    poisoned: Arc<AtomicBool>,
}

/// An opened unit. End it with [`ParamStore::finish`]; dropping it without poisons its slots.
#[must_use = "finish() returns the slots; dropping poisons them"]
pub struct OpenUnit {
    /// Parameters in the order of the unit.
    pub params: Vec<View>,
    slots: Vec<usize>,
    flags: Vec<Arc<AtomicBool>>,
}

impl Drop for OpenUnit {
    fn drop(&mut self) {
        for flag in &self.flags {
            flag.store(true, Ordering::Relaxed);
        }
    }
}

/// The weights of one rank.
pub struct ParamStore {
    plan: Arc<ShardPlan>,
    device: Arc<dyn Device>,
    comm: Comm,
    streams: Streams,
    options: StoreOptions,
    segments: Vec<SegmentState>,
    slots: Vec<Slot>,
    tick: u64,
    gathers: u64,
}

impl ParamStore {
    /// Allocates homes and slots. Collective: all ranks call it with the same arguments.
    pub fn new(
        plan: Arc<ShardPlan>,
        visits: &[VisitSpec],
        device: Arc<dyn Device>,
        comm: Comm,
        streams: Streams,
        options: StoreOptions,
    ) -> Result<ParamStore> {
        let placement = Placement::of(options.stage);
        let alone = plan.ranks == 1 && !options.offload_param;
        let place = if options.offload_param { Place::Pinned } else { Place::Device };
        let mut segments = Vec::with_capacity(plan.segments.len());
        for s in &plan.segments {
            let name = format!("{} {}", plan.units[s.unit].name, if s.trainable { "trained" } else { "frozen" });
            let pages = if options.share_pages && placement.weights == Holds::Shard && !alone {
                comm.share_pages(&name, s.copy_bytes())?.map(|b| device.adopt(b, s.category)).transpose()?
            } else {
                None
            };
            let home = match pages {
                Some(pages) => Home::Pages(pages.all(s.dtype)?),
                None if placement.weights == Holds::Copy || alone => {
                    Home::Copy(device.alloc(&name, s.copy_bytes(), Place::Device, s.category)?.all(s.dtype)?)
                }
                None => Home::Shard(device.alloc(&name, s.shard_bytes(), place, s.category)?.all(s.dtype)?),
            };
            segments.push(SegmentState {
                home,
                version: 0,
                updated: device.event()?,
                met: None,
                ready: device.event()?,
                class: Vec::new(),
            });
        }
        let mut store = ParamStore { plan, device, comm, streams, options, segments, slots: Vec::new(), tick: 0, gathers: 0 };
        store.make_slots(visits)?;
        Ok(store)
    }

    fn make_slots(&mut self, visits: &[VisitSpec]) -> Result<()> {
        let plan = self.plan.clone();
        let sharded = |store: &ParamStore, i: usize| matches!(store.segments[i].home, Home::Shard(_));
        let mut left = self.options.resident_bytes;
        let mut classes: std::collections::BTreeMap<(bool, DType, usize), Vec<usize>> = Default::default();
        for (i, s) in plan.segments.iter().enumerate() {
            if !sharded(self, i) {
                continue;
            }
            if !s.trainable && s.copy_bytes() as u64 <= left {
                left = if left == u64::MAX { left } else { left - s.copy_bytes() as u64 };
                let slot = self.make_slot(s.dtype, s.padded)?;
                self.segments[i].class = vec![slot];
            } else {
                classes.entry((s.trainable, s.dtype, s.padded)).or_default().push(i);
            }
        }
        for ((_, dtype, padded), members) in classes {
            // A visit may open several units of a class; each depth of prefetch needs as many again.
            let in_visit = |v: &VisitSpec| members.iter().filter(|&&i| v.units.contains(&plan.segments[i].unit)).count();
            let together = visits.iter().map(in_visit).max().unwrap_or(1).max(1);
            let count = members.len().min(together * (1 + self.options.prefetch_depth));
            let ring = (0..count).map(|_| self.make_slot(dtype, padded)).collect::<Result<Vec<_>>>()?;
            for i in members {
                self.segments[i].class = ring.clone();
            }
        }
        Ok(())
    }

    fn make_slot(&mut self, dtype: DType, elems: usize) -> Result<usize> {
        let name = format!("slot {}", self.slots.len());
        let view = self.device.alloc(&name, elems * dtype.bytes(), Place::Device, Category::Slots)?.all(dtype)?;
        let (ready, free) = (self.device.event()?, self.device.event()?);
        self.slots.push(Slot { view, holds: None, open: 0, ready, free, used: 0, poisoned: Arc::default() });
        Ok(self.slots.len() - 1)
    }

    /// Fills every home from `source`: each rank reads its shards; copies are completed by all_gather. Each byte is read once per job.
    pub fn load(&mut self, source: &Arc<dyn WeightSource>) -> Result<()> {
        for i in 0..self.segments.len() {
            // A master apart from the weight (of another type, or elsewhere) is loaded by the optimizer, which then sets the weight.
            let s = &self.plan.segments[i];
            let own = self.own_part(i)?;
            let state = if self.options.offload_optimizer { Place::Pinned } else { Place::Device };
            if s.trainable && (s.dtype != DType::F32 || self.options.offload_optimizer || own.place() != state) {
                continue;
            }
            self.read_shard(i, &own, source)?;
            self.complete(i, "load")?;
        }
        Ok(())
    }

    /// Reads this rank's shard of segment `i` into `own` (of any float type) on the comm stream; padding becomes zero.
    pub fn read_shard(&self, i: usize, own: &ViewMut, source: &Arc<dyn WeightSource>) -> Result<()> {
        let s = &self.plan.segments[i];
        let first = self.comm.rank() * s.shard;
        let (plan, source, dtype) = (self.plan.clone(), source.clone(), own.dtype());
        // One task for all of the shard, so that its tensors are read side by side.
        let read = move |mut dst: &mut [u8]| {
            let s = &plan.segments[i];
            let (mut parts, mut at) = (Vec::new(), 0);
            for (param, start, from, elems) in s.pieces(first, first + s.shard) {
                let (gap, rest) = dst.split_at_mut((from - at) * dtype.bytes());
                gap.fill(0);
                let (piece, rest) = rest.split_at_mut(elems * dtype.bytes());
                parts.push(ReadPart { param: &plan.units[s.unit].params[param], start, dst: piece });
                (dst, at) = (rest, from + elems);
            }
            dst.fill(0);
            source.read_all(parts, dtype)
        };
        Ok(self.streams.comm.write(own, &self.plan.units[s.unit].name, Box::new(read))?)
    }

    /// After this rank's part of segment `i` was written on the comm stream: completes copies, and marks the version as present.
    pub fn complete(&mut self, i: usize, what: &str) -> Result<()> {
        let s = &self.plan.segments[i];
        let state = &mut self.segments[i];
        if let Home::Copy(whole) = &state.home
            && self.plan.ranks > 1
        {
            let own = whole.slice(self.comm.rank() * s.shard, s.shard)?;
            self.comm.all_gather(whole, &own, &format!("{what} {}", self.plan.units[s.unit].name), &*self.streams.comm)?;
        }
        self.streams.comm.record(&state.updated)?;
        Ok(())
    }

    /// This rank's shard of segment `i`, in its home.
    pub fn own_part(&self, i: usize) -> Result<ViewMut> {
        let s = &self.plan.segments[i];
        Ok(match &self.segments[i].home {
            Home::Copy(whole) | Home::Pages(whole) => whole.slice(self.comm.rank() * s.shard, s.shard)?,
            Home::Shard(shard) => shard.clone(),
        })
    }

    /// The whole copy of segment `i`, if this rank holds one of its own.
    pub fn copy_of(&self, i: usize) -> Option<ViewMut> {
        match &self.segments[i].home {
            Home::Copy(whole) => Some(whole.clone()),
            _ => None,
        }
    }

    /// The event after which segment `i`'s current version is in its home.
    pub fn updated(&self, i: usize) -> &Arc<dyn Event> {
        &self.segments[i].updated
    }

    /// Declares that `updated` has been recorded behind a new version of trained segment `i`.
    pub fn advance(&mut self, i: usize) {
        self.segments[i].version += 1;
    }

    /// Bytes of homes that all ranks of the host share.
    pub fn shared_bytes(&self) -> usize {
        let pages = self.segments.iter().zip(&self.plan.segments).filter(|(s, _)| matches!(s.home, Home::Pages(_)));
        pages.map(|(_, s)| s.copy_bytes()).sum()
    }

    /// all_gather calls that filled slots so far.
    pub fn gathers(&self) -> u64 {
        self.gathers
    }

    /// Starts to make `unit` available without waiting for it.
    pub fn prefetch(&mut self, unit: usize) -> Result<()> {
        for i in self.plan.clone().of_unit[unit].iter().copied() {
            match self.segments[i].home {
                Home::Copy(_) => {}
                Home::Pages(_) => self.meet(i)?,
                Home::Shard(_) => {
                    self.fill(i, false)?;
                }
            }
        }
        Ok(())
    }

    /// Makes `unit` readable for operations that are enqueued on the compute stream from now on.
    pub fn open(&mut self, unit: usize) -> Result<OpenUnit> {
        let plan = self.plan.clone();
        let spec = &plan.units[unit];
        let mut open = OpenUnit { params: Vec::new(), slots: Vec::new(), flags: Vec::new() };
        let mut params = vec![None; spec.params.len()];
        for &i in &plan.of_unit[unit] {
            let whole = match &self.segments[i].home {
                Home::Copy(whole) => {
                    self.streams.compute.wait(&self.segments[i].updated)?;
                    whole.view()
                }
                Home::Pages(whole) => {
                    let whole = whole.view();
                    self.meet(i)?;
                    self.streams.compute.wait(&self.segments[i].ready)?;
                    whole
                }
                Home::Shard(_) => {
                    let Some(slot) = self.fill(i, true)? else {
                        return Err(Error::Model(format!("{}: more units open at once than prefetch_depth allows", spec.name)));
                    };
                    let s = &mut self.slots[slot];
                    s.open += 1;
                    self.streams.compute.wait(&s.ready)?;
                    open.slots.push(slot);
                    open.flags.push(s.poisoned.clone());
                    s.view.view()
                }
            };
            for slice in &plan.segments[i].slices {
                params[slice.param] = Some(whole.slice(slice.start, slice.elems)?);
            }
        }
        open.params = params.into_iter().flatten().collect();
        Ok(open)
    }

    /// Returns the slots once the compute stream has passed this point.
    pub fn finish(&mut self, mut open: OpenUnit) -> Result<()> {
        for slot in open.slots.drain(..) {
            let s = &mut self.slots[slot];
            self.streams.compute.record(&s.free)?;
            self.tick += 1;
            s.used = self.tick;
            s.open -= 1;
        }
        open.flags.clear();
        Ok(())
    }

    /// Shared pages: all ranks meet once for each version.
    fn meet(&mut self, i: usize) -> Result<()> {
        let name = &self.plan.units[self.plan.segments[i].unit].name;
        let state = &mut self.segments[i];
        if state.met == Some(state.version) {
            return Ok(());
        }
        self.streams.comm.wait(&state.updated)?;
        self.comm.barrier(&format!("open {name}"), &*self.streams.comm)?;
        self.streams.comm.record(&state.ready)?;
        state.met = Some(state.version);
        Ok(())
    }

    /// Finds the slot that holds the current version of `i`, or gathers it into a free one.
    /// Without `must`, does nothing when every slot of the class is open.
    fn fill(&mut self, i: usize, must: bool) -> Result<Option<usize>> {
        let state = &self.segments[i];
        let key = (i, state.version);
        if let Some(&hit) = state.class.iter().find(|&&s| self.slots[s].holds == Some(key)) {
            if self.slots[hit].poisoned.load(Ordering::Relaxed) {
                return Err(Error::Model(format!(
                    "slot of {} was dropped without finish()",
                    self.plan.units[self.plan.segments[i].unit].name
                )));
            }
            // A prefetched or found slot is the most recent: the next fill takes another.
            self.tick += 1;
            self.slots[hit].used = self.tick;
            return Ok(Some(hit));
        }
        let free = state.class.iter().copied().filter(|&s| self.slots[s].open == 0).min_by_key(|&s| self.slots[s].used);
        let Some(slot) = free else {
            return if must { Err(Error::Model("no free slot".into())) } else { Ok(None) };
        };
        let Home::Shard(shard) = &state.home else { return Ok(None) };
        let segment = &self.plan.segments[i];
        let name = &self.plan.units[segment.unit].name;
        let (comm, copy) = (&self.streams.comm, &self.streams.copy);
        let s = &mut self.slots[slot];
        comm.wait(&s.free)?;
        comm.wait(&state.updated)?;
        if self.options.poison {
            comm.fill(&s.view, f32::NAN)?;
        }
        let own = s.view.slice(self.comm.rank() * segment.shard, segment.shard)?;
        if self.options.offload_param {
            // Order copy after free, updated and poison, then the gather after the copy.
            comm.record(&s.ready)?;
            copy.wait(&s.ready)?;
            copy.copy(&own, &shard.view())?;
            copy.record(&s.ready)?;
            comm.wait(&s.ready)?;
        }
        if self.plan.ranks > 1 {
            let src = if self.options.offload_param { own.view() } else { shard.view() };
            self.comm.all_gather(&s.view, &src, name, &**comm)?;
            self.gathers += 1;
        }
        comm.record(&s.ready)?;
        s.holds = Some(key);
        s.poisoned = Arc::default();
        self.tick += 1;
        s.used = self.tick;
        Ok(Some(slot))
    }
}
