//! How gradients of micro-batches become one gradient: the fixed tree of rule 9.
//!
//! The micro-batches of a step have global indices `group * (ranks * G) + rank * G + j`. Their gradients (**leaves**) are combined in the binary
//! tree over that index: a subtree of up to G leaves on each rank (`Fold` over leaf buffers, compute stream), then the
//! ranks (the collective's tree), then the groups (`Fold` over accumulators, already sharded at stages 2 and 3).
//! A fold is a binary counter: equal levels merge, and at the end what is left is folded smallest first, so missing leaves count as zero.
//! The tree is the same for every power-of-two (ranks, G); so are the bits. (A sum of zeros may differ in the sign of zero; the optimizer adds +0 to each gradient first.)
//!
//! Outside deterministic mode micro-batches add up in place, and at stages 0 and 1 ranks are reduced once per step (once per group where
//! the accumulators live on the host).

use crate::error::{Error, Result};
use crate::model::{Grads, VisitSpec};
use crate::plan::{Holds, Placement, ShardPlan};
use crate::store::Streams;
use std::sync::Arc;
use zrt_collectives::Comm;
use zrt_kernels::{Category, DType, Device, Event, Place, Stream, View, ViewMut, Write};

/// A binary counter of partial sums in a few buffers of one size.
struct Fold {
    free: Vec<ViewMut>,
    stack: Vec<(u32, ViewMut)>,
    total: usize,
}

impl Fold {
    /// Buffers needed to fold `leaves` leaves, if a new leaf is written into a buffer of the fold.
    fn buffers(leaves: usize) -> usize {
        leaves.max(1).ilog2() as usize + 1
    }

    fn new(buffers: Vec<ViewMut>) -> Fold {
        Fold { total: buffers.len(), free: buffers, stack: Vec::new() }
    }

    /// A buffer for the next leaf.
    fn take(&mut self) -> Result<ViewMut> {
        self.free.pop().ok_or_else(|| Error::Model(format!("gradient fold: all {} buffers in use", self.total)))
    }

    /// Adds a finished leaf (a buffer from [`Fold::take`]) and merges equal levels.
    fn push(&mut self, leaf: ViewMut, elems: usize, add: &dyn Fn(&ViewMut, &View) -> Result<()>) -> Result<()> {
        self.stack.push((0, leaf));
        while let [.., (a, _), (b, _)] = self.stack[..]
            && a == b
        {
            self.merge(elems, add)?;
        }
        Ok(())
    }

    fn merge(&mut self, elems: usize, add: &dyn Fn(&ViewMut, &View) -> Result<()>) -> Result<()> {
        if let (Some((_, later)), Some((level, earlier))) = (self.stack.pop(), self.stack.pop()) {
            add(&earlier.slice(0, elems)?, &later.slice(0, elems)?.view())?;
            self.free.push(later);
            self.stack.push((level + 1, earlier));
        }
        Ok(())
    }

    /// Folds what is left, smallest first; `None` when there was no leaf. The buffer stays taken until [`Fold::reset`].
    fn root(&mut self, elems: usize, add: &dyn Fn(&ViewMut, &View) -> Result<()>) -> Result<Option<ViewMut>> {
        while self.stack.len() > 1 {
            self.merge(elems, add)?;
        }
        Ok(self.stack.first().map(|(_, v)| v.clone()))
    }

    fn reset(&mut self) {
        self.free.extend(self.stack.drain(..).map(|(_, v)| v));
    }
}

/// Leaf buffers of one visit in flight; two sets, so that one visit's reduction overlaps the next one's backward. The first has room for
/// every visit, the second for all but the two longest: embedding and head are often several times a layer.
struct LeafSet {
    fold: Fold,
    /// Elements of a leaf.
    elems: usize,
    /// Recorded when the reduction has read the set.
    reduced: Arc<dyn Event>,
}

/// One use of a trained segment: its accumulated gradient.
struct Use {
    segment: usize,
    acc: Fold,
    /// Recorded when the accumulator changed last.
    done: Arc<dyn Event>,
    /// The step's final sum.
    root: Option<ViewMut>,
    /// `root` is final, and was added to its segment's gradient.
    finished: bool,
}

/// The gradient of a segment as far as its uses are finished.
struct Sum {
    segment: usize,
    view: ViewMut,
    uses_left: usize,
}

/// What the gradients need to know of the configuration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradOptions {
    /// ZeRO stage.
    pub stage: u8,
    /// Accumulators live on the host.
    pub offload: bool,
    /// Fixed tree instead of running sums.
    pub deterministic: bool,
    /// `G`: micro-batches of a rank in a group.
    pub group: usize,
    /// Groups in a step.
    pub groups: usize,
}

/// The gradients of one rank.
pub struct GradStore {
    plan: Arc<ShardPlan>,
    device: Arc<dyn Device>,
    comm: Comm,
    streams: Streams,
    options: GradOptions,
    sets: Vec<LeafSet>,
    turn: usize,
    /// Per visit: uses, in the order of its units (those with a trained segment).
    of_visit: Vec<Vec<usize>>,
    uses: Vec<Use>,
    /// Of the running step.
    sums: Vec<Sum>,
    staging: Option<ViewMut>,
    /// What arrives at accumulators on the host, where it is added to running sums.
    arrived: Option<ViewMut>,
    /// Leaf of the running visit: (buffer, first write?).
    leaf: Option<ViewMut>,
    produced: Arc<dyn Event>,
    copied: Arc<dyn Event>,
}

impl GradStore {
    /// Allocates leaves and accumulators.
    pub fn new(
        plan: Arc<ShardPlan>,
        visits: &[VisitSpec],
        device: Arc<dyn Device>,
        comm: Comm,
        streams: Streams,
        options: GradOptions,
    ) -> Result<GradStore> {
        let mut uses = Vec::new();
        let mut of_visit = Vec::new();
        let mut lengths = Vec::new();
        let mut largest_shard = 0;
        let sharded = Placement::of(options.stage).gradients == Holds::Shard;
        let once = !options.deterministic && !sharded && !options.offload;
        let depth = if options.deterministic { Fold::buffers(options.groups) } else { 1 };
        let place = if options.offload { Place::Pinned } else { Place::Device };
        for visit in visits {
            let mut own = Vec::new();
            let mut elems = 0;
            for &unit in &visit.units {
                let Some(segment) = plan.trained(unit) else { continue };
                let s = &plan.segments[segment];
                elems += s.padded;
                let held = if sharded { s.shard } else { s.padded };
                largest_shard = largest_shard.max(held);
                let buffers = (0..depth)
                    .map(|d| {
                        Ok(device.alloc(&format!("gradient {} {d}", visit.name), held * 4, place, Category::Gradients)?.all(DType::F32)?)
                    })
                    .collect::<Result<Vec<_>>>()?;
                own.push(uses.len());
                uses.push(Use { segment, acc: Fold::new(buffers), done: device.event()?, root: None, finished: false });
            }
            lengths.push(elems);
            of_visit.push(own);
        }
        let depth = if options.deterministic { Fold::buffers(options.group) } else { 1 };
        lengths.retain(|elems| *elems > 0);
        lengths.sort_by_key(|elems| std::cmp::Reverse(*elems));
        let sets = match (once, lengths.first(), lengths.get(2).or(lengths.last())) {
            (false, Some(&longest), Some(&most)) if plan.ranks > 1 => vec![longest, most],
            (false, Some(&longest), _) => vec![longest],
            _ => Vec::new(),
        };
        let sets = (sets.into_iter().enumerate())
            .map(|(i, elems)| {
                let buffers = (0..depth)
                    .map(|d| Ok(device.alloc(&format!("leaf {i}.{d}"), elems * 4, Place::Device, Category::Gradients)?.all(DType::F32)?))
                    .collect::<Result<Vec<_>>>()?;
                Ok(LeafSet { fold: Fold::new(buffers), elems, reduced: device.event()? })
            })
            .collect::<Result<Vec<_>>>()?;
        let staging = if sharded && !once && largest_shard > 0 && plan.ranks > 1 && (options.offload || !options.deterministic) {
            Some(device.alloc("reduced gradient", largest_shard * 4, Place::Device, Category::Gradients)?.all(DType::F32)?)
        } else {
            None
        };
        let arrived = if options.offload && !options.deterministic && largest_shard > 0 {
            Some(device.alloc("arrived gradient", largest_shard * 4, Place::Pinned, Category::Gradients)?.all(DType::F32)?)
        } else {
            None
        };
        let (produced, copied) = (device.event()?, device.event()?);
        let (turn, leaf) = (0, None);
        let sums = Vec::new();
        Ok(GradStore { plan, device, comm, streams, options, sets, turn, of_visit, uses, sums, staging, arrived, leaf, produced, copied })
    }

    fn once(&self) -> bool {
        self.sets.is_empty()
    }

    /// Memory of leaves, free before the first step; as long as the longest trained segment. `None` where accumulators are the leaves.
    pub fn scratch(&self) -> Option<&ViewMut> {
        self.sets.first()?.fold.free.first()
    }

    /// True when `visit` has something to train.
    pub fn trains(&self, visit: usize) -> bool {
        !self.of_visit[visit].is_empty()
    }

    /// The stream on which accumulators live.
    fn acc_stream(&self) -> Arc<dyn Stream> {
        if self.options.offload { self.streams.update.clone() } else { self.streams.comm.clone() }
    }

    /// Starts the backward of `visit` in a group: waits until its leaf buffers may be written.
    pub fn begin(&mut self, visit: usize) -> Result<()> {
        if self.trains(visit) && !self.once() {
            let next = (self.turn + 1) % self.sets.len();
            self.turn = if self.visit_elems(visit) <= self.sets[next].elems { next } else { 0 };
            self.streams.compute.wait(&self.sets[self.turn].reduced)?;
        }
        Ok(())
    }

    /// Where the next micro-batch of `visit` writes its gradients.
    pub fn leaf(&mut self, visit: usize, units: &[usize]) -> Result<Grads> {
        let mut views = vec![Vec::new(); units.len()];
        let mut write = Write::Set;
        let mut at = 0;
        let mut own = self.of_visit[visit].iter().copied();
        if self.trains(visit) && !self.once() {
            let set = &mut self.sets[self.turn];
            if self.options.deterministic || self.leaf.is_none() {
                self.leaf = Some(set.fold.take()?);
            } else {
                write = Write::Add;
            }
        }
        for (k, &unit) in units.iter().enumerate() {
            let Some(segment) = self.plan.trained(unit) else { continue };
            let s = &self.plan.segments[segment];
            let area = match (&self.leaf, own.next()) {
                (Some(leaf), _) => leaf.slice(at, s.padded)?,
                (None, Some(u)) => {
                    // Once per step: the accumulator is the leaf.
                    let one = &mut self.uses[u];
                    if one.root.is_none() {
                        one.root = Some(one.acc.take()?);
                        self.streams.compute.wait(&one.done)?;
                    } else {
                        write = Write::Add;
                    }
                    one.root.clone().ok_or_else(|| Error::Model("no accumulator".into()))?
                }
                (None, None) => return Err(Error::Model(format!("visit {visit} has no leaf for unit {unit}"))),
            };
            at += s.padded;
            if write == Write::Set && s.padded > s.elems {
                self.streams.compute.fill(&area.slice(s.elems, s.padded - s.elems)?, 0.0)?;
            }
            views[k] = vec![None; self.plan.units[unit].params.len()];
            for slice in &s.slices {
                views[k][slice.param] = Some(area.slice(slice.start, slice.elems)?);
            }
        }
        Ok(Grads { views, write })
    }

    /// The micro-batch's operations are enqueued: fold its leaf.
    pub fn fold(&mut self, visit: usize) -> Result<()> {
        if self.options.deterministic
            && let Some(leaf) = self.leaf.take()
        {
            let elems = self.visit_elems(visit);
            let add = self.adder(&self.streams.compute);
            self.sets[self.turn].fold.push(leaf, elems, &add)?;
        }
        Ok(())
    }

    fn visit_elems(&self, visit: usize) -> usize {
        self.of_visit[visit].iter().map(|&u| self.plan.segments[self.uses[u].segment].padded).sum()
    }

    fn adder(&self, stream: &Arc<dyn Stream>) -> impl Fn(&ViewMut, &View) -> Result<()> + use<> {
        let (device, stream) = (self.device.clone(), stream.clone());
        move |a, b| Ok(device.ops().add(a, &a.view(), b, &*stream)?)
    }

    /// Forgets the leaf of a backward that was only looked at.
    pub fn discard(&mut self) {
        if let Some(leaf) = self.leaf.take()
            && let Some(set) = self.sets.get_mut(self.turn)
        {
            set.fold.free.push(leaf);
        }
    }

    /// All micro-batches of the group have passed `visit`: combines the ranks and adds to the step's sum. In the `last` group that ends the sums
    /// of the visit's uses: returns the segments whose gradients are final, ready on the update stream, while backward goes on.
    pub fn reduce(&mut self, visit: usize, last: bool) -> Result<Vec<(usize, ViewMut)>> {
        if !self.trains(visit) || self.once() {
            return Ok(Vec::new());
        }
        let elems = self.visit_elems(visit);
        let add = self.adder(&self.streams.compute);
        let set = &mut self.sets[self.turn];
        if let Some(leaf) = self.leaf.take() {
            set.fold.push(leaf, elems, &add)?;
        }
        let root = match set.fold.root(elems, &add)? {
            Some(root) => root,
            None => {
                // No micro-batch of this group was ours: contribute zero.
                let leaf = set.fold.take()?;
                self.streams.compute.fill(&leaf.slice(0, elems)?, 0.0)?;
                set.fold.push(leaf.clone(), elems, &add)?;
                leaf
            }
        };
        self.streams.compute.record(&self.produced)?;
        self.streams.comm.wait(&self.produced)?;
        let mut at = 0;
        for u in self.of_visit[visit].clone() {
            let padded = self.plan.segments[self.uses[u].segment].padded;
            let part = root.slice(at, padded)?;
            at += padded;
            self.accumulate(u, part)?;
        }
        let set = &mut self.sets[self.turn];
        set.fold.reset();
        self.streams.comm.record(&set.reduced)?;
        let mut ready = Vec::new();
        if last {
            for u in self.of_visit[visit].clone() {
                ready.extend(self.finish_use(u)?);
            }
        }
        Ok(ready)
    }

    /// Combines one segment's partial sum over ranks and pushes it to the accumulators.
    fn accumulate(&mut self, u: usize, part: ViewMut) -> Result<()> {
        let comm = self.streams.comm.clone();
        let acc = self.acc_stream();
        let add = self.adder(&acc);
        let s = &self.plan.segments[self.uses[u].segment];
        let name = &self.plan.units[s.unit].name;
        let sharded = Placement::of(self.options.stage).gradients == Holds::Shard && self.plan.ranks > 1;
        let held = if sharded { s.shard } else { s.padded };
        acc.wait(&self.uses[u].done)?;
        // Running sums reuse the one accumulator of the step.
        let running = if self.options.deterministic { None } else { self.uses[u].root.clone() };
        let fresh = match &running {
            Some(root) => root.clone(),
            None => self.uses[u].acc.take()?,
        };
        let direct = sharded && !self.options.offload && running.is_none();
        let reduced = if direct {
            self.comm.reduce_scatter(&fresh, &part.view(), name, &*comm)?;
            fresh.view()
        } else if sharded {
            let staging = self.staging.as_ref().ok_or_else(|| Error::Model("no staging for reduced gradients".into()))?.slice(0, held)?;
            comm.wait(&self.copied)?;
            self.comm.reduce_scatter(&staging, &part.view(), name, &*comm)?;
            staging.view()
        } else {
            if self.plan.ranks > 1 {
                self.comm.all_reduce(&part, name, &*comm)?;
            }
            part.view()
        };
        if self.options.offload {
            comm.record(&self.produced)?;
            acc.wait(&self.produced)?;
        }
        if !direct {
            match (&running, &self.arrived) {
                (Some(_), Some(arrived)) => {
                    let arrived = arrived.slice(0, held)?;
                    acc.copy(&arrived, &reduced)?;
                    add(&fresh, &arrived.view())?;
                }
                (Some(_), None) => add(&fresh, &reduced)?,
                (None, _) => acc.copy(&fresh, &reduced)?,
            }
            if self.options.offload {
                // Whoever writes the leaf or the staging next waits for the copy.
                acc.record(&self.copied)?;
                comm.wait(&self.copied)?;
            }
        }
        let one = &mut self.uses[u];
        if self.options.deterministic {
            one.acc.push(fresh, held, &add)?;
        } else {
            one.root = Some(fresh);
        }
        acc.record(&one.done)?;
        Ok(())
    }

    /// Folds the groups of a use, reduces what is reduced once, and adds it to its segment's gradient; returns that, ready on the update
    /// stream, when it was the last use.
    fn finish_use(&mut self, u: usize) -> Result<Option<(usize, ViewMut)>> {
        let acc = self.acc_stream();
        let add = self.adder(&acc);
        let one = &mut self.uses[u];
        one.finished = true;
        let s = &self.plan.segments[one.segment];
        let held = one.acc.free.first().or(one.root.as_ref()).or(one.acc.stack.first().map(|x| &x.1)).map_or(0, |v| v.elems());
        if self.options.deterministic {
            one.root = one.acc.root(held, &add)?;
        }
        let root = match one.root.clone() {
            Some(root) => root,
            None => {
                let root = one.acc.take()?;
                acc.wait(&one.done)?;
                acc.fill(&root, 0.0)?;
                root
            }
        };
        one.root = Some(root.clone());
        if self.sets.is_empty() {
            let (compute, comm) = (&self.streams.compute, &self.streams.comm);
            compute.record(&one.done)?;
            comm.wait(&one.done)?;
            if self.plan.ranks > 1 {
                self.comm.all_reduce(&root, &self.plan.units[s.unit].name, &**comm)?;
            }
            comm.record(&one.done)?;
            acc.wait(&one.done)?;
        }
        let segment = one.segment;
        let sum = match self.sums.iter_mut().find(|sum| sum.segment == segment) {
            Some(sum) => {
                add(&sum.view, &root.view())?;
                sum
            }
            None => {
                let uses_left = self.uses.iter().filter(|u| u.segment == segment).count();
                self.sums.push(Sum { segment, view: root, uses_left });
                // Just pushed.
                let last = self.sums.len() - 1;
                &mut self.sums[last]
            }
        };
        sum.uses_left -= 1;
        if sum.uses_left > 0 {
            return Ok(None);
        }
        let view = sum.view.clone();
        acc.record(&self.produced)?;
        self.streams.update.wait(&self.produced)?;
        Ok(Some((segment, view)))
    }

    /// Ends the step: finishes the uses that are left.
    /// Returns per trained segment (index, its gradient: this rank's shard at stages 2-3, else the whole), ready on the update stream.
    pub fn finish_step(&mut self) -> Result<Vec<(usize, ViewMut)>> {
        for u in 0..self.uses.len() {
            if !self.uses[u].finished {
                self.finish_use(u)?;
            }
        }
        let mut result: Vec<(usize, ViewMut)> = self.sums.drain(..).map(|sum| (sum.segment, sum.view)).collect();
        result.sort_by_key(|r| r.0);
        Ok(result)
    }

    /// The update has been enqueued: the accumulators may be written by the next step after this point of the update stream.
    pub fn release(&mut self) -> Result<()> {
        for one in &mut self.uses {
            one.finished = false;
            self.streams.update.record(&one.done)?;
            one.acc.reset();
            if let Some(root) = one.root.take()
                && one.acc.free.len() < one.acc.total
            {
                one.acc.free.push(root);
            }
        }
        Ok(())
    }
}
