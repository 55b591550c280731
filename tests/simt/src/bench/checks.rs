//! Does a device compute what the CPU computes? Every call of training, small and odd, with the same operands on both; relative distances
//! in L2. Operands of any device are filled by the same pattern of normal numbers, repeated.

use super::Target;
use crate::shapes::{self, Case, Fill, MIDDLE, Memory, TINY};
use half::bf16;
use std::sync::Arc;
use std::time::Duration;
use zrt_kernels::philox::{normal_pair, philox4x32};
use zrt_kernels::{Category, DType, Device, OpShape, Ops, Place, Result, Stream, View, ViewMut};

/// Elements of the pattern: not a multiple of any tile.
const PATTERN: usize = (1 << 19) + 7;

/// The first bytes of an operand; the rest repeats them.
pub fn pattern(fill: &Fill, elems: usize, dtype: DType) -> Vec<u8> {
    let elems = elems.min(PATTERN);
    match fill {
        Fill::Zeros => vec![0; elems * dtype.bytes()],
        Fill::Ints(values) => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        Fill::Normal(deviation, seed) => {
            let value = |i: usize| {
                let w = philox4x32([i as u32, 0, 0, 0], [*seed, 2]);
                normal_pair(w[0], w[1]).0 * deviation
            };
            match dtype {
                DType::BF16 => (0..elems).flat_map(|i| bf16::from_f32(value(i)).to_le_bytes()).collect(),
                _ => (0..elems).flat_map(|i| value(i).to_le_bytes()).collect(),
            }
        }
    }
}

/// A device whose memory the host can touch: the CPU, or an emulated GPU.
pub struct Host {
    device: Arc<dyn Device>,
    stream: Arc<dyn Stream>,
}

impl Host {
    /// Calls on this device.
    ///
    /// # Errors
    /// No stream.
    pub fn new(device: Arc<dyn Device>) -> Result<Host> {
        let stream = device.stream("bench")?;
        Ok(Host { device, stream })
    }
}

impl Memory for Host {
    fn tensor(&self, elems: usize, dtype: DType, fill: Fill) -> Result<ViewMut> {
        let view = self.device.alloc("operand", elems * dtype.bytes(), Place::Device, Category::Workspace)?.view_mut(dtype, 0, elems)?;
        let start = pattern(&fill, elems, dtype);
        let write = move |to: &mut [u8]| {
            for piece in to.chunks_mut(start.len().max(1)) {
                piece.copy_from_slice(&start[..piece.len()]);
            }
            Ok(())
        };
        self.stream.write(&view, "operand", Box::new(write))?;
        Ok(view)
    }

    fn workspace_bytes(&self, shape: OpShape) -> usize {
        self.device.ops().workspace_bytes(shape)
    }
}

impl Target for Host {
    fn ops(&self) -> &dyn Ops {
        self.device.ops()
    }

    fn stream(&self) -> &dyn Stream {
        &*self.stream
    }

    fn read(&self, view: &View) -> Result<Vec<u8>> {
        self.stream.read(view)?.bytes(Duration::from_secs(300))
    }
}

fn floats(bytes: &[u8], dtype: DType) -> Vec<f64> {
    match dtype {
        DType::BF16 => bytes.chunks_exact(2).map(|b| f64::from(bf16::from_le_bytes([b[0], b[1]]).to_f32())).collect(),
        _ => bytes.chunks_exact(4).map(|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]]))).collect(),
    }
}

/// `|got - want| / |want|`; infinite where one is not a number and the other is.
fn distance(got: &[f64], want: &[f64]) -> f64 {
    let d: f64 = got.iter().zip(want).map(|(g, w)| (g - w).powi(2)).sum();
    let n: f64 = want.iter().map(|w| w * w).sum();
    let d = if n > 0.0 { (d / n).sqrt() } else { d.sqrt() };
    if d.is_nan() { f64::INFINITY } else { d }
}

/// Operands are bf16: both sides round each result to 2^-9 of its size, and sums of different order cross a rounding now and then.
/// A wrong tile or a missed row is off by far more.
pub const TOLERANCE: f64 = 1.0 / 64.0;

/// What a check found.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// The largest distance of an output.
    Distance(f64),
    /// The call failed.
    Failed(String),
}

fn outputs(case: &Case, target: &dyn Target) -> Result<Vec<(Vec<u8>, DType)>> {
    let call = (case.prepare)(target)?;
    (call.run)(target.ops(), target.stream())?;
    call.outputs.iter().map(|view| Ok((target.read(view)?, view.dtype()))).collect()
}

/// One call on a device and on the CPU.
///
/// # Errors
/// The CPU's own.
pub fn check(case: &Case, device: &dyn Target, cpu: &dyn Target) -> Result<Outcome> {
    let got = match outputs(case, device) {
        Ok(got) => got,
        Err(e) => return Ok(Outcome::Failed(e.to_string())),
    };
    let want = outputs(case, cpu)?;
    let far = got.iter().zip(&want).map(|(g, w)| distance(&floats(&g.0, g.1), &floats(&w.0, w.1)));
    Ok(Outcome::Distance(far.fold(0.0, f64::max)))
}

/// The calls that are checked: sizes that fill no tile and, where it does not take hours, some that fill many.
pub fn checked(large: bool) -> Vec<Case> {
    let mut out = shapes::block(TINY, 37, 5);
    out.extend(shapes::ends(TINY, 37, 1500));
    out.push(shapes::clip());
    if large {
        out.extend(shapes::block(MIDDLE, 517, 16));
    }
    out
}
