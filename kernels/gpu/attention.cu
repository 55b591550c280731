// Flash attention, forward (Dao 2023): o = softmax(scale q k^T, causal, in a window, within documents) v and the logarithm of each
// row's sum, over tiles of keys with a running maximum; scores exist in registers only.
//
// Memory, for one tile of rows (tokens x heads of one kv head) and elements of s bytes: reads its rows of q and writes its rows of o,
// 2 rows D s, writes 4 rows for lse, and reads 2 keys D s for the keys that its rows see, once for all query heads of the group.
// Arithmetic: 4 rows keys D FLOP, so a tile of 128 rows does 128 FLOP for each byte of bf16 keys and values; from about 2,000
// tokens on matrix cores are the limit, and reads of shared memory close behind.
//
// Shape: warps take 16 M rows each and all keys. q is in registers where they allow it; k and v have one buffer each in shared
// memory: v arrives while q k^T is computed, the next k during p v, two barriers a tile. Where rows are long or f32, the two share a
// buffer. Tiles that no row of the block sees are not read; a warp skips those that none of its rows sees, and masks only at edges.
// Blocks with most keys come first. p is rounded to bf16 as the matrix cores' operand, its sum is not.
#include "attention.cuh"

// WARPS x M x 16 rows, BN keys a step; HELD: q stays in registers; ONE: k and v share a buffer.
template <class T, int D> struct ForwardShape {
    static constexpr bool WIDE = WARP == 64, F32 = sizeof(T) == 4;
    static constexpr int WARPS = D <= 128 ? 4 : !WIDE ? 8 : F32 ? 2 : 4;
    static constexpr int M = F32 || D > 128 ? 1 : 2;
    static constexpr int BN = F32 ? (D > 128 ? 16 : 32) : !WIDE && D > 64 ? 32 : 64;
    static constexpr int BLOCKS = F32 || D > 128 || WIDE ? 1 : 2;
    static constexpr bool HELD = WIDE;
    static constexpr bool ONE = F32 && D > 128;
    static constexpr int ROWS = 16 * M * WARPS, THREADS = WARPS * WARP;
    static constexpr int KEYS_BYTES = (ONE ? 1 : 2) * BN * D * (int)sizeof(T), ROWS_BYTES = ROWS * D * (int)sizeof(T);
    static constexpr int TILE_BYTES = HELD ? (KEYS_BYTES > ROWS_BYTES ? KEYS_BYTES : ROWS_BYTES) : KEYS_BYTES + ROWS_BYTES;
    static constexpr int SHARED_BYTES = TILE_BYTES + WARPS * Mma<T>::SCRATCH * 4;
};

// The boundaries of the documents, checked by one block.
struct Boundaries {
    Ptr<u64> fault;
    Ptr<const i32> bounds;
    i32 documents;
    i32 tokens;
};
KERNEL(attention_boundaries, Boundaries, BOUNDARY_THREADS) { check_boundaries(p.bounds, p.documents, p.tokens, p.fault); }

template <class T> struct AttentionForward {
    Ptr<T> o;
    Ptr<float> lse;
    Ptr<const T> q;
    Ptr<const T> k;
    Ptr<const T> v;
    Ptr<const i32> bounds;
    Geometry g;
};

// Scores of keys that a row does not see become -inf. `key`: of the first score, `row`: of the warp's first.
template <int M, int N> DEVICE void mask(Acc (&s)[M][N], const QueryRows& rows, int row, int key, int window) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < ACC_ELEMS; i++) {
            const int token = rows.token(row + 16 * m + acc_row(i));
#pragma unroll
            for (int n = 0; n < N; n++) {
                const int behind = token - (key + 16 * n + acc_col(i));
                if (behind < 0 || behind >= window) s[m][n].v[i] = -INFINITE;
            }
        }
}

// One step of the online softmax: scores become powers, `top` and `total` (this lane's share) go on, o is brought to the new top.
template <int M, int N, int C>
DEVICE void softmax_step(Acc (&s)[M][N], Acc (&o)[M][C], float (&top)[M][ACC_ROWS], float (&total)[M][ACC_ROWS], float scale) {
#pragma unroll
    for (int m = 0; m < M; m++) {
        float decay[ACC_ROWS], offset[ACC_ROWS], most[ACC_ROWS];
#pragma unroll
        for (int r = 0; r < ACC_ROWS; r++) most[r] = top[m][r];
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < ACC_ELEMS; i++) most[acc_slot(i)] = max_f(most[acc_slot(i)], s[m][n].v[i]);
#pragma unroll
        for (int r = 0; r < ACC_ROWS; r++) {
            const float now = row_max(most[r]);
            // A row that saw no key yet has maximum -inf; with any finite offset its powers are 0.
            offset[r] = now == -INFINITE ? 0.0f : -now * scale;
            decay[r] = exp2_fast(fma_rn(top[m][r], scale, offset[r]));
            top[m][r] = now;
            total[m][r] *= decay[r];
        }
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < ACC_ELEMS; i++) {
                const float p = exp2_fast(fma_rn(s[m][n].v[i], scale, offset[acc_slot(i)]));
                s[m][n].v[i] = p;
                total[m][acc_slot(i)] += p;
            }
#pragma unroll
        for (int c = 0; c < C; c++)
#pragma unroll
            for (int i = 0; i < ACC_ELEMS; i++) o[m][c].v[i] *= decay[acc_slot(i)];
    }
}

template <class T, int D> DEVICE void attention_forward(const AttentionForward<T>& p) {
    using S = ForwardShape<T, D>;
    constexpr int M = S::M, BN = S::BN, N = BN / 16, THREADS = S::THREADS;
    DYN_SHARED(memory);
    const Geometry& g = p.g;
    const int kv_head = block_id_x() % g.kv_heads, tile = g.tiles - 1 - block_id_x() / g.kv_heads;
    const Span d = find_span<S::ROWS>(g, p.bounds, tile, g.group);
    const QueryRows rows = query_rows(g, d, kv_head, d.first, min_of(S::ROWS, d.tokens * g.group - d.first));
    if (rows.count <= 0) return;

    Tile<T, D> tq{shared_cast<T>(memory, S::HELD ? 0 : S::KEYS_BYTES)};
    Tile<T, D> tk{shared_cast<T>(memory, 0)}, tv{shared_cast<T>(memory, S::ONE ? 0 : S::KEYS_BYTES / 2)};
    Shared<float> scratch = shared_cast<float>(memory, S::TILE_BYTES) + warp_id() * Mma<T>::SCRATCH;

    const int row0 = warp_id() * 16 * M, last = min_of(row0 + 16 * M, rows.count) - 1;
    Left<T, M, D, S::HELD> q;
    {
        Fetch<T, S::ROWS, D, THREADS> fetch;
        fetch.start(tq, p.q, rows, g.vector);
        fetch.finish(tq);
        barrier();
        q.take(tq, row0);
        if (S::HELD) barrier();
    }
    // Tokens of this warp's rows, if it has any; keys [low, high) are seen by some row of the block.
    const int first_token = rows.token(row0), last_token = last < row0 ? -1 : rows.token(last);
    const int low = max_of(rows.token0 - g.window + 1, 0), high = rows.token(rows.count - 1) + 1;

    Acc o[M][D / 16];
    clear_all(o);
    float top[M][ACC_ROWS], total[M][ACC_ROWS];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int r = 0; r < ACC_ROWS; r++) top[m][r] = -INFINITE, total[m][r] = 0.0f;

    const auto at = [&](int key) { return key_rows(g, d, kv_head, key, min_of(BN, high - key)); };
    Fetch<T, BN, D, THREADS> fetch;
    fetch.start(tk, p.k, at(low), g.vector);
    fetch.finish(tk);
    barrier();
    for (int key = low; key < high; key += BN) {
        const bool more = key + BN < high;
        if (!S::ONE) fetch.start(tv, p.v, at(key), g.vector);
        const bool seen = key <= last_token && key + BN > first_token - g.window + 1;
        Rounded<T, M, N> rounded;
        if (seen) {
            Acc s[M][N];
            scores(s, q, tk, 0);
            if (key + BN - 1 > first_token || key <= last_token - g.window) mask(s, rows, row0, key, g.window);
            softmax_step(s, o, top, total, g.scale_log2);
            rounded.take(s);
        }
        if (S::ONE) {
            barrier();
            fetch.start(tv, p.v, at(key), g.vector);
        }
        fetch.finish(tv);
        barrier();
        if (!S::ONE && more) fetch.start(tk, p.k, at(key + BN), g.vector);
        if (seen) accumulate(o, rounded, tv, 0, scratch);
        if (S::ONE) {
            barrier();
            if (more) fetch.start(tk, p.k, at(key + BN), g.vector);
        }
        if (more) fetch.finish(tk);
        barrier();
    }

#pragma unroll
    for (int m = 0; m < M; m++) {
        float part[ACC_ROWS];
#pragma unroll
        for (int r = 0; r < ACC_ROWS; r++) {
            const float sum = row_sum(total[m][r]);
            const int row = row0 + 16 * m + slot_row(r);
            part[r] = div_rn(1.0f, sum);
            if (acc_col(0) == 0 && row < rows.count) p.lse[rows.start + rows.index(row)] = top[m][r] * g.scale + log2_fast(sum) * LN2;
        }
#pragma unroll
        for (int c = 0; c < D / 16; c++)
#pragma unroll
            for (int i = 0; i < ACC_ELEMS; i++) o[m][c].v[i] *= part[acc_slot(i)];
    }
    store_rows<T, M, D>(p.o, rows, tq, row0, o, g.vector);
}

KERNEL_OCC(attention_64_f32, AttentionForward<float>, (ForwardShape<float, 64>::THREADS), (ForwardShape<float, 64>::BLOCKS)) { attention_forward<float, 64>(p); }
KERNEL_OCC(attention_96_f32, AttentionForward<float>, (ForwardShape<float, 96>::THREADS), (ForwardShape<float, 96>::BLOCKS)) { attention_forward<float, 96>(p); }
KERNEL_OCC(attention_128_f32, AttentionForward<float>, (ForwardShape<float, 128>::THREADS), (ForwardShape<float, 128>::BLOCKS)) { attention_forward<float, 128>(p); }
KERNEL_OCC(attention_256_f32, AttentionForward<float>, (ForwardShape<float, 256>::THREADS), (ForwardShape<float, 256>::BLOCKS)) { attention_forward<float, 256>(p); }
KERNEL_OCC(attention_64_bf16, AttentionForward<bf16>, (ForwardShape<bf16, 64>::THREADS), (ForwardShape<bf16, 64>::BLOCKS)) { attention_forward<bf16, 64>(p); }
KERNEL_OCC(attention_96_bf16, AttentionForward<bf16>, (ForwardShape<bf16, 96>::THREADS), (ForwardShape<bf16, 96>::BLOCKS)) { attention_forward<bf16, 96>(p); }
KERNEL_OCC(attention_128_bf16, AttentionForward<bf16>, (ForwardShape<bf16, 128>::THREADS), (ForwardShape<bf16, 128>::BLOCKS)) { attention_forward<bf16, 128>(p); }
KERNEL_OCC(attention_256_bf16, AttentionForward<bf16>, (ForwardShape<bf16, 256>::THREADS), (ForwardShape<bf16, 256>::BLOCKS)) { attention_forward<bf16, 256>(p); }
