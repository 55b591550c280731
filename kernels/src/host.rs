//! Own operations for embedders: host code over plain slices, in a stream's order.
//!
//! What a model or a loss needs beyond [`crate::Ops`] can be written as ordinary Rust over slices. It runs where the memory is
//! the host's: on the CPU device; elsewhere the stream fails with [`Error::NotHost`].
#![allow(unsafe_code)]

use crate::{DType, Error, HostTask, Result, Stream, View, ViewMut};

/// The elements of an input.
#[derive(Clone, Copy, Debug)]
pub enum HostSlice<'a> {
    /// f32 elements.
    F32(&'a [f32]),
    /// bf16 elements.
    BF16(&'a [half::bf16]),
    /// i32 elements.
    I32(&'a [i32]),
}

impl<'a> HostSlice<'a> {
    /// The elements as f32, or an error text.
    pub fn f32s(self) -> std::result::Result<&'a [f32], String> {
        if let HostSlice::F32(x) = self { Ok(x) } else { Err("expected f32".into()) }
    }

    /// The elements as i32, or an error text.
    pub fn i32s(self) -> std::result::Result<&'a [i32], String> {
        if let HostSlice::I32(x) = self { Ok(x) } else { Err("expected i32".into()) }
    }
}

/// Enqueues `run(outputs, inputs)` on `s`. Outputs are f32 and must not overlap each other or the inputs.
///
/// # Errors
/// An output that is not f32, an input that is raw bytes, or operands that overlap; the text that `run` returns fails the stream.
pub fn run_on_slices(
    s: &dyn Stream,
    name: &'static str,
    outputs: &[&ViewMut],
    inputs: &[&View],
    run: impl FnOnce(&mut [&mut [f32]], &[HostSlice]) -> std::result::Result<(), String> + Send + 'static,
) -> Result<()> {
    for (i, out) in outputs.iter().enumerate() {
        if out.dtype() != DType::F32 {
            return Err(Error::Type { op: name, operand: "output", expected: "f32", got: out.dtype() });
        }
        let others = outputs[i + 1..].iter().map(|o| o.span()).chain(inputs.iter().map(|v| v.span()));
        let (id, start, end) = out.span();
        for (other, from, to) in others {
            if other == id && from < end && start < to {
                return Err(Error::Shape { op: name, what: "an output overlaps another operand".into() });
            }
        }
    }
    if let Some(bad) = inputs.iter().find(|v| v.dtype() == DType::U8) {
        return Err(Error::Type { op: name, operand: "input", expected: "f32, bf16 or i32", got: bad.dtype() });
    }
    let writes: Vec<ViewMut> = outputs.iter().map(|v| (*v).clone()).collect();
    let reads: Vec<View> = inputs.iter().map(|v| (*v).clone()).collect();
    let (task_writes, task_reads) = (writes.clone(), reads.clone());
    let body = move || {
        let missing = Error::NotHost { op: name };
        let mut outs = Vec::with_capacity(task_writes.len());
        for v in &task_writes {
            // SAFETY: runs as a task of the stream that declared this view as written; f32 and disjoint, checked above.
            outs.push(unsafe { v.as_mut_slice::<f32>() }.ok_or_else(|| missing.clone())?);
        }
        let mut ins = Vec::with_capacity(task_reads.len());
        for v in &task_reads {
            // SAFETY: runs as a task of the stream that declared this view as read, with the element type of the view.
            let slice = unsafe {
                match v.dtype() {
                    DType::F32 => v.as_slice::<f32>().map(HostSlice::F32),
                    DType::BF16 => v.as_slice::<half::bf16>().map(HostSlice::BF16),
                    _ => v.as_slice::<i32>().map(HostSlice::I32),
                }
            };
            ins.push(slice.ok_or_else(|| missing.clone())?);
        }
        run(&mut outs, &ins).map_err(|why| Error::Shape { op: name, what: why })
    };
    s.host(HostTask { name: name.into(), reads, writes, run: Box::new(body) })
}
