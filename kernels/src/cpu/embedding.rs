//! Rows of a table by token id, and the gradient of the table. The gradient is shared among work items by columns, not by
//! tokens: each item adds its columns of all tokens in token order, so a repeated token needs no atomics and the sum has one
//! order.
#![allow(unsafe_code)]

use super::elementwise::clear;
use super::operand::{BLOCK, Operand, Raw};
use super::pool::Pool;
use super::simd::simd_fn;
use crate::{Error, Result, Write};

/// Every id must name one of `rows` rows; the error names the first that does not.
pub fn check_ids(op: &'static str, what: &str, ids: &[i32], rows: usize) -> Result<()> {
    match ids.iter().position(|&id| !usize::try_from(id).is_ok_and(|id| id < rows)) {
        None => Ok(()),
        Some(n) => Err(Error::Shape {
            op,
            what: format!("{what} {} at row {n} is out of 0..{rows}; check that the tokenizer and the model belong together", ids[n]),
        }),
    }
}

/// [`crate::Ops::embedding`]: `y [N,C]`, `table [V,C]` of one type.
pub fn forward(pool: &Pool, y: Operand, table: Operand, ids: &[i32], hidden: usize) -> Result<()> {
    check_ids("embedding", "id", ids, table.elems() / hidden)?;
    // Tokens of a work item.
    const GRAIN: usize = 16;
    pool.for_each(ids.len().div_ceil(GRAIN), |item| {
        for (n, &id) in ids.iter().enumerate().skip(item * GRAIN).take(GRAIN) {
            let row = id as usize * hidden;
            match (y, table) {
                // SAFETY: ids were checked; a token belongs to one item.
                (Operand::F32(y), Operand::F32(t)) => unsafe { y.slice(n * hidden, hidden).copy_from_slice(t.read(row, hidden)) },
                // SAFETY: as above.
                (Operand::Bf16(y), Operand::Bf16(t)) => unsafe { y.slice(n * hidden, hidden).copy_from_slice(t.read(row, hidden)) },
                // The checks refuse mixed types.
                _ => {}
            }
        }
    });
    Ok(())
}

/// [`crate::Ops::embedding_backward`]: `dtable [V,C]` f32, `dy [N,C]`.
pub fn backward(pool: &Pool, dtable: Raw<f32>, write: Write, dy: Operand, ids: &[i32], hidden: usize) -> Result<()> {
    check_ids("embedding_backward", "id", ids, dtable.elems() / hidden)?;
    if write == Write::Set {
        clear(pool, dtable);
    }
    // Columns of a work item: some cache lines, so that items do not share any.
    const COLS: usize = 64;
    const { assert!(COLS <= BLOCK) };
    simd_fn! { fn columns[S](s: S, col: usize, cols: usize, dtable: Raw<f32>, dy: Operand, ids: &[i32], hidden: usize) {
        let mut block = [0f32; COLS];
        let block = &mut block[..cols];
        for (n, &id) in ids.iter().enumerate() {
            // SAFETY: ids were checked; columns belong to one item.
            unsafe {
                dy.load(s, n * hidden + col, block);
                for (to, d) in dtable.slice(id as usize * hidden + col, cols).iter_mut().zip(&*block) {
                    *to += *d;
                }
            }
        }
    } }
    pool.for_each(hidden.div_ceil(COLS), |item| columns(pool.isa(), item * COLS, COLS.min(hidden - item * COLS), dtable, dy, ids, hidden));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::reference::{Values, assert_close, on_every_pool};
    use super::*;

    #[test]
    fn rows_come_and_their_gradients_go_back_in_token_order() {
        for (hidden, bf16) in [(1, false), (130, false), (576, true)] {
            let ids: Vec<i32> = (0..53).map(|n| n * 7 % 11).collect();
            let mut table = Values::random(12 * hidden, bf16, 1);
            let mut dy = Values::random(53 * hidden, bf16, 2);
            let before = Values::random(12 * hidden, false, 3).f32s();
            let rows = table.f32s();
            let want: Vec<f32> = ids.iter().flat_map(|id| rows[*id as usize * hidden..][..hidden].to_vec()).collect();
            // In token order the f32 sum itself is defined, to the bit.
            let mut dtable = vec![0f32; 12 * hidden];
            for (id, d) in ids.iter().zip(dy.f32s().chunks(hidden)) {
                dtable[*id as usize * hidden..][..hidden].iter_mut().zip(d).for_each(|(t, d)| *t += d);
            }
            for got in on_every_pool(|pool| {
                let mut y = dy.like();
                forward(pool, y.operand(), table.operand(), &ids, hidden).unwrap();
                let (mut set, mut added) = (vec![f32::NAN; 12 * hidden], before.clone());
                backward(pool, Raw::new(&mut set), Write::Set, dy.operand(), &ids, hidden).unwrap();
                backward(pool, Raw::new(&mut added), Write::Add, dy.operand(), &ids, hidden).unwrap();
                vec![y.f32s(), set, added]
            }) {
                assert_eq!(got[0], want);
                assert_eq!(got[1], dtable);
                let sum: Vec<f64> = before.iter().zip(&dtable).map(|(a, b)| f64::from(*a) + f64::from(*b)).collect();
                // Five additions to each element in another order.
                assert_close("added", &got[2], &sum, 1e-6);
            }
        }
    }

    #[test]
    fn a_bad_id_is_named_and_nothing_is_written() {
        let pool = Pool::new(1).unwrap();
        let (mut y, mut table) = (Values::new(vec![7.0; 6], false), Values::random(8, false, 1));
        for (ids, part) in [([0, 4, 9], "id 4 at row 1 is out of 0..4"), ([0, 1, -2], "id -2 at row 2 is out of 0..4")] {
            let error = forward(&pool, y.operand(), table.operand(), &ids, 2).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        assert_eq!(y.f32s(), [7.0; 6]);
    }
}
