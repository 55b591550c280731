//! Optimizer state and the update: where the state lives, one job per segment.
//!
//! Each trained segment has moments `m`, `v` (f32) for the part this rank updates: its shard, or all of it at stage 0. The f32
//! master weight is the weight itself where weights are f32 and live with the state; else a copy of its own.
//! The update runs on the update stream and ends by putting the new weights in their home, so the next step's
//! opening of a unit waits for that unit's update alone.

use crate::error::{Error, Result};
use crate::plan::{Holds, Placement, ShardPlan};
use crate::store::{ParamStore, Streams, WeightSource};
use std::sync::Arc;
use zrt_collectives::Comm;
use zrt_kernels::ops::{SUM_SQUARES_CHUNK, SUM_SQUARES_NODES};
use zrt_kernels::{AdamW, Category, DType, Device, Event, OpShape, Place, Readback, View, ViewMut};

/// State of one trained segment.
pub struct SegmentOptim {
    /// Index in the plan.
    pub segment: usize,
    /// First element of the part this rank updates.
    pub start: usize,
    /// f32 weights of the part: the master, or the weights themselves.
    pub param: ViewMut,
    /// First moment.
    pub m: ViewMut,
    /// Second moment.
    pub v: ViewMut,
    /// Whether `param` is a master apart from the weights.
    master: bool,
}

/// The optimizer of one rank.
pub struct Optimizer {
    plan: Arc<ShardPlan>,
    device: Arc<dyn Device>,
    comm: Comm,
    streams: Streams,
    stage: u8,
    /// Per trained segment, in plan order.
    pub parts: Vec<SegmentOptim>,
    /// `[segments, 96]` of this rank, then of all ranks.
    nodes: ViewMut,
    all_nodes: ViewMut,
    /// The same on the device, where the state is on the host and ranks exchange them.
    exchange: Option<[ViewMut; 2]>,
    workspace: ViewMut,
    /// `[2]`: norm and clipping factor.
    norm: ViewMut,
    staging: Option<ViewMut>,
    event: Arc<dyn Event>,
    gathered: Arc<dyn Event>,
}

impl Optimizer {
    /// Allocates the state. `offload` puts it on the host. Where weights are at home elsewhere than the state, the state has a master of them.
    pub fn new(
        plan: Arc<ShardPlan>,
        store: &ParamStore,
        device: Arc<dyn Device>,
        comm: Comm,
        streams: Streams,
        stage: u8,
        offload: bool,
    ) -> Result<Optimizer> {
        let sharded = Placement::of(stage).state == Holds::Shard;
        let place = if offload { Place::Pinned } else { Place::Device };
        let mut parts = Vec::new();
        let mut largest_chunks = 1;
        let mut largest_staging = 0;
        for (segment, s) in plan.segments.iter().enumerate().filter(|(_, s)| s.trainable) {
            let (start, elems) = if sharded { (comm.rank() * s.shard, s.shard) } else { (0, s.padded) };
            let name = &plan.units[s.unit].name;
            let alloc = |what: &str| -> Result<ViewMut> {
                Ok(device.alloc(&format!("{what} {name}"), elems * 4, place, Category::State)?.all(DType::F32)?)
            };
            let home = Self::target(store, segment, start, elems, sharded)?;
            let apart = home.place() != place;
            let master = offload || apart || s.dtype != DType::F32;
            let param = if master { alloc("master")? } else { home };
            if master && (offload || apart) {
                largest_staging = largest_staging.max(elems * s.dtype.bytes());
            }
            largest_chunks = largest_chunks.max(elems);
            parts.push(SegmentOptim { segment, start, param, m: alloc("m")?, v: alloc("v")?, master });
        }
        let small_in = |place: Place, name: &str, bytes: usize| device.alloc(name, bytes.max(64), place, Category::Workspace);
        let small = |name: &str, bytes: usize| small_in(place, name, bytes);
        let count = parts.len().max(1) * SUM_SQUARES_NODES;
        let ranks = if sharded { plan.ranks } else { 1 };
        let nodes = small("norm nodes", count * 4)?.view_mut(DType::F32, 0, count)?;
        let all_nodes =
            if ranks > 1 { small("norm nodes of all", ranks * count * 4)?.view_mut(DType::F32, 0, ranks * count)? } else { nodes.clone() };
        let exchange = if ranks > 1 && offload {
            let on_device = |name: &str, n: usize| Ok::<_, Error>(small_in(Place::Device, name, n * 4)?.view_mut(DType::F32, 0, n)?);
            Some([on_device("norm nodes to exchange", count)?, on_device("norm nodes exchanged", ranks * count)?])
        } else {
            None
        };
        let workspace =
            small("norm workspace", device.ops().workspace_bytes(OpShape::SumSquares { elems: largest_chunks }))?.all(DType::U8)?;
        let norm = small("norm", 64)?.view_mut(DType::F32, 0, 2)?;
        let staging = if largest_staging > 0 {
            Some(device.alloc("new weights", largest_staging, place, Category::State)?.all(DType::U8)?)
        } else {
            None
        };
        let (event, gathered) = (device.event()?, device.event()?);
        Ok(Optimizer { plan, device, comm, streams, stage, parts, nodes, all_nodes, exchange, workspace, norm, staging, event, gathered })
    }

    /// The part of the weights' home that this rank updates.
    fn target(store: &ParamStore, segment: usize, start: usize, elems: usize, sharded: bool) -> Result<ViewMut> {
        if sharded {
            return store.own_part(segment);
        }
        let whole = store.copy_of(segment).ok_or_else(|| Error::Model("stage 0 without a copy of the weights".into()))?;
        Ok(whole.slice(start, elems)?)
    }

    /// Sets masters, then the bf16 weights from them; moments to zero. Collective. Call after [`ParamStore::load`]. `scratch`: f32 on the
    /// device, as long as the longest trained segment, if there is any.
    pub fn load(&mut self, store: &mut ParamStore, source: &Arc<dyn WeightSource>, scratch: Option<&ViewMut>) -> Result<()> {
        let comm = self.streams.comm.clone();
        let ops = self.device.ops();
        for part in &self.parts {
            let s = &self.plan.segments[part.segment];
            let own = store.own_part(part.segment)?;
            comm.fill(&part.m, 0.0)?;
            comm.fill(&part.v, 0.0)?;
            if part.master {
                let at = self.comm.rank() * s.shard - part.start;
                let own_master = part.param.slice(at, s.shard)?;
                store.read_shard(part.segment, &own_master, source)?;
                if part.param.elems() > s.shard && self.plan.ranks > 1 {
                    self.complete_master(&part.param, s.shard, scratch)?;
                }
                match &self.staging {
                    // Who holds the master casts, the other gets the result.
                    Some(staging) if own.place() != part.param.place() => {
                        let narrow = staging.slice(0, own.bytes())?.reinterpret(own.dtype())?;
                        ops.cast(&narrow, &own_master.view(), &*comm)?;
                        comm.copy(&own, &narrow.view())?;
                    }
                    _ => ops.cast(&own, &own_master.view(), &*comm)?,
                }
                store.complete(part.segment, "load")?;
            }
        }
        comm.record(&self.event)?;
        self.streams.update.wait(&self.event)?;
        Ok(())
    }

    /// Completes a master that every rank holds whole from the ranks' shards, where it is at home on the host by way of `scratch` on the device.
    fn complete_master(&self, whole: &ViewMut, shard: usize, scratch: Option<&ViewMut>) -> Result<()> {
        let (comm, start) = (&self.streams.comm, self.comm.rank() * shard);
        let gather = |all: &ViewMut, own: &View| Ok::<_, Error>(self.comm.all_gather(all, own, "load master", &**comm)?);
        let Some(scratch) = scratch.filter(|_| whole.place() != Place::Device) else {
            return gather(whole, &whole.slice(start, shard)?.view());
        };
        let all = scratch.slice(0, whole.elems())?;
        let own = all.slice(start, shard)?;
        comm.copy(&own, &whole.slice(start, shard)?.view())?;
        gather(&all, &own.view())?;
        Ok(comm.copy(whole, &all.view())?)
    }

    /// Norm of all gradients, clipping factor, update of every segment. `grads` as [`crate::grads::GradStore::finish_step`] returns them.
    /// The [`Readback`] brings (norm, clipping factor); a factor that is NaN means that nothing was changed.
    pub fn step(&mut self, store: &mut ParamStore, grads: &[(usize, ViewMut)], hp: AdamW, max_norm: Option<f32>) -> Result<Readback> {
        let (update, comm) = (self.streams.update.clone(), self.streams.comm.clone());
        let ops = self.device.ops();
        let sharded = Placement::of(self.stage).state == Holds::Shard;
        let ranks = if sharded { self.plan.ranks } else { 1 };
        let mut parts = Vec::with_capacity(self.parts.len());
        for (i, part) in self.parts.iter().enumerate() {
            let (_, g) = grads.get(i).filter(|g| g.0 == part.segment).ok_or_else(|| Error::Model("gradient missing".into()))?;
            // A whole gradient (stage 1) is used by the part; a shard is the part.
            let g = if g.elems() > part.param.elems() { g.slice(part.start, part.param.elems())? } else { g.clone() };
            let nodes = self.nodes.slice(i * SUM_SQUARES_NODES, SUM_SQUARES_NODES)?;
            ops.sum_squares(&nodes, &g.view(), part.start / SUM_SQUARES_CHUNK, &self.workspace, &*update)?;
            parts.push(g.view());
        }
        if ranks > 1 {
            let [own, all] = match &self.exchange {
                Some([own, all]) => {
                    update.copy(own, &self.nodes.view())?;
                    [own, all]
                }
                None => [&self.nodes, &self.all_nodes],
            };
            update.record(&self.event)?;
            comm.wait(&self.event)?;
            self.comm.all_gather(all, &own.view(), "gradient norm", &*comm)?;
            comm.record(&self.event)?;
            update.wait(&self.event)?;
            if self.exchange.is_some() {
                update.copy(&self.all_nodes, &all.view())?;
            }
        }
        let mut ranges = Vec::with_capacity(ranks * self.parts.len());
        for rank in 0..ranks {
            for part in &self.parts {
                let chunks = part.param.elems() / SUM_SQUARES_CHUNK;
                ranges.push(((rank * chunks) as u64, chunks as u64));
            }
        }
        let (norm, scale) = (self.norm.slice(0, 1)?, self.norm.slice(1, 1)?);
        ops.clip_scale(&norm, &scale, &self.all_nodes.view(), &ranges, ranks, self.parts.len(), max_norm, &*update)?;
        let readback = update.read(&self.norm.view())?;
        for (i, g) in parts.iter().enumerate() {
            self.update(store, i, g, hp)?;
        }
        Ok(readback)
    }

    fn update(&mut self, store: &mut ParamStore, i: usize, g: &View, hp: AdamW) -> Result<()> {
        let (update, comm) = (&self.streams.update, &self.streams.comm);
        let part = &self.parts[i];
        let s = &self.plan.segments[part.segment];
        let elems = part.param.elems();
        let sharded = Placement::of(self.stage).state == Holds::Shard;
        let scale = self.norm.slice(1, 1)?.view();
        let ops = self.device.ops();
        if part.master {
            let home = Self::target(store, part.segment, part.start, elems, sharded)?;
            let out = match &self.staging {
                Some(staging) if home.place() != part.param.place() => staging.slice(0, elems * s.dtype.bytes())?.reinterpret(s.dtype)?,
                _ => home.clone(),
            };
            ops.adamw(&part.param, &part.m, &part.v, Some(&out), g, &scale, hp, &**update)?;
            if out.span() != home.span() {
                update.copy(&home, &out.view())?;
            }
        } else {
            ops.adamw(&part.param, &part.m, &part.v, None, g, &scale, hp, &**update)?;
        }
        let updated = store.updated(part.segment).clone();
        update.record(&updated)?;
        if let Some(whole) = store.copy_of(part.segment)
            && sharded
            && self.plan.ranks > 1
        {
            comm.wait(&updated)?;
            let own = whole.slice(part.start, elems)?;
            self.comm.all_gather(&whole, &own.view(), &format!("weights {}", self.plan.units[s.unit].name), &**comm)?;
            comm.record(&updated)?;
            comm.record(&self.gathered)?;
            update.wait(&self.gathered)?;
        }
        store.advance(part.segment);
        Ok(())
    }
}
