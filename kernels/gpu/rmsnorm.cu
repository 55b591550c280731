// RMSNorm (Zhang & Sennrich 2019) over rows: y = x rstd w, rstd = 1 / sqrt(mean(x^2) + eps), and its backward
//   n = x rstd, g = dy w:   dx (+)= rstd (g - n mean(g n)),   dw (+)= sum over rows of dy n.
//
// Memory, for rows x cols elements of s bytes: forward reads x and writes y, 2 s an element; backward reads dy and x and writes dx
// (read first where it is added to), 3 s or 4 s, and 8 bytes x groups x cols for partial sums of dw. Limited by memory alone: a few
// FMA per element.
//
// Shape: a row stays in registers between the sum and the scaling, `held` elements a thread, so x is read once (longer rows are read
// again, from cache). Narrow rows (q/k norm, cols = D) take one warp each, wide rows a block. In backward a block walks over a run
// of rows and keeps its columns' sums for dw in registers (what does not fit, in its row of the workspace); column_sum then adds
// the blocks' rows in order: no atomics, the same bits from run to run.
#include "rows.cuh"

constexpr int NORM_THREADS = 256;
constexpr int WIDE_THREADS = 512;
// Elements of a row that a thread holds: 4,096 columns of a block, 8,192 of a wide one, 256 or 512 of a warp.
template <int THREADS> constexpr int held = THREADS == WARP ? 8 : 16;

template <class T> struct RmsNorm {
    Ptr<T> y;
    Ptr<float> rstd;
    Ptr<const T> x;
    Ptr<const T> weight;
    i64 rows;
    i32 cols;
    i32 vector;  // all rows begin at multiples of 16 bytes
    float eps;
    i32 unused;
};

// One row, by THREADS threads of which this is number `t`; N elements a piece.
template <class T, int N, int THREADS> DEVICE void rmsnorm_row(const RmsNorm<T>& p, i64 row, int t, Shared<float> part) {
    constexpr int CHUNKS = held<THREADS> / N;
    const int pieces = p.cols / N;
    Ptr<const T> x = p.x + row * p.cols;
    Piece<N> held[CHUNKS];
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        int i = t + c * THREADS;
        if (i < pieces) {
            load_piece(held[c], x + i * N);
#pragma unroll
            for (int j = 0; j < N; j++) sum += held[c].v[j] * held[c].v[j];
        }
    }
    for (int i = t + CHUNKS * THREADS; i < pieces; i += THREADS) {
        Piece<N> rest;
        load_piece(rest, x + i * N);
#pragma unroll
        for (int j = 0; j < N; j++) sum += rest.v[j] * rest.v[j];
    }
    sum = group_sum<THREADS>(sum, part);
    const float r = div_rn(1.0f, sqrt_rn(sum / (float)p.cols + p.eps));
    if (t == 0) p.rstd[row] = r;
    Ptr<T> y = p.y + row * p.cols;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        int i = t + c * THREADS;
        if (i < pieces) {
            Piece<N> w;
            load_piece(w, p.weight + i * N);
#pragma unroll
            for (int j = 0; j < N; j++) held[c].v[j] = held[c].v[j] * r * w.v[j];
            store_piece(y + i * N, held[c]);
        }
    }
    for (int i = t + CHUNKS * THREADS; i < pieces; i += THREADS) {
        Piece<N> rest, w;
        load_piece(rest, x + i * N);
        load_piece(w, p.weight + i * N);
#pragma unroll
        for (int j = 0; j < N; j++) rest.v[j] = rest.v[j] * r * w.v[j];
        store_piece(y + i * N, rest);
    }
}

template <class T, int THREADS> DEVICE void rmsnorm_block(const RmsNorm<T>& p) {
    SHARED(float, part, THREADS / WARP);
    if (p.vector)
        rmsnorm_row<T, VEC<T>, THREADS>(p, block_id_x(), thread_id(), part);
    else
        rmsnorm_row<T, 1, THREADS>(p, block_id_x(), thread_id(), part);
}

template <class T> DEVICE void rmsnorm_warp(const RmsNorm<T>& p) {
    i64 row = (i64)block_id_x() * (NORM_THREADS / WARP) + warp_id();
    if (row >= p.rows) return;
    if (p.vector)
        rmsnorm_row<T, VEC<T>, WARP>(p, row, lane_id(), Shared<float>{});
    else
        rmsnorm_row<T, 1, WARP>(p, row, lane_id(), Shared<float>{});
}

KERNEL(rmsnorm_f32, RmsNorm<float>, NORM_THREADS) { rmsnorm_block<float, NORM_THREADS>(p); }
KERNEL(rmsnorm_bf16, RmsNorm<bf16>, NORM_THREADS) { rmsnorm_block<bf16, NORM_THREADS>(p); }
KERNEL(rmsnorm_wide_f32, RmsNorm<float>, WIDE_THREADS) { rmsnorm_block<float, WIDE_THREADS>(p); }
KERNEL(rmsnorm_wide_bf16, RmsNorm<bf16>, WIDE_THREADS) { rmsnorm_block<bf16, WIDE_THREADS>(p); }
KERNEL(rmsnorm_warp_f32, RmsNorm<float>, NORM_THREADS) { rmsnorm_warp(p); }
KERNEL(rmsnorm_warp_bf16, RmsNorm<bf16>, NORM_THREADS) { rmsnorm_warp(p); }

template <class T> struct RmsNormBackward {
    Ptr<T> dx;           // null: not wanted
    Ptr<float> partial;  // [blocks, cols] sums of dw; null: not wanted
    Ptr<const T> dy;
    Ptr<const T> x;
    Ptr<const float> rstd;
    Ptr<const T> weight;
    i64 rows;
    i64 rows_per_block;
    i32 cols;
    i32 vector;
    i32 add;  // dx is added to
    i32 unused;
};

// A piece's share of mean(g n), before the factors of the row.
template <int N> DEVICE float dot3(const Piece<N>& dy, const Piece<N>& w, const Piece<N>& x) {
    float s = 0.0f;
#pragma unroll
    for (int j = 0; j < N; j++) s += dy.v[j] * w.v[j] * x.v[j];
    return s;
}

// dx of one piece; `mean` is mean(g n) rstd.
template <class T, int N>
DEVICE void store_dx(const RmsNormBackward<T>& p, i64 at, const Piece<N>& dy, const Piece<N>& w, const Piece<N>& x, float r, float mean) {
    Piece<N> out;
#pragma unroll
    for (int j = 0; j < N; j++) out.v[j] = r * (dy.v[j] * w.v[j] - x.v[j] * mean);
    if (p.add) {
        Piece<N> before;
        load_piece(before, p.dx + at);
#pragma unroll
        for (int j = 0; j < N; j++) out.v[j] += before.v[j];
    }
    store_piece(p.dx + at, out);
}

// Rows first, first + step, ... below `end`. A thread's columns are the same in all rows: it sums dw for them in `dw` and, beyond
// what is held, in `spill`, its block's row of the workspace.
template <class T, int N, int THREADS>
DEVICE void backward_rows(const RmsNormBackward<T>& p, i64 first, i64 end, int step, int t, Shared<float> part, Piece<N> (&dw)[held<THREADS> / N],
                          Ptr<float> spill) {
    constexpr int CHUNKS = held<THREADS> / N;
    const int pieces = p.cols / N;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
        for (int j = 0; j < N; j++) dw[c].v[j] = 0.0f;
    for (i64 row = first; row < end; row += step) {
        const i64 start = row * p.cols;
        const float r = p.rstd[row];
        Piece<N> x[CHUNKS], dy[CHUNKS];
        float sum = 0.0f;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            int i = t + c * THREADS;
            if (i < pieces) {
                load_piece(x[c], p.x + start + i * N);
                load_piece(dy[c], p.dy + start + i * N);
                Piece<N> w;
                load_piece(w, p.weight + i * N);
                sum += dot3(dy[c], w, x[c]);
            }
        }
        for (int i = t + CHUNKS * THREADS; i < pieces; i += THREADS) {
            Piece<N> xr, dyr, w;
            load_piece(xr, p.x + start + i * N);
            load_piece(dyr, p.dy + start + i * N);
            load_piece(w, p.weight + i * N);
            sum += dot3(dyr, w, xr);
            if (spill) {
#pragma unroll
                for (int j = 0; j < N; j++) {
                    float before = row == first ? 0.0f : spill[i * N + j];
                    spill[i * N + j] = before + dyr.v[j] * (xr.v[j] * r);
                }
            }
        }
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
#pragma unroll
            for (int j = 0; j < N; j++)
                if (t + c * THREADS < pieces) dw[c].v[j] += dy[c].v[j] * (x[c].v[j] * r);
        if (!p.dx) continue;
        const float mean = group_sum<THREADS>(sum, part) * r / (float)p.cols * r;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            int i = t + c * THREADS;
            if (i < pieces) {
                Piece<N> w;
                load_piece(w, p.weight + i * N);
                store_dx(p, start + i * N, dy[c], w, x[c], r, mean);
            }
        }
        for (int i = t + CHUNKS * THREADS; i < pieces; i += THREADS) {
            Piece<N> xr, dyr, w;
            load_piece(xr, p.x + start + i * N);
            load_piece(dyr, p.dy + start + i * N);
            load_piece(w, p.weight + i * N);
            store_dx(p, start + i * N, dyr, w, xr, r, mean);
        }
        // The sums of this row have been read before the next row's are written.
        if constexpr (THREADS != WARP) barrier();
    }
}

template <class T, int N, int THREADS> DEVICE void backward_block(const RmsNormBackward<T>& p, Shared<float> part) {
    constexpr int CHUNKS = held<THREADS> / N;
    const i64 first = block_id_x() * p.rows_per_block, end = min_of(first + p.rows_per_block, p.rows);
    Ptr<float> out = p.partial ? p.partial + (i64)block_id_x() * p.cols : p.partial;
    Piece<N> dw[CHUNKS];
    backward_rows<T, N, THREADS>(p, first, end, 1, thread_id(), part, dw, out);
    if (!p.partial) return;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        int i = thread_id() + c * THREADS;
        if (i < p.cols / N) store_floats(out + i * N, dw[c]);
    }
}

// Narrow rows: a warp takes every so-manieth row of the block's run, and the warps' sums are added in order.
template <class T, int N> DEVICE void backward_warps(const RmsNormBackward<T>& p, Shared<float> sums) {
    constexpr int CHUNKS = held<WARP> / N, WARPS = NORM_THREADS / WARP;
    const i64 first = block_id_x() * p.rows_per_block, end = min_of(first + p.rows_per_block, p.rows);
    Piece<N> dw[CHUNKS];
    backward_rows<T, N, WARP>(p, first + warp_id(), end, WARPS, lane_id(), Shared<float>{}, dw, Ptr<float>{});
    if (!p.partial) return;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        int i = lane_id() + c * WARP;
#pragma unroll
        for (int j = 0; j < N; j++)
            if (i < p.cols / N) sums[warp_id() * p.cols + i * N + j] = dw[c].v[j];
    }
    barrier();
    Ptr<float> out = p.partial + (i64)block_id_x() * p.cols;
    for (int i = thread_id(); i < p.cols; i += NORM_THREADS) {
        float s = 0.0f;
        for (int w = 0; w < WARPS; w++) s += sums[w * p.cols + i];
        out[i] = s;
    }
}

template <class T, int THREADS> DEVICE void rmsnorm_backward_block(const RmsNormBackward<T>& p) {
    SHARED(float, part, THREADS / WARP);
    if (p.vector)
        backward_block<T, VEC<T>, THREADS>(p, part);
    else
        backward_block<T, 1, THREADS>(p, part);
}

// Dynamic shared memory: NORM_THREADS / WARP x cols floats.
template <class T> DEVICE void rmsnorm_backward_warp(const RmsNormBackward<T>& p) {
    DYN_SHARED(memory);
    Shared<float> sums = shared_cast<float>(memory, 0);
    if (p.vector)
        backward_warps<T, VEC<T>>(p, sums);
    else
        backward_warps<T, 1>(p, sums);
}

KERNEL(rmsnorm_backward_f32, RmsNormBackward<float>, NORM_THREADS) { rmsnorm_backward_block<float, NORM_THREADS>(p); }
KERNEL(rmsnorm_backward_bf16, RmsNormBackward<bf16>, NORM_THREADS) { rmsnorm_backward_block<bf16, NORM_THREADS>(p); }
KERNEL(rmsnorm_backward_wide_f32, RmsNormBackward<float>, WIDE_THREADS) { rmsnorm_backward_block<float, WIDE_THREADS>(p); }
KERNEL(rmsnorm_backward_wide_bf16, RmsNormBackward<bf16>, WIDE_THREADS) { rmsnorm_backward_block<bf16, WIDE_THREADS>(p); }
KERNEL(rmsnorm_backward_warp_f32, RmsNormBackward<float>, NORM_THREADS) { rmsnorm_backward_warp(p); }
KERNEL(rmsnorm_backward_warp_bf16, RmsNormBackward<bf16>, NORM_THREADS) { rmsnorm_backward_warp(p); }
