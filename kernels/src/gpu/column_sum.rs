//! Sums of columns of partial sums: the last launch of gradients that are sums over rows. `kernels/gpu/column_sum.cu`.

use super::launch::{Address, Call, Kernel, Launcher};
use super::params::params;
use crate::{Result, Write};

pub(super) const KERNELS: &[Kernel] = &[Kernel::new::<ColumnSum>("column_sum_f32", "column_sum.cu")];

params! {
    struct ColumnSum {
        out: Address,
        partial: Address,
        groups: i64,
        cols: i64,
        add: i32,
        unused: i32,
    }
}

/// Columns of a block.
const COLS: usize = 64;
const THREADS: u32 = 256;

/// `out [cols] (+)= sum over groups of partial [groups, cols]`; no groups are a sum of 0.
pub(super) fn column_sum<L: Launcher>(
    call: &mut Call<'_, L>,
    out: Address,
    write: Write,
    partial: Address,
    groups: usize,
    cols: usize,
) -> Result<()> {
    let add = i32::from(write == Write::Add);
    let params = ColumnSum { out, partial, groups: groups as i64, cols: cols as i64, add, unused: 0 };
    call.launch("column_sum_f32", [cols.div_ceil(COLS), 1, 1], THREADS, 0, &params)
}
