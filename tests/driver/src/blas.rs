//! What does a matrix product of cuBLASLt or hipBLASLt compute? `D = alpha op(A) op(B) + beta C`, with a bias along the columns of D,
//! on column-major bf16 or f32, summed in f32 and rounded once. Descriptors are what the caller set, by vendor-free names.

use crate::clock::Kind;
use crate::device::{Device, Machine};
use crate::faults::code;
use crate::memory::Allocation;
use crate::stream::{Stream, Task};
use half::bf16;
use std::borrow::Cow;
use std::sync::Arc;

/// Element types that are computed with; numbers of cudaDataType_t and hipDataType.
pub const F32: i32 = 0;
pub const BF16: i32 = 14;

/// A matrix as it lies in memory.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    pub dtype: i32,
    pub rows: u64,
    pub cols: u64,
    /// Elements from one column to the next.
    pub ld: i64,
    pub batch: i32,
    pub stride: i64,
    /// 0: column-major.
    pub order: i32,
}

/// What is done with the operands.
#[derive(Clone, Copy, Debug, Default)]
pub struct Desc {
    pub transpose_a: bool,
    pub transpose_b: bool,
    pub bias: bool,
    pub bias_at: u64,
    /// Type of the bias; that of D if not set.
    pub bias_type: Option<i32>,
    /// Something that is not emulated was asked for.
    pub strange: bool,
}

/// A product, checked.
#[derive(Clone, Copy)]
pub struct Product {
    pub desc: Desc,
    pub alpha: f32,
    pub beta: f32,
    pub a: (u64, Layout),
    pub b: (u64, Layout),
    pub c: (u64, Layout),
    pub d: (u64, Layout),
}

impl Layout {
    fn element_bytes(&self) -> Option<u64> {
        match self.dtype {
            F32 => Some(4),
            BF16 => Some(2),
            _ => None,
        }
    }

    /// Bytes from the first to the last element.
    fn span(&self) -> Option<u64> {
        let whole = self.ld >= self.rows as i64 && self.rows > 0 && self.cols > 0 && self.order == 0 && self.batch >= 1 && self.stride >= 0;
        let matrix = (self.cols - u64::from(whole)).checked_mul(self.ld as u64)?.checked_add(self.rows)?;
        let all = (self.batch as u64 - u64::from(whole)).checked_mul(self.stride as u64)?.checked_add(matrix)?;
        whole.then(|| all.checked_mul(self.element_bytes()?)).flatten()
    }
}

/// Whether a product of these is emulated: shapes that fit together, and types that it knows.
pub fn fits(desc: &Desc, a: &Layout, b: &Layout, c: &Layout, d: &Layout) -> bool {
    let shape = |l: &Layout, transposed: bool| if transposed { (l.cols, l.rows) } else { (l.rows, l.cols) };
    let ((m, k), (k_b, n)) = (shape(a, desc.transpose_a), shape(b, desc.transpose_b));
    let shapes = k == k_b && (d.rows, d.cols) == (m, n) && (c.rows, c.cols) == (m, n);
    let batches = [a, b, c].iter().all(|l| l.batch == d.batch);
    let types = a.dtype == b.dtype && c.dtype == d.dtype && (a.dtype == BF16 || d.dtype == F32);
    shapes && batches && types && !desc.strange && [a, b, c, d].iter().all(|l| l.span().is_some())
}

/// An operand whose memory is held.
struct Operand {
    at: u64,
    layout: Layout,
    _held: Arc<Allocation>,
}

impl Operand {
    fn of((at, layout): (u64, Layout)) -> Result<Operand, i32> {
        let held = Machine::get().memory.hold(at, layout.span().unwrap_or(0)).ok_or(code::ILLEGAL_ADDRESS)?;
        Ok(Operand { at, layout, _held: held })
    }

    /// Address of an element of a matrix of the batch.
    fn at(&self, batch: u64, row: u64, col: u64) -> u64 {
        let element = batch * self.layout.stride as u64 + col * self.layout.ld as u64 + row;
        self.at + element * self.layout.element_bytes().unwrap_or(4)
    }

    fn get(&self, batch: u64, row: u64, col: u64) -> f32 {
        read(self.layout.dtype, self.at(batch, row, col))
    }

    fn set(&self, batch: u64, row: u64, col: u64, value: f32) {
        let at = self.at(batch, row, col);
        // SAFETY: inside the span, which is held.
        unsafe {
            match self.layout.dtype {
                BF16 => (at as *mut u16).write_unaligned(bf16::from_f32(value).to_bits()),
                _ => (at as *mut f32).write_unaligned(value),
            }
        }
    }

    /// The matrix with `along` next to each other: columns if it is transposed, else rows.
    fn packed(&self, batch: u64, transposed: bool) -> Vec<f32> {
        let Layout { rows, cols, .. } = self.layout;
        let mut out = Vec::with_capacity((rows * cols) as usize);
        if transposed {
            (0..cols).for_each(|c| out.extend((0..rows).map(|r| self.get(batch, r, c))));
        } else {
            (0..rows).for_each(|r| out.extend((0..cols).map(|c| self.get(batch, r, c))));
        }
        out
    }
}

fn read(dtype: i32, at: u64) -> f32 {
    // SAFETY: callers hold the memory around it.
    unsafe {
        match dtype {
            BF16 => bf16::from_bits((at as *const u16).read_unaligned()).to_f32(),
            _ => (at as *const f32).read_unaligned(),
        }
    }
}

/// Sixteen sums at a time, then their sum.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0f32; 16];
    let (a_rest, b_rest) = (a.chunks_exact(16).remainder(), b.chunks_exact(16).remainder());
    for (x, y) in a.chunks_exact(16).zip(b.chunks_exact(16)) {
        sums.iter_mut().zip(x.iter().zip(y)).for_each(|(s, (x, y))| *s += x * y);
    }
    sums.iter().sum::<f32>() + a_rest.iter().zip(b_rest).map(|(x, y)| x * y).sum::<f32>()
}

impl Product {
    /// Enqueues the product.
    pub fn enqueue(self, stream: &Stream) {
        let settings = &Machine::get().settings;
        // As long as it takes to read and write the operands, or to multiply at 500 TFLOP/s.
        let bytes: u64 = [self.a, self.b, self.d].iter().map(|(_, l)| l.span().unwrap_or(0)).sum();
        let k = if self.desc.transpose_a { self.a.1.rows } else { self.a.1.cols };
        let multiply = 2 * self.d.1.rows * self.d.1.cols * k * self.d.1.batch as u64 / 500_000;
        let cost = settings.kernel_ns + Kind::Kernel.cost(bytes, settings).max(multiply);
        let null = settings.null;
        let run = Box::new(move |_: &'static Device| if null { Ok(()) } else { self.run() });
        let task = Task { kind: Kind::Kernel, name: Cow::Borrowed("matmul"), bytes, cost, run };
        if null { stream.empty_task(task) } else { stream.task(task) }
    }

    fn run(&self) -> Result<(), i32> {
        let (a, b, d) = (Operand::of(self.a)?, Operand::of(self.b)?, Operand::of(self.d)?);
        let c = if self.beta == 0.0 { None } else { Some(Operand::of(self.c)?) };
        let (m, n) = (d.layout.rows, d.layout.cols);
        let bias_type = self.desc.bias_type.unwrap_or(d.layout.dtype);
        let bias_bytes = m * if bias_type == BF16 { 2 } else { 4 };
        let memory = &Machine::get().memory;
        let bias = self.desc.bias.then(|| memory.hold(self.desc.bias_at, bias_bytes).ok_or(code::ILLEGAL_ADDRESS)).transpose()?;
        let bias = |row: u64| match &bias {
            Some(_) => read(bias_type, self.desc.bias_at + row * bias_bytes / m),
            None => 0.0,
        };
        for batch in 0..d.layout.batch as u64 {
            let rows = a.packed(batch, self.desc.transpose_a);
            let cols = b.packed(batch, !self.desc.transpose_b);
            let k = rows.len() / m as usize;
            for j in 0..n {
                let col = &cols[j as usize * k..][..k];
                for i in 0..m {
                    let before = c.as_ref().map_or(0.0, |c| self.beta * c.get(batch, i, j));
                    let value = self.alpha * dot(&rows[i as usize * k..][..k], col) + before + bias(i);
                    d.set(batch, i, j, value);
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_must_fit_together() {
        let l = |rows, cols, dtype| Layout { dtype, rows, cols, ld: rows as i64, batch: 1, stride: 0, order: 0 };
        let desc = Desc { transpose_a: true, ..Desc::default() };
        let (a, b, d) = (l(8, 3, BF16), l(8, 5, BF16), l(3, 5, BF16));
        assert!(fits(&desc, &a, &b, &d, &d));
        assert!(!fits(&Desc::default(), &a, &b, &d, &d));
        assert!(!fits(&desc, &a, &l(8, 5, F32), &d, &d));
        assert!(!fits(&desc, &a, &b, &d, &Layout { ld: 2, ..d }));
        assert!(fits(&desc, &a, &b, &l(3, 5, F32), &l(3, 5, F32)));
        assert_eq!(Layout { ld: 10, ..d }.span(), Some((4 * 10 + 3) * 2));
    }

    #[test]
    fn sums_of_any_length() {
        for n in [0, 1, 15, 16, 17, 50] {
            let x: Vec<f32> = (0..n).map(|i| i as f32).collect();
            assert_eq!(dot(&x, &x), (0..n).map(|i| (i * i) as f32).sum::<f32>());
        }
    }
}
