//! Looking without training: held-out loss, per-token losses, gradients, and the hunt for a number that is not finite.

use super::{Engine, NO_UPDATE, StepInput, fill_bytes};
use crate::data::HostBatch;
use crate::error::{Error, Result};
use crate::model::{Grads, Pass};
use zrt_kernels::View;

impl Engine {
    /// Mean loss over `batches` (all ranks together evaluate `count` micro-batches; `batch(i)` is asked for those of this rank), and its tokens.
    /// Collective.
    pub fn evaluate(&mut self, count: usize, batch: &dyn Fn(usize) -> Result<Option<HostBatch>>) -> Result<(f64, u64)> {
        let m = self.options.micro_batches;
        let (rank, ranks) = (self.comm.rank(), self.comm.ranks());
        let (mut total, mut tokens) = (0f64, 0u64);
        let last = self.visits.len() - 1;
        // The control buffer holds M sums: evaluate in rounds of at most M micro-batches, a whole number per rank.
        let per_round = (m / ranks).max(1) * ranks;
        for round in 0..count.div_ceil(per_round) {
            let zeros = vec![0f32; m + 2];
            self.streams.compute.write(&self.control, "losses", Box::new(move |dst| fill_bytes(dst, &zeros)))?;
            let mut trained = 0u64;
            for k in 0..per_round / ranks {
                let index = round * per_round + k * ranks + rank;
                let host = if index < count { batch(index)?.filter(|h| h.trained > 0) } else { None };
                let mut batches = Vec::new();
                if let Some(host) = host {
                    trained += host.trained;
                    let input = StepInput { step: 0, hp: NO_UPDATE, trained_tokens: 1, batch, stop: false };
                    batches.push(self.upload(0, host, index, &input)?);
                }
                self.forward(&batches, Pass::Eval)?;
                let (w, open) = self.open(last)?;
                for batch in &batches {
                    self.run_forward(last, &w, 0, batch, Pass::Eval)?;
                    let slot = self.control.slice(k * ranks + rank, 1)?;
                    self.device.ops().sum(&slot, &self.loss.view(), &*self.streams.compute)?;
                }
                self.finish(open)?;
            }
            // Token counts as f32 are exact below 2^24.
            let count_slot = self.control.slice(m + 1, 1)?;
            let counted = trained as f32;
            self.streams.compute.write(&count_slot, "tokens", Box::new(move |dst| fill_bytes(dst, &[counted])))?;
            let sums = self.share_control("evaluation")?;
            let sums = self.wait(&sums)?;
            // One running sum in index order: the rounds, which depend on the ranks, leave no trace.
            total = sums[..m].iter().fold(total, |sum, &l| sum + f64::from(l));
            tokens += sums[m + 1] as u64;
        }
        Ok((total / tokens.max(1) as f64, tokens))
    }

    /// Per-token losses of one micro-batch, `[N]`. Collective when weights are sharded: all ranks call it alike.
    pub fn token_losses(&mut self, host: HostBatch) -> Result<Vec<f32>> {
        let input = StepInput { step: 0, hp: NO_UPDATE, trained_tokens: 1, batch: &|_| Ok(None), stop: false };
        let batch = vec![self.upload(0, host, 0, &input)?];
        self.forward(&batch, Pass::Eval)?;
        let last = self.visits.len() - 1;
        let (w, open) = self.open(last)?;
        self.run_forward(last, &w, 0, &batch[0], Pass::Eval)?;
        self.finish(open)?;
        let readback = self.streams.compute.read(&self.loss.view())?;
        self.wait(&readback)
    }

    /// Gradients of one step without updating: (parameter name, gradient) for every trained parameter this rank holds whole.
    /// For tests and inspection; meant for stages 0-1 or one rank.
    pub fn gradients(&mut self, input: &StepInput) -> Result<Vec<(String, Vec<f32>)>> {
        let (m, ranks, g) = (self.options.micro_batches, self.comm.ranks(), self.options.group);
        for group in 0..m.div_ceil(ranks * g) {
            let batches = self.upload_group(group, input)?;
            self.forward(&batches, Pass::Train)?;
            self.backward(&batches, false)?;
        }
        let grads = self.grads.finish_step()?;
        let mut out = Vec::new();
        for (segment, g) in &grads {
            let s = &self.plan.segments[*segment];
            if g.elems() < s.padded {
                return Err(Error::Model("gradients() needs a stage that holds whole gradients".into()));
            }
            let readback = self.streams.update.read(&g.view())?;
            let all = self.wait(&readback)?;
            for slice in &s.slices {
                let name = self.plan.units[s.unit].params[slice.param].name.clone();
                out.push((name, all[slice.start..slice.start + slice.elems].to_vec()));
            }
        }
        self.grads.release()?;
        Ok(out)
    }

    /// Runs the step's forward and backward again without updating, looking at every boundary and gradient, and names the first
    /// tensor of this rank that is not finite, with its micro-batch. `None`: nothing found on this rank. Collective.
    pub fn find_nonfinite(&mut self, input: &StepInput) -> Result<Option<(String, usize)>> {
        let (m, ranks) = (self.options.micro_batches, self.comm.ranks());
        let mut found: Option<(String, usize)> = None;
        let per_rank = m.div_ceil(ranks * self.options.group) * self.options.group;
        let last = self.visits.len() - 1;
        for k in 0..per_rank {
            let (group, j) = (k / self.options.group, k % self.options.group);
            let index = (group * ranks + self.comm.rank()) * self.options.group + j;
            let host = if index < m { (input.batch)(index)?.filter(|h| h.trained > 0) } else { None };
            let batches = host.map(|h| self.upload(0, h, index, input)).transpose()?;
            let mut note = |engine: &Engine, name: String, view: &View| -> Result<()> {
                if found.is_none() && engine.count_nonfinite(view)? > 0.0 {
                    found = Some((name, index));
                }
                Ok(())
            };
            for visit in 0..=last {
                let (w, open) = self.open(visit)?;
                if let Some(batch) = &batches {
                    for (unit, views) in self.visits[visit].units.iter().zip(&w.views) {
                        for (spec, view) in self.plan.units[*unit].params.iter().zip(views) {
                            note(self, format!("weight {}", spec.name), view)?;
                        }
                    }
                    if visit < last {
                        self.run_forward(visit, &w, 0, batch, Pass::Train)?;
                        note(self, format!("output of {}", self.visits[visit].name), &self.memory[visit].outputs[0].view())?;
                    }
                }
                self.finish(open)?;
            }
            for visit in (self.first_trained.min(last)..=last).rev() {
                let (w, open) = self.open(visit)?;
                self.grads.begin(visit)?;
                if let Some(batch) = &batches {
                    if visit == last || self.memory[visit].recompute {
                        self.run_forward(visit, &w, 0, batch, Pass::Train)?;
                    }
                    let units = self.visits[visit].units.clone();
                    let grads = if self.grads.trains(visit) { self.grads.leaf(visit, &units)? } else { Grads::none(units.len()) };
                    self.run_backward(visit, &w, &grads, 0, batch)?;
                    if visit == last {
                        note(self, "loss".into(), &self.loss.view())?;
                    }
                    for (unit, views) in units.iter().zip(&grads.views) {
                        for (spec, view) in self.plan.units[*unit].params.iter().zip(views) {
                            if let Some(view) = view {
                                note(self, format!("gradient of {}", spec.name), &view.view())?;
                            }
                        }
                    }
                    if visit > self.first_trained {
                        let side = self.d_side[visit] ^ usize::from(!self.visits[visit].in_place);
                        let view = self.d[0][side].slice(0, self.visits[visit].input)?.view();
                        note(self, format!("gradient of the input of {}", self.visits[visit].name), &view)?;
                    }
                    self.grads.discard();
                }
                self.finish(open)?;
            }
        }
        self.grads.release()?;
        // The next word between ranks is one of the store: be done here before it is waited for.
        self.sync()?;
        Ok(found)
    }

    fn count_nonfinite(&self, view: &View) -> Result<f32> {
        let out = self.control.slice(self.options.micro_batches + 1, 1)?;
        self.device.ops().count_nonfinite(&out, view, &*self.streams.compute)?;
        let readback = self.streams.compute.read(&out.view())?;
        Ok(self.wait(&readback)?[0])
    }
}
