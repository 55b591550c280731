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
    simd_fn! { fn tokens[S](_s: S, range: std::ops::Range<usize>, x: Operand, table: Raw<f32>, positions: &[i32], heads: usize, head_dim: usize, sign: f32) {
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
                        x.load(first, a);
                        x.load(second, b);
                        for ((a, b), (cos, sin)) in a.iter_mut().zip(b.iter_mut()).zip(row[i..].iter().zip(&row[half + i..])) {
                            let sin = sin * sign;
                            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
                        }
                        x.store(first, a);
                        x.store(second, b);
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
