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
            // SAFETY: ids were checked; a token belongs to one item.
            match (y, table) {
                (Operand::F32(y), Operand::F32(t)) => unsafe { y.slice(n * hidden, hidden).copy_from_slice(t.read(row, hidden)) },
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
    simd_fn! { fn columns[S](_s: S, col: usize, cols: usize, dtable: Raw<f32>, dy: Operand, ids: &[i32], hidden: usize) {
        let mut block = [0f32; COLS];
        let block = &mut block[..cols];
        for (n, &id) in ids.iter().enumerate() {
            // SAFETY: ids were checked; columns belong to one item.
            unsafe {
                dy.load(n * hidden + col, block);
                for (to, d) in dtable.slice(id as usize * hidden + col, cols).iter_mut().zip(&*block) {
                    *to += *d;
                }
            }
        }
    } }
    pool.for_each(hidden.div_ceil(COLS), |item| columns(pool.isa(), item * COLS, COLS.min(hidden - item * COLS), dtable, dy, ids, hidden));
    Ok(())
}
