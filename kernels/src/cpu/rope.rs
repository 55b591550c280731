//! Rotary embedding (Su et al. 2021) in the rotate-half layout: dimension `i` turns with `i + D/2`. Forward multiplies a pair
//! by the rotation of its position, backward by the transpose; both in place, both from the same table, so factors that a
//! table carries (yarn) act on the gradient too.
#![allow(unsafe_code)]

use super::embedding::check_ids;
use super::operand::{BLOCK, Operand, Raw};
use super::pool::Pool;
use super::simd::simd_fn;
use crate::Result;

/// [`crate::Ops::rope`] with `sign = 1`, [`crate::Ops::rope_backward`] with `sign = -1`.
/// `x [N, heads*D]`, `table [P, D]`: `D/2` cosines, then `D/2` sines, `positions [N]`.
#[allow(clippy::too_many_arguments)]
pub fn rotate(
    op: &'static str,
    pool: &Pool,
    x: Operand,
    table: Raw<f32>,
    positions: &[i32],
    heads: usize,
    head_dim: usize,
    sign: f32,
) -> Result<()> {
    check_ids(op, "position", positions, table.elems() / head_dim)?;
    // Tokens of a work item.
    const GRAIN: usize = 8;
    simd_fn! { fn tokens[S](s: S, range: std::ops::Range<usize>, x: Operand, table: Raw<f32>, positions: &[i32], heads: usize, head_dim: usize, sign: f32) {
        let half = head_dim / 2;
        let (mut a, mut b) = ([0f32; BLOCK], [0f32; BLOCK]);
        for n in range {
            // SAFETY: positions were checked; no one writes the table.
            let row = unsafe { table.read(positions[n] as usize * head_dim, head_dim) };
            for head in 0..heads {
                for i in (0..half).step_by(BLOCK) {
                    let m = BLOCK.min(half - i);
                    let (first, second) = ((n * heads + head) * head_dim + i, (n * heads + head) * head_dim + half + i);
                    let (a, b) = (&mut a[..m], &mut b[..m]);
                    // SAFETY: within token n, which belongs to one item.
                    unsafe {
                        x.load(s, first, a);
                        x.load(s, second, b);
                        for ((a, b), (cos, sin)) in a.iter_mut().zip(b.iter_mut()).zip(row[i..].iter().zip(&row[half + i..])) {
                            let sin = sin * sign;
                            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
                        }
                        x.store(s, first, a);
                        x.store(s, second, b);
                    }
                }
            }
        }
    } }
    let n = positions.len();
    pool.for_each(n.div_ceil(GRAIN), |item| {
        tokens(pool.isa(), item * GRAIN..((item + 1) * GRAIN).min(n), x, table, positions, heads, head_dim, sign);
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::reference::{Values, assert_close, on_every_pool, rounding};
    use super::*;

    const ROWS: usize = 40;

    /// Tables of any factor: cosines and sines need not be of one angle.
    fn table(head_dim: usize) -> Vec<f32> {
        Values::random(ROWS * head_dim, false, 9).f32s()
    }

    fn naive(x: &[f64], table: &[f32], positions: &[i32], heads: usize, d: usize, sign: f64) -> Vec<f64> {
        let mut y = x.to_vec();
        for (n, p) in positions.iter().enumerate() {
            for h in 0..heads {
                for i in 0..d / 2 {
                    let (a, b) = ((n * heads + h) * d + i, (n * heads + h) * d + i + d / 2);
                    let (cos, sin) = (f64::from(table[*p as usize * d + i]), sign * f64::from(table[*p as usize * d + d / 2 + i]));
                    (y[a], y[b]) = (x[a] * cos - x[b] * sin, x[b] * cos + x[a] * sin);
                }
            }
        }
        y
    }

    #[test]
    fn rotates_and_rotates_the_gradient_back() {
        for (heads, d) in [(3, 64), (1, 18), (2, 2 * BLOCK + 6)] {
            for bf16 in [false, true] {
                let positions: Vec<i32> = (0..21).map(|n| n * 13 % ROWS as i32).collect();
                let (x, dy) = (Values::random(21 * heads * d, bf16, 1), Values::random(21 * heads * d, bf16, 2));
                let mut table = table(d);
                for got in on_every_pool(|pool| {
                    let (mut y, mut dx) = (x.clone(), dy.clone());
                    rotate("rope", pool, y.operand(), Raw::new(&mut table), &positions, heads, d, 1.0).unwrap();
                    rotate("rope_backward", pool, dx.operand(), Raw::new(&mut table), &positions, heads, d, -1.0).unwrap();
                    vec![y.f32s(), dx.f32s()]
                }) {
                    let (xs, dys) = (x.f64s(), dy.f64s());
                    let y = naive(&xs, &table, &positions, heads, d, 1.0);
                    assert_close("y", &got[0], &y, rounding(bf16));
                    let dx = naive(&dys, &table, &positions, heads, d, -1.0);
                    assert_close("dx", &got[1], &dx, rounding(bf16));
                    // The backward is the transpose: <R x, dy> = <x, R^T dy>, in f64 exact to the rounding of sums.
                    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
                    assert!((dot(&y, &dys) - dot(&xs, &dx)).abs() < 1e-9);
                }
            }
        }
    }

    #[test]
    fn a_position_behind_the_table_is_named() {
        let pool = Pool::new(1).unwrap();
        let mut x = Values::random(2 * 4, false, 1);
        let mut table = table(4);
        let error = rotate("rope", &pool, x.operand(), Raw::new(&mut table), &[3, ROWS as i32], 1, 4, 1.0).unwrap_err();
        assert!(error.to_string().contains("position 40 at row 1 is out of 0..40"), "{error}");
    }
}
