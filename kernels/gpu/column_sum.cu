// out[c] (+)= sum over g of partial[g][c], in a fixed order: the last step of every gradient that is a sum over rows, whose blocks
// left one row of partial sums each. partial [groups, cols] f32, out [cols] f32.
//
// Memory: 4 bytes x groups x cols read once. Columns are few (a hidden vector), so a block takes COLS of them and its threads SLICES
// slices of the groups, else a few blocks would each wait for a long chain of loads; slices are added in order.
#include "compat.h"

constexpr int SUM_COLS = 64;
constexpr int SUM_SLICES = 4;
constexpr int SUM_THREADS = SUM_COLS * SUM_SLICES;

struct ColumnSum {
    Ptr<float> out;
    Ptr<const float> partial;
    i64 groups;
    i64 cols;
    i32 add;
    i32 unused;
};

KERNEL(column_sum_f32, ColumnSum, SUM_THREADS) {
    SHARED(float, sums, SUM_THREADS);
    const int slice = thread_id() / SUM_COLS;
    const i64 col = (i64)block_id_x() * SUM_COLS + thread_id() % SUM_COLS;
    const i64 each = div_up<i64>(p.groups, SUM_SLICES), first = slice * each, end = min_of(first + each, p.groups);
    float s = 0.0f;
    if (col < p.cols)
        for (i64 g = first; g < end; g++) s += p.partial[g * p.cols + col];
    sums[thread_id()] = s;
    barrier();
    if (slice > 0 || col >= p.cols) return;
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < SUM_SLICES; i++) total += sums[i * SUM_COLS + thread_id()];
    if (p.add) total += p.out[col];
    p.out[col] = total;
}
