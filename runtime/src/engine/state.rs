//! State in and out of an engine, by name and range: what checkpoints and exports are made of.

use super::{Engine, fill_bytes};
use crate::checkpoint::Kind;
use crate::error::Result;
use crate::plan::{ParamKind, ParamSpec};
use std::sync::Arc;
use zrt_kernels::DType;

/// Receives a piece of state: kind, parameter, first element, values.
pub type StateSink<'a> = dyn FnMut(Kind, &str, usize, &[f32]) -> Result<()> + 'a;

/// Receives one exported parameter: its specification, element type and bytes.
pub type WeightSink<'a> = dyn FnMut(&ParamSpec, DType, Vec<u8>) -> Result<()> + 'a;

/// Optimizer state by name and range, from a checkpoint.
pub trait ReadState: Send + Sync {
    /// Fills `out` with elements from `start` on of `kind` of parameter `name`.
    fn read(&self, kind: Kind, name: &str, start: usize, out: &mut [f32]) -> std::result::Result<(), String>;
}

/// Elements of state that are in memory a second time while it is exported: an embedding has many times as many.
const EXPORT_ELEMS: usize = 2 << 20;

impl Engine {
    /// Hands every trained parameter's part that this rank owns to `sink`, as (kind, name, first element, values), at most
    /// 8 MiB of them at a time.
    pub fn export_state(&mut self, sink: &mut StateSink) -> Result<()> {
        for i in 0..self.optimizer.parts.len() {
            let part = &self.optimizer.parts[i];
            let s = &self.plan.segments[part.segment];
            // The owned shard, also where the rank holds more.
            let first = self.comm.rank() * s.shard;
            for (kind, view) in [(Kind::Weight, part.param.clone()), (Kind::M, part.m.clone()), (Kind::V, part.v.clone())] {
                for (param, from, at, elems) in s.pieces(first, first + s.shard) {
                    for done in (0..elems).step_by(EXPORT_ELEMS) {
                        let here = EXPORT_ELEMS.min(elems - done);
                        let readback = self.streams.update.read(&view.slice(first - part.start + at + done, here)?.view())?;
                        let values = self.wait(&readback)?;
                        sink(kind, &self.plan.units[s.unit].params[param].name, from + done, &values)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Sets moments and the number of updates from `read(kind, name, start, out)`; weights come through [`Engine::load`]. Collective.
    pub fn import_state(&mut self, updates: u64, read: Arc<dyn ReadState>) -> Result<()> {
        for part in &self.optimizer.parts {
            let s = &self.plan.segments[part.segment];
            for (kind, view) in [(Kind::M, &part.m), (Kind::V, &part.v)] {
                for (param, from, at, elems) in s.pieces(part.start, part.start + part.param.elems()) {
                    let name = self.plan.units[s.unit].params[param].name.clone();
                    let read = read.clone();
                    let source = Box::new(move |dst: &mut [u8]| {
                        let mut values = vec![0f32; dst.len() / 4];
                        read.read(kind, &name, from, &mut values)?;
                        fill_bytes(dst, &values)
                    });
                    self.streams.update.write(&view.slice(at, elems)?, "optimizer state", source)?;
                }
            }
        }
        self.updates = updates;
        self.sync()
    }

    /// Opens one unit and reads its parameters to the host, as stored bytes. Collective.
    pub fn unit_weights(&mut self, unit: usize) -> Result<Vec<(ParamSpec, Vec<u8>)>> {
        let specs = self.plan.units[unit].params.clone();
        let open = self.store.open(unit)?;
        let mut out = Vec::with_capacity(specs.len());
        for (spec, view) in specs.into_iter().zip(&open.params) {
            let readback = self.streams.compute.read(view)?;
            out.push((spec, self.wait_bytes(&readback)?));
        }
        self.store.finish(open)?;
        Ok(out)
    }

    /// Hands each parameter that `want` chooses to `sink` on every rank, as stored bytes, one unit in memory at a time. Collective.
    pub fn export_weights(&mut self, want: &dyn Fn(&ParamSpec) -> bool, sink: &mut WeightSink) -> Result<()> {
        for unit in 0..self.plan.units.len() {
            if self.plan.units[unit].params.iter().any(want) {
                for (spec, bytes) in self.unit_weights(unit)?.into_iter().filter(|(s, _)| want(s)) {
                    let dtype = if spec.kind == ParamKind::Adapter { DType::F32 } else { self.options.shape.compute };
                    sink(&spec, dtype, bytes)?;
                }
            }
        }
        Ok(())
    }
}
