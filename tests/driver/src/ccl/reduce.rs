//! How are numbers of several ranks combined? Pair by pair, in the type of the data, as libraries do that send partial sums along a
//! ring: each step rounds. The order of ranks is theirs by number, or drawn for each piece of the data from a seed.

use crate::stream::next;
use half::{bf16, f16};

/// ncclRedOp_t.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    Sum,
    Product,
    Max,
    Min,
    Average,
}

impl Op {
    pub fn of(number: i32) -> Option<Op> {
        [Op::Sum, Op::Product, Op::Max, Op::Min, Op::Average].get(usize::try_from(number).ok()?).copied()
    }
}

/// Bytes of an element of an ncclDataType_t.
pub fn type_bytes(dtype: i32) -> Option<usize> {
    [1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1].get(usize::try_from(dtype).ok()?).copied()
}

trait Element: Copy {
    const BYTES: usize;
    fn read(from: &[u8]) -> Self;
    fn write(self, to: &mut [u8]);
    fn combine(self, other: Self, op: Op) -> Self;
    /// What is done to each number before it takes part in an average of so many.
    fn before(self, ranks: usize) -> Self;
    /// What is done to their sum.
    fn after(self, ranks: usize) -> Self;
}

macro_rules! floats {
    ($($type:ty, $wide:ty, $to:expr, $from:expr);*) => {$(
        impl Element for $type {
            const BYTES: usize = size_of::<$type>();
            fn read(from: &[u8]) -> Self {
                <$type>::from_le_bytes(from.try_into().unwrap_or_default())
            }
            fn write(self, to: &mut [u8]) {
                to.copy_from_slice(&self.to_le_bytes());
            }
            fn combine(self, other: Self, op: Op) -> Self {
                let (a, b): ($wide, $wide) = ($to(self), $to(other));
                $from(match op {
                    Op::Sum | Op::Average => a + b,
                    Op::Product => a * b,
                    Op::Max => a.max(b),
                    Op::Min => a.min(b),
                })
            }
            fn before(self, ranks: usize) -> Self {
                $from($to(self) * (1.0 / ranks as $wide))
            }
            fn after(self, _ranks: usize) -> Self {
                self
            }
        }
    )*};
}

macro_rules! integers {
    ($($type:ty),*) => {$(
        impl Element for $type {
            const BYTES: usize = size_of::<$type>();
            fn read(from: &[u8]) -> Self {
                <$type>::from_le_bytes(from.try_into().unwrap_or_default())
            }
            fn write(self, to: &mut [u8]) {
                to.copy_from_slice(&self.to_le_bytes());
            }
            fn combine(self, other: Self, op: Op) -> Self {
                match op {
                    Op::Sum | Op::Average => self.wrapping_add(other),
                    Op::Product => self.wrapping_mul(other),
                    Op::Max => self.max(other),
                    Op::Min => self.min(other),
                }
            }
            fn before(self, _ranks: usize) -> Self {
                self
            }
            fn after(self, ranks: usize) -> Self {
                self / ranks as $type
            }
        }
    )*};
}

floats!(f32, f32, |x| x, |x| x; f64, f64, |x| x, |x| x; bf16, f32, bf16::to_f32, bf16::from_f32; f16, f32, f16::to_f32, f16::from_f32);
integers!(i8, u8, i32, u32, i64, u64);

/// Elements whose order is drawn together.
const PIECE: usize = 1024;

/// The order of ranks for a piece.
fn order(ranks: usize, seed: Option<u64>, piece: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..ranks).collect();
    if let Some(seed) = seed {
        let mut state = seed ^ piece.wrapping_mul(0xd134_2543_de82_ef95);
        for i in (1..ranks).rev() {
            order.swap(i, (next(&mut state) % (i as u64 + 1)) as usize);
        }
    }
    order
}

fn typed<T: Element>(out: &mut [u8], inputs: &[&[u8]], op: Op, seed: Option<u64>, first: u64) {
    let ranks = inputs.len();
    let count = out.len() / T::BYTES;
    for at in (0..count).step_by(PIECE) {
        let order = order(ranks, seed, (first + at as u64) / PIECE as u64);
        let end = (at + PIECE).min(count);
        for i in at..end {
            let bytes = i * T::BYTES..(i + 1) * T::BYTES;
            let read = |rank: usize| {
                let x = T::read(&inputs[rank][bytes.clone()]);
                if op == Op::Average { x.before(ranks) } else { x }
            };
            let all = order[1..].iter().fold(read(order[0]), |sum, rank| sum.combine(read(*rank), op));
            let all = if op == Op::Average { all.after(ranks) } else { all };
            all.write(&mut out[bytes]);
        }
    }
}

/// Combines one slice of each rank. `first` is the element of the whole that the slices begin at; `None`: not for this type.
pub fn reduce(dtype: i32, out: &mut [u8], inputs: &[&[u8]], op: Op, seed: Option<u64>, first: u64) -> Option<()> {
    let run = match dtype {
        0 => typed::<i8>,
        1 => typed::<u8>,
        2 => typed::<i32>,
        3 => typed::<u32>,
        4 => typed::<i64>,
        5 => typed::<u64>,
        6 => typed::<f16>,
        7 => typed::<f32>,
        8 => typed::<f64>,
        9 => typed::<bf16>,
        _ => return None,
    };
    run(out, inputs, op, seed, first);
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_change_rounding_only_with_a_seed() {
        let values = [1e8f32, 1.0, -1e8, 1.0];
        let inputs: Vec<[u8; 4]> = values.iter().map(|v| v.to_le_bytes()).collect();
        let inputs: Vec<&[u8]> = inputs.iter().map(|b| &b[..]).collect();
        let sum = |seed, first| {
            let mut out = [0; 4];
            reduce(7, &mut out, &inputs, Op::Sum, seed, first).expect("f32");
            f32::from_le_bytes(out)
        };
        assert_eq!((sum(None, 0), sum(None, 1 << 20)), (1.0, 1.0));
        let drawn: Vec<u32> = (0..64).map(|i| sum(Some(3), i * 1024).to_bits()).collect();
        assert!(drawn.iter().any(|s| *s != drawn[0]), "always the same order");
        assert_eq!(sum(Some(3), 5).to_bits(), drawn[0]);
    }

    #[test]
    fn averages_and_integers() {
        let inputs = [7i32.to_le_bytes(), 5i32.to_le_bytes()];
        let inputs: Vec<&[u8]> = inputs.iter().map(|b| &b[..]).collect();
        let mut out = [0; 4];
        for (op, expected) in [(Op::Sum, 12), (Op::Product, 35), (Op::Max, 7), (Op::Min, 5), (Op::Average, 6)] {
            reduce(2, &mut out, &inputs, op, None, 0).expect("i32");
            assert_eq!(i32::from_le_bytes(out), expected, "{op:?}");
        }
        assert!(reduce(10, &mut out, &inputs, Op::Sum, None, 0).is_none());
    }
}
