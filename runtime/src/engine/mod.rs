//! One training step: the order of groups, visits and micro-batches. The loop itself is [`Engine::step`]:
//!
//! ```text
//! for each group of micro-batches:
//!     forward:  for visit in visits:    open | forward of every micro-batch | finish
//!     backward: for visit in reversed:  open | recompute, backward of every micro-batch | finish -> reduce
//! -> sum over groups and uses -> norm -> update, segment by segment
//! ```
//!
//! Everything is allocated in [`Engine::new`]; the same code on the simulated device is how memory is sized. The last visit runs
//! forward and backward in one opening. Results reach the host by one small readback per step.

mod look;
mod memory;
mod state;

pub use state::{ReadState, StateSink, WeightSink};

use crate::data::HostBatch;
use crate::error::{Error, Result};
use crate::grads::{GradOptions, GradStore};
use crate::model::{Batch, BatchShape, Cx, Grads, Model, Params, Pass, VisitSpec};
use crate::optim::Optimizer;
use crate::plan::{Digest, ShardPlan};
use crate::store::{OpenUnit, ParamStore, StoreOptions, Streams, WeightSource};
use memory::{VisitMemory, check_visits, plan_memory};
use std::sync::Arc;
use std::time::Duration;
use zrt_collectives::{Comm, Health};
use zrt_kernels::{AdamW, Category, DType, Device, Place, Readback, View, ViewMut};

/// How a step is cut and where things live.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineOptions {
    /// Sizes of a micro-batch.
    pub shape: BatchShape,
    /// `M`: micro-batches of a step over all ranks.
    pub micro_batches: usize,
    /// `G`: micro-batches of a rank that share one gather.
    pub group: usize,
    /// ZeRO stage, 0 to 3.
    pub stage: u8,
    /// Shards of weights live on the host (stage 3).
    pub offload_param: bool,
    /// Optimizer state and update live on the host.
    pub offload_optimizer: bool,
    /// Shards in shared pages (stage 3, one host).
    pub share_pages: bool,
    /// Units opened ahead.
    pub prefetch_depth: usize,
    /// Bytes of frozen units kept gathered.
    pub resident_bytes: u64,
    /// How many of the recomputable visits are recomputed, first ones first; `usize::MAX` for all.
    pub recompute: usize,
    /// Bit-equal results whatever the sharding.
    pub deterministic: bool,
    /// Clip the gradient norm to this.
    pub max_grad_norm: Option<f32>,
    /// Run seed: initialization and dropout.
    pub seed: u64,
    /// Fill released slots with NaN (with the CPU device's chaos mode).
    pub poison: bool,
}

impl EngineOptions {
    /// Everything on the device, no sharding; `micro_batches` per step.
    pub fn new(shape: BatchShape, micro_batches: usize) -> EngineOptions {
        EngineOptions {
            shape,
            micro_batches,
            group: 1,
            stage: 0,
            offload_param: false,
            offload_optimizer: false,
            share_pages: true,
            prefetch_depth: 1,
            resident_bytes: 0,
            recompute: 0,
            deterministic: false,
            max_grad_norm: None,
            seed: 0,
            poison: false,
        }
    }
}

/// What a step trains on. `batch(i)` is the i-th micro-batch of the step, asked only for those of this rank; `None`: absent.
pub struct StepInput<'a> {
    /// Optimizer step from 0: the dropout key.
    pub step: u64,
    /// Hyper-parameters; `hp.step` is set by the engine.
    pub hp: AdamW,
    /// Trained tokens of the whole step over all ranks: the loss is their mean.
    pub trained_tokens: u64,
    /// Micro-batches by global index.
    pub batch: &'a dyn Fn(usize) -> Result<Option<HostBatch>>,
    /// This rank wants the run to stop after this step.
    pub stop: bool,
}

/// What a step did; the same on all ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct StepOutput {
    /// Mean loss over the trained tokens of all ranks.
    pub loss: f64,
    /// L2 norm of the gradient before clipping.
    pub grad_norm: f32,
    /// False when the gradient was not finite: no weight has changed.
    pub applied: bool,
    /// Some rank asked to stop.
    pub stop: bool,
}

/// Tokens of a micro-batch on the device.
struct BatchBuffers {
    ids: ViewMut,
    labels: ViewMut,
    positions: ViewMut,
    cu_seqlens: ViewMut,
}

/// The training engine of one rank.
pub struct Engine {
    device: Arc<dyn Device>,
    comm: Comm,
    streams: Streams,
    model: Arc<dyn Model>,
    plan: Arc<ShardPlan>,
    options: EngineOptions,
    visits: Vec<VisitSpec>,
    memory: Vec<VisitMemory>,
    store: ParamStore,
    grads: GradStore,
    optimizer: Optimizer,
    batches: Vec<BatchBuffers>,
    /// Per micro-batch: gradient of the running boundary, two buffers when some visit is not in place.
    d: Vec<[ViewMut; 2]>,
    /// Which of the two holds the gradient of a visit's output.
    d_side: Vec<usize>,
    loss: ViewMut,
    /// `[M + 2]`: loss sum of each micro-batch, stop requests, spare.
    control: ViewMut,
    workspace: ViewMut,
    tables: Vec<View>,
    /// First visit that trains something.
    first_trained: usize,
    /// Updates applied so far.
    updates: u64,
}

impl Engine {
    /// Plans, allocates everything a run needs, and makes sure that all ranks planned the same. Collective.
    pub fn new(device: Arc<dyn Device>, comm: Comm, model: Arc<dyn Model>, options: EngineOptions) -> Result<Engine> {
        if options.micro_batches < comm.ranks() || !options.group.is_power_of_two() {
            return Err(Error::Model(format!(
                "{} micro-batches over {} ranks in groups of {}: expected at least one for each rank, and a power of two",
                options.micro_batches,
                comm.ranks(),
                options.group
            )));
        }
        let visits = model.visits(options.shape, device.ops());
        let plan = Arc::new(ShardPlan::new(model.units(), options.shape.compute, comm.ranks())?);
        check_visits(&visits, &plan)?;
        let streams = Streams::new(&*device)?;
        let store_options = StoreOptions {
            stage: options.stage,
            offload_param: options.offload_param,
            offload_optimizer: options.offload_optimizer,
            share_pages: options.share_pages,
            prefetch_depth: options.prefetch_depth,
            resident_bytes: options.resident_bytes,
            poison: options.poison,
        };
        let store = ParamStore::new(plan.clone(), &visits, device.clone(), comm.clone(), streams.clone(), store_options)?;
        let grad_options = GradOptions {
            stage: options.stage,
            offload: options.offload_optimizer,
            deterministic: options.deterministic,
            group: options.group,
            groups: options.micro_batches.div_ceil(comm.ranks() * options.group),
        };
        let grads = GradStore::new(plan.clone(), &visits, device.clone(), comm.clone(), streams.clone(), grad_options)?;
        let optimizer =
            Optimizer::new(plan.clone(), &store, device.clone(), comm.clone(), streams.clone(), options.stage, options.offload_optimizer)?;
        let (n, t) = (options.shape.tokens, options.shape.compute);
        let alloc = |name: &str, elems: usize, dtype: DType, category: Category| -> Result<ViewMut> {
            let bytes = (elems * dtype.bytes()).max(64);
            Ok(device.alloc(name, bytes, Place::Device, category)?.view_mut(dtype, 0, elems)?)
        };
        let group = options.group.min(options.micro_batches).max(1);
        let first_trained = (0..visits.len()).find(|&v| grads.trains(v)).unwrap_or(visits.len());
        let memory = plan_memory(&visits, &options, group, first_trained, &*device)?;
        let mut side = 0;
        let mut d_side = vec![0; visits.len()];
        for v in (0..visits.len()).rev() {
            d_side[v] = side;
            side ^= usize::from(!visits[v].in_place);
        }
        let two = visits.iter().skip(1).rev().skip(1).any(|v| !v.in_place);
        let largest = visits.iter().map(|v| v.output).max().unwrap_or(0);
        let mut d = Vec::new();
        let mut batches = Vec::new();
        for j in 0..group {
            let one = alloc(&format!("boundary gradient {j}"), largest, t, Category::Activations)?;
            let other = if two { alloc(&format!("boundary gradient' {j}"), largest, t, Category::Activations)? } else { one.clone() };
            d.push([one, other]);
            let ints = |name: &str, elems| alloc(&format!("{name} {j}"), elems, DType::I32, Category::Workspace);
            batches.push(BatchBuffers {
                ids: ints("ids", n)?,
                labels: ints("labels", n)?,
                positions: ints("positions", n)?,
                cu_seqlens: ints("cu_seqlens", n + 1)?,
            });
        }
        let loss = alloc("token loss", n, DType::F32, Category::Workspace)?;
        let control = alloc("losses", options.micro_batches + 2, DType::F32, Category::Workspace)?;
        let bytes = visits.iter().map(|v| v.workspace_bytes).max().unwrap_or(0);
        let workspace = alloc("workspace", bytes, DType::U8, Category::Workspace)?;
        let mut tables = Vec::new();
        for (i, table) in model.tables().into_iter().enumerate() {
            let view = alloc(&format!("table {i}"), table.len(), DType::F32, Category::Workspace)?;
            streams.compute.write(&view, "table", Box::new(move |dst| fill_bytes(dst, &table)))?;
            tables.push(view.view());
        }
        let engine = Engine {
            device,
            comm,
            streams,
            model,
            plan,
            options,
            visits,
            memory,
            store,
            grads,
            optimizer,
            batches,
            d,
            d_side,
            loss,
            control,
            workspace,
            tables,
            first_trained,
            updates: 0,
        };
        engine.compare_plans()?;
        Ok(engine)
    }

    /// All ranks must have planned the same: the sum of the digests' parts over ranks must be ranks times our own.
    fn compare_plans(&self) -> Result<()> {
        let mut d = Digest(self.plan.digest());
        d.text(&format!("{:?}", self.options));
        for v in &self.visits {
            d.text(&v.name);
            v.units.iter().chain([&v.input, &v.output, &v.workspace_bytes]).for_each(|&n| d.number(n));
            d.number(usize::from(v.in_place) + 2 * usize::from(v.recompute));
            for t in v.acts.iter().chain(&v.scratch) {
                d.text(t.name);
                d.number(t.elems);
                d.number(t.dtype as usize);
            }
        }
        self.comm.barrier(&format!("plan {:016x}", d.0), &*self.streams.comm)?;
        self.sync()
    }

    /// Fills weights and optimizer state. Collective.
    pub fn load(&mut self, source: &Arc<dyn WeightSource>) -> Result<()> {
        self.store.load(source).map_err(|e| self.explain(e))?;
        let Engine { optimizer, store, grads, .. } = self;
        optimizer.load(store, source, grads.scratch())?;
        self.sync()
    }

    /// One optimizer step. Collective: all ranks call it with the same step, rates and counts.
    pub fn step(&mut self, input: &StepInput) -> Result<StepOutput> {
        self.run_step(input).map_err(|e| self.explain(e))
    }

    fn run_step(&mut self, input: &StepInput) -> Result<StepOutput> {
        let (m, ranks, g) = (self.options.micro_batches, self.comm.ranks(), self.options.group);
        let mut flags = vec![0f32; m + 2];
        flags[m] = f32::from(u8::from(input.stop));
        self.streams.compute.write(&self.control, "losses", Box::new(move |dst| fill_bytes(dst, &flags)))?;
        for group in 0..m.div_ceil(ranks * g) {
            let batches = self.upload_group(group, input)?;
            self.forward(&batches, Pass::Train)?;
            self.backward(&batches, (group + 1) * ranks * g >= m)?;
        }
        let grads = self.grads.finish_step()?;
        let hp = AdamW { step: self.updates + 1, ..input.hp };
        let Engine { optimizer, store, .. } = self;
        let norm = optimizer.step(store, &grads, hp, self.options.max_grad_norm)?;
        self.grads.release()?;
        let control = self.share_control("losses")?;
        let norm = self.wait(&norm)?;
        let control = self.wait(&control)?;
        let applied = norm[1].is_finite();
        self.updates += u64::from(applied);
        let total: f64 = control[..m].iter().map(|&l| f64::from(l)).sum();
        Ok(StepOutput { loss: total / input.trained_tokens.max(1) as f64, grad_norm: norm[0], applied, stop: control[m] > 0.0 })
    }

    /// Sums `control` over ranks (each slot has one writer) and sends it to the host.
    fn share_control(&mut self, tag: &str) -> Result<Readback> {
        let event = self.device.event()?;
        self.streams.compute.record(&event)?;
        self.streams.comm.wait(&event)?;
        if self.comm.ranks() > 1 {
            self.comm.all_reduce(&self.control, tag, &*self.streams.comm)?;
        }
        let readback = self.streams.comm.read(&self.control.view())?;
        self.streams.comm.record(&event)?;
        self.streams.compute.wait(&event)?;
        Ok(readback)
    }

    /// This rank's micro-batches of a group, up to the last that has something to train.
    fn upload_group(&self, group: usize, input: &StepInput) -> Result<Vec<Batch>> {
        let (m, g) = (self.options.micro_batches, self.options.group);
        let first = (group * self.comm.ranks() + self.comm.rank()) * g;
        let mut hosts = (first..(first + g).min(m)).map(|i| (input.batch)(i)).collect::<Result<Vec<_>>>()?;
        // Only the end of a group may be missing: what is left out in the middle would change the tree of gradients.
        while hosts.last().is_some_and(|h| h.as_ref().is_none_or(|h| h.trained == 0)) {
            hosts.pop();
        }
        let upload = |(j, host): (usize, Option<HostBatch>)| {
            let host = host.ok_or_else(|| Error::Model(format!("micro-batch {} is absent, but a later one is not", first + j)))?;
            self.upload(j, host, first + j, input)
        };
        hosts.into_iter().enumerate().map(upload).collect()
    }

    fn upload(&self, j: usize, host: HostBatch, index: usize, input: &StepInput) -> Result<Batch> {
        let b = &self.batches[j];
        for (what, view, data) in [
            ("ids", &b.ids, host.ids),
            ("labels", &b.labels, host.labels),
            ("positions", &b.positions, host.positions),
            ("cu_seqlens", &b.cu_seqlens, host.cu_seqlens),
        ] {
            if data.len() != view.elems() {
                return Err(Error::Model(format!("batch: {what} has {} elements, expected {}", data.len(), view.elems())));
            }
            self.streams.compute.write(view, what, Box::new(move |dst| fill_bytes(dst, &data)))?;
        }
        Ok(Batch {
            ids: b.ids.view(),
            labels: b.labels.view(),
            positions: b.positions.view(),
            cu_seqlens: b.cu_seqlens.view(),
            documents: host.documents,
            loss: self.loss.clone(),
            grad_scale: (1.0 / input.trained_tokens.max(1) as f64) as f32,
            step: input.step as u32,
            index: index as u32,
        })
    }

    fn open(&mut self, visit: usize) -> Result<(Params, Vec<OpenUnit>)> {
        let units = self.visits[visit].units.clone();
        let open = units.iter().map(|&u| self.store.open(u)).collect::<Result<Vec<_>>>()?;
        Ok((Params { views: open.iter().map(|o| o.params.clone()).collect() }, open))
    }

    fn finish(&mut self, open: Vec<OpenUnit>) -> Result<()> {
        open.into_iter().try_for_each(|o| self.store.finish(o))
    }

    /// Starts opening the visits after `visit` in the running direction, `prefetch_depth` of them.
    fn prefetch(&mut self, visit: usize, backward: bool) -> Result<()> {
        for depth in 1..=self.options.prefetch_depth {
            let next = if backward { visit.checked_sub(depth).filter(|&v| v >= self.first_trained) } else { Some(visit + depth) };
            let Some(spec) = next.and_then(|v| self.visits.get(v)) else { break };
            for u in spec.units.clone() {
                self.store.prefetch(u)?;
            }
        }
        Ok(())
    }

    fn cx(&self, visit: usize, pass: Pass) -> Cx<'_> {
        Cx {
            ops: self.device.ops(),
            stream: &*self.streams.compute,
            workspace: self.workspace.clone(),
            scratch: &self.memory[visit].scratch,
            tables: &self.tables,
            pass,
            seed: self.options.seed,
        }
    }

    fn run_forward(&self, visit: usize, w: &Params, j: usize, batch: &Batch, pass: Pass) -> Result<()> {
        let x = visit.checked_sub(1).map(|p| self.memory[p].outputs[j].view());
        let acts = self.acts(visit, j);
        self.model.forward(&self.cx(visit, pass), visit, w, self.memory[visit].outputs.get(j), x.as_ref(), acts, batch)
    }

    fn acts(&self, visit: usize, j: usize) -> &[ViewMut] {
        let acts = &self.memory[visit].acts;
        &acts[j.min(acts.len() - 1)]
    }

    /// Forward of all visits but the last.
    fn forward(&mut self, batches: &[Batch], pass: Pass) -> Result<()> {
        for visit in 0..self.visits.len() - 1 {
            let (w, open) = self.open(visit)?;
            self.prefetch(visit, false)?;
            for (j, batch) in batches.iter().enumerate() {
                self.run_forward(visit, &w, j, batch, pass)?;
            }
            self.finish(open)?;
        }
        Ok(())
    }

    /// The last visit forward and backward in one opening, then the others in reverse down to the first that trains.
    /// In the `last` group of a step gradients become final one by one, and the optimizer adds up their squares meanwhile.
    fn backward(&mut self, batches: &[Batch], last_group: bool) -> Result<()> {
        let last = self.visits.len() - 1;
        for visit in (self.first_trained.min(last)..=last).rev() {
            let (w, open) = self.open(visit)?;
            self.prefetch(visit, true)?;
            self.grads.begin(visit)?;
            for (j, batch) in batches.iter().enumerate() {
                if visit == last || self.memory[visit].recompute {
                    self.run_forward(visit, &w, j, batch, Pass::Train)?;
                }
                let units = &self.visits[visit].units;
                let grads = if self.grads.trains(visit) { self.grads.leaf(visit, units)? } else { Grads::none(units.len()) };
                self.run_backward(visit, &w, &grads, j, batch)?;
                self.grads.fold(visit)?;
                if visit == last {
                    let slot = self.control.slice(batch.index as usize, 1)?;
                    self.device.ops().sum(&slot, &self.loss.view(), &*self.streams.compute)?;
                }
            }
            self.finish(open)?;
            for (segment, g) in self.grads.reduce(visit, last_group)? {
                self.optimizer.gradient_is_final(segment, &g)?;
            }
        }
        Ok(())
    }

    fn run_backward(&self, visit: usize, w: &Params, grads: &Grads, j: usize, batch: &Batch) -> Result<()> {
        let spec = &self.visits[visit];
        let x = visit.checked_sub(1).map(|p| self.memory[p].outputs[j].view());
        let side = self.d_side[visit];
        let cut = |side: usize, elems: usize| -> Result<Option<ViewMut>> {
            if elems == 0 { Ok(None) } else { Ok(Some(self.d[j][side].slice(0, elems)?)) }
        };
        let dy = cut(side, spec.output)?;
        let dx = if visit > self.first_trained { cut(side ^ usize::from(!spec.in_place), spec.input)? } else { None };
        let acts = self.acts(visit, j);
        self.model.backward(&self.cx(visit, Pass::Train), visit, w, grads, dx.as_ref(), dy.as_ref(), x.as_ref(), acts, batch)
    }

    fn wait(&self, readback: &Readback) -> Result<Vec<f32>> {
        let bytes = self.wait_bytes(readback)?;
        Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    }

    /// Waits as long as the group is healthy: collectives have deadlines of their own, and compute always ends.
    fn wait_bytes(&self, readback: &Readback) -> Result<Vec<u8>> {
        loop {
            match readback.bytes(Duration::from_secs(1)) {
                // After an abort a GPU's streams go on over undefined data; the group was marked lost before that.
                Ok(bytes) => match self.comm.health() {
                    Health::Good => return Ok(bytes),
                    Health::Lost(e) => return Err(e.into()),
                },
                Err(zrt_kernels::Error::Deadline { .. }) => {
                    if let Health::Lost(e) = self.comm.health() {
                        return Err(e.into());
                    }
                }
                Err(e) => return Err(self.explain(e.into())),
            }
        }
    }

    /// Waits for all streams.
    pub fn sync(&self) -> Result<()> {
        for s in [&self.streams.compute, &self.streams.copy, &self.streams.comm, &self.streams.update] {
            s.sync().map_err(|e| self.explain(e.into()))?;
        }
        Ok(())
    }

    /// A stream's error is often the echo of a lost group: prefer the communicator's own account.
    fn explain(&self, error: Error) -> Error {
        match (error, self.comm.health()) {
            // This rank gave the group up itself, since one of its streams failed.
            (error, Health::Lost(lost @ zrt_collectives::Error::Aborted { by, .. })) if by == self.comm.rank() => {
                self.failure_before(&lost).map_or(error, |source| Error::Device { rank: by, source })
            }
            (Error::Device { .. }, Health::Lost(lost)) => lost.into(),
            (Error::Device { source, .. }, Health::Good) => Error::Device { rank: self.comm.rank(), source },
            (other, _) => other,
        }
    }

    /// The error of a stream that is not itself told of `lost`.
    fn failure_before(&self, lost: &zrt_collectives::Error) -> Option<zrt_kernels::Error> {
        let (lost, event) = (lost.to_string(), self.device.event().ok()?);
        let streams = [&self.streams.compute, &self.streams.copy, &self.streams.update, &self.streams.comm];
        // Nothing is waited for: a stream that failed takes no more work and says why.
        streams.into_iter().filter_map(|s| s.record(&event).err()).find(|e| !e.to_string().contains(&lost))
    }

    /// The layout.
    pub fn plan(&self) -> &ShardPlan {
        &self.plan
    }

    /// The visits.
    pub fn visits(&self) -> &[VisitSpec] {
        &self.visits
    }

    /// The options it was made with.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// Updates applied so far.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// Bytes of weights in pages that all ranks of the host share.
    pub fn shared_bytes(&self) -> usize {
        self.store.shared_bytes()
    }

    /// all_gather calls that filled slots so far.
    pub fn gathers(&self) -> u64 {
        self.store.gathers()
    }

    /// Useful floating-point operations of one micro-batch: forward and backward, without recomputation.
    pub fn flops_per_micro_batch(&self) -> f64 {
        self.visits.iter().map(|v| v.flops.0 + v.flops.1).sum()
    }

    /// The device.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// The communicator.
    pub fn comm(&self) -> &Comm {
        &self.comm
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // Streams drain before memory that they use is returned; errors were reported where they mattered.
        let _ = self.sync();
    }
}

const NO_UPDATE: AdamW = AdamW { lr: 0.0, beta1: 0.0, beta2: 0.0, eps: 1.0, weight_decay: 0.0, step: 1 };

/// Copies values into a destination of the same bytes.
fn fill_bytes<T: bytemuck::Pod>(dst: &mut [u8], values: &[T]) -> std::result::Result<(), String> {
    let src: &[u8] = bytemuck::cast_slice(values);
    if src.len() != dst.len() {
        return Err(format!("{} bytes for a destination of {}", src.len(), dst.len()));
    }
    dst.copy_from_slice(src);
    Ok(())
}
