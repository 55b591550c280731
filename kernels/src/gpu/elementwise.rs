//! Operations on elements one by one, and sums of them: which types, how many blocks. `kernels/gpu/elementwise.cu`.

use super::launch::{Address, Arch, Call, Kernel, Launcher, by_type, whole_16};
use super::params::params;
use crate::{DType, Result, Stream, View, ViewMut, checks};
use half::bf16;

const SOURCE: &str = "elementwise.cu";
pub(super) const KERNELS: &[Kernel] = &[
    Kernel::new::<Add>("add_f32", SOURCE),
    Kernel::new::<Add>("add_bf16", SOURCE),
    Kernel::new::<Add>("add_bf16_f32", SOURCE),
    Kernel::new::<Convert>("scale_f32", SOURCE),
    Kernel::new::<Convert>("scale_bf16", SOURCE),
    Kernel::new::<Convert>("cast_f32_f32", SOURCE),
    Kernel::new::<Convert>("cast_bf16_bf16", SOURCE),
    Kernel::new::<Convert>("cast_f32_bf16", SOURCE),
    Kernel::new::<Convert>("cast_bf16_f32", SOURCE),
    Kernel::new::<Fill>("fill_u32", SOURCE),
    Kernel::new::<Fill>("fill_u16", SOURCE),
    Kernel::new::<Fill>("fill_u8", SOURCE),
    Kernel::new::<CountNonfinite>("count_nonfinite_f32", SOURCE),
    Kernel::new::<CountNonfinite>("count_nonfinite_bf16", SOURCE),
    Kernel::new::<CountToFloat>("count_to_float", SOURCE),
    Kernel::new::<Sum>("sum_f32", SOURCE),
];

params! {
    struct Add {
        out: Address,
        a: Address,
        b: Address,
        elems: i64,
        vector: i32,
        unused: i32,
    }
    struct Convert {
        out: Address,
        input: Address,
        elems: i64,
        vector: i32,
        factor: f32,
    }
    struct Fill {
        out: Address,
        elems: i64,
        bits: u32,
        vector: i32,
    }
    struct CountNonfinite {
        count: Address,
        input: Address,
        elems: i64,
        vector: i32,
        unused: i32,
    }
    struct CountToFloat {
        count: Address,
    }
    struct Sum {
        out: Address,
        input: Address,
        elems: i64,
    }
}

pub(super) const THREADS: u32 = 256;

/// Blocks for `elems` elements in pieces of `piece`: a thread a piece, but no more than fill the machine some times over.
pub(super) fn blocks(arch: &Arch, elems: usize, piece: usize) -> [usize; 3] {
    [elems.div_ceil(piece * THREADS as usize).min(16 * arch.units as usize), 1, 1]
}

fn added<L: Launcher>(launcher: &L, op: &'static str, out: &ViewMut, a: &View, b: &View, s: &dyn Stream) -> Result<()> {
    let mut call = Call::new(launcher, op);
    let (po, pa, pb) = (call.write(out)?, call.read(a)?, call.read(b)?);
    let (kernel, piece) = match (a.dtype(), b.dtype()) {
        (DType::BF16, DType::F32) => ("add_bf16_f32", 8),
        (DType::BF16, _) => ("add_bf16", 8),
        _ => ("add_f32", 4),
    };
    let vector = whole_16(&[po.0, pa.0, pb.0]).into();
    let params = Add { out: po, a: pa, b: pb, elems: a.elems() as i64, vector, unused: 0 };
    call.launch(kernel, blocks(launcher.arch(), a.elems(), piece), THREADS, 0, &params)?;
    call.run(s)
}

pub(super) fn add<L: Launcher>(launcher: &L, out: &ViewMut, a: &View, b: &View, s: &dyn Stream) -> Result<()> {
    checks::add(out, a, b)?;
    added(launcher, "add", out, a, b, s)
}

pub(super) fn add_into<L: Launcher>(launcher: &L, y: &ViewMut, x: &View, s: &dyn Stream) -> Result<()> {
    checks::add_into(y, x)?;
    added(launcher, "add_into", y, y, x, s)
}

fn convert<L: Launcher>(
    launcher: &L,
    op: &'static str,
    kernel: &'static str,
    out: &ViewMut,
    input: &View,
    factor: f32,
    s: &dyn Stream,
) -> Result<()> {
    let mut call = Call::new(launcher, op);
    let (po, pi) = (call.write(out)?, call.read(input)?);
    let piece = if out.dtype() == DType::F32 && input.dtype() == DType::F32 { 4 } else { 8 };
    let params = Convert { out: po, input: pi, elems: out.elems() as i64, vector: whole_16(&[po.0, pi.0]).into(), factor };
    call.launch(kernel, blocks(launcher.arch(), out.elems(), piece), THREADS, 0, &params)?;
    call.run(s)
}

pub(super) fn scale<L: Launcher>(launcher: &L, x: &ViewMut, factor: f32, s: &dyn Stream) -> Result<()> {
    checks::scale(x)?;
    convert(launcher, "scale", by_type(x.dtype(), "scale_f32", "scale_bf16"), x, x, factor, s)
}

pub(super) fn cast<L: Launcher>(launcher: &L, dst: &ViewMut, src: &View, s: &dyn Stream) -> Result<()> {
    checks::cast(dst, src)?;
    let kernel = match (src.dtype(), dst.dtype()) {
        (DType::BF16, DType::BF16) => "cast_bf16_bf16",
        (DType::BF16, _) => "cast_bf16_f32",
        (_, DType::BF16) => "cast_f32_bf16",
        _ => "cast_f32_f32",
    };
    convert(launcher, "cast", kernel, dst, src, 1.0, s)
}

/// Adds the launch that sets `elems` elements of `dtype` at `out` to `value`.
pub(super) fn fill_launch<L: Launcher>(
    call: &mut Call<'_, L>,
    arch: &Arch,
    out: Address,
    dtype: DType,
    elems: usize,
    value: f32,
) -> Result<()> {
    let (kernel, piece, bits) = match dtype {
        DType::F32 => ("fill_u32", 4, value.to_bits()),
        DType::I32 => ("fill_u32", 4, value as i32 as u32),
        DType::BF16 => ("fill_u16", 8, u32::from(bf16::from_f32(value).to_bits()) * 0x1_0001),
        DType::U8 => ("fill_u8", 16, u32::from(value as u8) * 0x0101_0101),
    };
    let params = Fill { out, elems: elems as i64, bits, vector: whole_16(&[out.0]).into() };
    call.launch(kernel, blocks(arch, elems, piece), THREADS, 0, &params)
}

/// [`crate::Stream::fill`] as a kernel.
pub(super) fn fill<L: Launcher>(launcher: &L, out: &ViewMut, value: f32, s: &dyn Stream) -> Result<()> {
    let mut call = Call::new(launcher, "fill");
    let to = call.write(out)?;
    fill_launch(&mut call, launcher.arch(), to, out.dtype(), out.elems(), value)?;
    call.run(s)
}

/// The count is made in `out` itself, as an integer, and converted there.
pub(super) fn count_nonfinite<L: Launcher>(launcher: &L, out: &ViewMut, x: &View, s: &dyn Stream) -> Result<()> {
    checks::count_nonfinite(out, x)?;
    let mut call = Call::new(launcher, "count_nonfinite");
    let (count, input) = (call.write(out)?, call.read(x)?);
    fill_launch(&mut call, launcher.arch(), count, DType::I32, 1, 0.0)?;
    let params = CountNonfinite { count, input, elems: x.elems() as i64, vector: whole_16(&[input.0]).into(), unused: 0 };
    let kernel = by_type(x.dtype(), "count_nonfinite_f32", "count_nonfinite_bf16");
    call.launch(kernel, blocks(launcher.arch(), x.elems(), 16 / x.dtype().bytes()), THREADS, 0, &params)?;
    call.launch("count_to_float", [1, 1, 1], launcher.arch().lanes, 0, &CountToFloat { count })?;
    call.run(s)
}

pub(super) fn sum<L: Launcher>(launcher: &L, out: &ViewMut, x: &View, s: &dyn Stream) -> Result<()> {
    checks::sum(out, x)?;
    let mut call = Call::new(launcher, "sum");
    let params = Sum { out: call.write(out)?, input: call.read(x)?, elems: x.elems() as i64 };
    call.launch("sum_f32", [1, 1, 1], THREADS, 0, &params)?;
    call.run(s)
}
