// Flash attention, backward (Dao 2023): with P = exp(scale q k^T - lse) and delta = rowsum(do * o),
//   dv = P^T do,   dS = P * (do v^T - delta),   dq = scale dS k,   dk = scale dS^T q.
// Three kernels, no atomics: delta first; then dk and dv by blocks of keys; then dq by blocks of rows. Each computes the P and dS that
// it needs again, 7 products of tiles instead of 5, and every sum has one order.
//
// Memory, for elements of s bytes: delta reads o and do once and writes 4 bytes a row. A block of keys reads its k and v and writes
// its dk and dv, 4 keys D s, and reads q and do, 2 D s, and 8 bytes of statistics of every row that sees its keys. A block of rows
// reads q and do and writes dq, 3 rows D s, and reads k and v of the keys that its rows see. Matrix cores are the limit from about
// 1,000 tokens on, and reads of shared memory close behind.
//
// Shape: transposed scores, keys down and rows across, are the operands of dv and dk as they lie in registers, so a warp that owns 16
// keys needs nothing from the others; all warps share tiles of q and do. The sums of dk and dv fill a warp's registers: at 256
// columns they do not fit together and are computed by one kernel each. For dq it is the forward pass once more.
#include "attention.cuh"

template <class T> struct AttentionDelta {
    Ptr<u64> fault;
    Ptr<const i32> bounds;
    Ptr<float> delta;  // [N, H]
    Ptr<const T> o;    // [N, H*D]
    Ptr<const T> dout;
    i64 rows;  // N H
    i32 documents;
    i32 tokens;
    i32 dim;
    i32 vector;
};

constexpr int DELTA_LANES = 8, DELTA_ROWS = BOUNDARY_THREADS / DELTA_LANES;

// DELTA_LANES lanes a row. The first block checks the boundaries.
template <class T> DEVICE void attention_delta(const AttentionDelta<T>& p) {
    if (block_id_x() == 0) check_boundaries(p.bounds, p.documents, p.tokens, p.fault);
    const i64 row = (i64)block_id_x() * DELTA_ROWS + thread_id() / DELTA_LANES;
    const int lane = thread_id() % DELTA_LANES;
    float sum = 0.0f;
    if (row < p.rows) {
        for (int col = lane * VEC<T>; col < p.dim; col += DELTA_LANES * VEC<T>) {
            float a[VEC<T>], b[VEC<T>];
            unpack16(a, load_chunk(p.o + row * p.dim, col, p.dim, p.vector));
            unpack16(b, load_chunk(p.dout + row * p.dim, col, p.dim, p.vector));
#pragma unroll
            for (int i = 0; i < VEC<T>; i++) sum += a[i] * b[i];
        }
    }
#pragma unroll
    for (int mask = DELTA_LANES / 2; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
    if (lane == 0 && row < p.rows) p.delta[row] = sum;
}

KERNEL(attention_delta_f32, AttentionDelta<float>, BOUNDARY_THREADS) { attention_delta(p); }
KERNEL(attention_delta_bf16, AttentionDelta<bf16>, BOUNDARY_THREADS) { attention_delta(p); }

template <class T> struct AttentionBackward {
    Ptr<T> dq;
    Ptr<T> dk;
    Ptr<T> dv;
    Ptr<const T> dout;
    Ptr<const T> q;
    Ptr<const T> k;
    Ptr<const T> v;
    Ptr<const float> lse;
    Ptr<const float> delta;
    Ptr<const i32> bounds;
    Geometry g;
};

// Blocks of keys: WARPS x 16 keys, ROWS rows a step of which a warp takes 16 N at a time, STAGES of tiles, k and v in registers or in
// shared memory.
template <class T, int D> struct KeyShape {
    static constexpr bool F32 = sizeof(T) == 4;
    static constexpr int WARPS = F32 ? (D > 128 ? 1 : 2) : NARROW ? 4 : 2;
    static constexpr int N = F32 ? 1 : 2, ROWS = F32 ? 16 : 32;
    static constexpr int STAGES = NARROW ? 2 : 1;
    static constexpr bool HELD = !NARROW;
    static constexpr int BLOCKS = 1;
    static constexpr int KEYS = 16 * WARPS, THREADS = WARPS * WARP;
    static constexpr int KEYS_ELEMS = KEYS * D, ROWS_ELEMS = ROWS * D;
    // k and v, later dk and dv; tiles of q and do, which are first where k and v come in to be held.
    static constexpr int KEYS_BYTES = HELD ? 0 : 2 * KEYS_ELEMS * (int)sizeof(T);
    static constexpr int ROWS_BYTES = 2 * (HELD && KEYS_ELEMS > STAGES * ROWS_ELEMS ? KEYS_ELEMS : STAGES * ROWS_ELEMS) * (int)sizeof(T);
    static constexpr int STATS_BYTES = 2 * STAGES * ROWS * 4;
    static constexpr int SHARED_BYTES = KEYS_BYTES + ROWS_BYTES + STATS_BYTES + WARPS * Mma<T>::SCRATCH * 4;
};

// lse log2(e) and delta of a tile's rows, of which this thread takes one; rows that do not exist get P = 0.
struct Stats {
    float lse, delta;
    DEVICE void start(Ptr<const float> plse, Ptr<const float> pdelta, const QueryRows& rows) {
        const int row = thread_id();
        lse = INFINITE, delta = 0.0f;
        if (row < rows.count) {
            const i64 at = rows.start + rows.index(row);
            float l = plse[at];
            lse = l * LOG2E;
            delta = pdelta[at];
        }
    }
    DEVICE void finish(Shared<float> to, int count) {
        if (thread_id() < count) to[thread_id()] = lse, to[count + thread_id()] = delta;
    }
};

enum class Want { Both, Values, Keys };

template <class T, int D, Want WANT> DEVICE void attention_keys(const AttentionBackward<T>& p) {
    using S = KeyShape<T, D>;
    constexpr int N = S::N, ROWS = S::ROWS, THREADS = S::THREADS;
    constexpr bool DV = WANT != Want::Keys, DK = WANT != Want::Values;
    static_assert(ROWS <= THREADS && ROWS % (16 * N) == 0, "a thread has one row's statistics, a warp whole steps");
    DYN_SHARED(memory);
    const Geometry& g = p.g;
    // Keys at the beginning are seen by most rows, and come first.
    const int kv_head = block_id_x() % g.kv_heads;
    const Span d = find_span<S::KEYS>(g, p.bounds, block_id_x() / g.kv_heads, 1);
    const KeyRows keys = key_rows(g, d, kv_head, d.first, min_of(S::KEYS, d.tokens - d.first));
    if (keys.count <= 0) return;

    constexpr int TILES = S::KEYS_BYTES + S::ROWS_BYTES, HALF = S::ROWS_BYTES / 2;
    Tile<T, D> tk{shared_cast<T>(memory, 0)}, tv{shared_cast<T>(memory, S::HELD ? HALF : S::KEYS_BYTES / 2)};
    Shared<T> tq = shared_cast<T>(memory, S::KEYS_BYTES), tdo = shared_cast<T>(memory, S::KEYS_BYTES + HALF);
    Shared<float> stats = shared_cast<float>(memory, TILES);
    Shared<float> scratch = shared_cast<float>(memory, TILES + S::STATS_BYTES) + warp_id() * Mma<T>::SCRATCH;

    const int key0 = warp_id() * 16;
    Left<T, 1, D, S::HELD> k, v;
    {
        Fetch<T, S::KEYS, D, THREADS> fetch, also;
        fetch.start(tk, p.k, keys, g.vector);
        if (DK) also.start(tv, p.v, keys, g.vector);
        fetch.finish(tk);
        if (DK) also.finish(tv);
        barrier();
        k.take(tk, key0);
        if (DK) v.take(tv, key0);
        if (S::HELD) barrier();
    }
    const int first_key = d.first + key0, last_key = d.first + min_of(key0 + 16, keys.count) - 1;
    // Rows that see a key of the block.
    const i64 after = min_of((i64)d.first + keys.count - 1 + g.window, (i64)d.tokens) * g.group;
    const int begin = d.first * g.group, end = (int)after;

    Acc dk[1][DK ? D / 16 : 1], dv[1][DV ? D / 16 : 1];
    clear_all(dk);
    clear_all(dv);

    Fetch<T, ROWS, D, THREADS> fetch_q, fetch_do;
    Stats fetch_stats;
    QueryRows rows = query_rows(g, d, kv_head, begin, min_of(ROWS, end - begin));
    fetch_q.start(Tile<T, D>{tq}, p.q, rows, g.vector);
    fetch_do.start(Tile<T, D>{tdo}, p.dout, rows, g.vector);
    fetch_stats.start(p.lse, p.delta, rows);
    fetch_q.finish(Tile<T, D>{tq});
    fetch_do.finish(Tile<T, D>{tdo});
    fetch_stats.finish(stats, ROWS);
    barrier();
    int stage = 0;
    for (int row = begin; row < end; row += ROWS) {
        const bool more = row + ROWS < end;
        const int other = S::STAGES - 1 - stage;
        const Tile<T, D> q{tq + stage * S::ROWS_ELEMS}, dout{tdo + stage * S::ROWS_ELEMS};
        const Tile<T, D> next_q{tq + other * S::ROWS_ELEMS}, next_do{tdo + other * S::ROWS_ELEMS};
        const Shared<float> here = stats + stage * 2 * ROWS, next_stats = stats + other * 2 * ROWS;
        const QueryRows next = query_rows(g, d, kv_head, more ? row + ROWS : row, min_of(ROWS, end - row - ROWS));
        if (more) {
            fetch_q.start(next_q, p.q, next, g.vector);
            fetch_do.start(next_do, p.dout, next, g.vector);
            fetch_stats.start(p.lse, p.delta, next);
        }
#pragma unroll 1
        for (int at = 0; at < ROWS; at += 16 * N) {
            const int first_token = rows.token(at), last_token = rows.token(at + 16 * N - 1);
            const bool seen = key0 < keys.count && at < rows.count && first_key <= last_token && last_key > first_token - g.window;
            if (!seen) continue;
            Acc s[1][N], ds[1][DK ? N : 1];
            scores(s, k, q, at);
            if constexpr (DK) scores(ds, v, dout, at);
            const bool edge = last_key > first_token || first_key <= last_token - g.window;
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int i = 0; i < ACC_ELEMS; i++) {
                    const int r = at + 16 * n + acc_col(i);
                    const float lse = here[r];
                    float x = exp2_fast(fma_rn(s[0][n].v[i], g.scale_log2, -lse));
                    if (edge) {
                        const int behind = rows.token(r) - (first_key + acc_row(i));
                        if (behind < 0 || behind >= g.window) x = 0.0f;
                    }
                    s[0][n].v[i] = x;
                    if constexpr (DK) {
                        const float delta = here[ROWS + r];
                        ds[0][n].v[i] = x * (ds[0][n].v[i] - delta);
                    }
                }
            Rounded<T, 1, N> rounded;
            if constexpr (DV) {
                rounded.take(s);
                accumulate(dv, rounded, dout, at, scratch);
            }
            if constexpr (DK) {
                rounded.take(ds);
                accumulate(dk, rounded, q, at, scratch);
            }
        }
        if (S::STAGES == 1) barrier();
        if (more) {
            fetch_q.finish(next_q);
            fetch_do.finish(next_do);
            fetch_stats.finish(next_stats, ROWS);
        }
        barrier();
        rows = next;
        stage = other;
    }
    if constexpr (DK) {
        scale_all(dk, g.scale);
        store_rows<T, 1, D>(p.dk, keys, tk, key0, dk, g.vector);
    }
    if constexpr (DV) store_rows<T, 1, D>(p.dv, keys, tv, key0, dv, g.vector);
}

// Blocks of rows: WARPS x M x 16 rows, BN keys a step.
template <class T, int D> struct QueryShape {
    static constexpr bool F32 = sizeof(T) == 4;
    static constexpr int WARPS = F32 ? (D > 128 && !NARROW ? 1 : 2) : D > 128 && !NARROW ? 2 : 4;
    static constexpr int M = 1;
    static constexpr int BN = F32 ? 16 : 32;
    static constexpr bool HELD = !NARROW, IN_TURN = !NARROW && WARPS == 1;
    static constexpr int BLOCKS = 1;
    static constexpr int ROWS = 16 * M * WARPS, THREADS = WARPS * WARP;
    static constexpr int KEYS_BYTES = 2 * BN * D * (int)sizeof(T), ROWS_BYTES = 2 * ROWS * D * (int)sizeof(T);
    static constexpr int TILE_BYTES = HELD ? (KEYS_BYTES > ROWS_BYTES ? KEYS_BYTES : ROWS_BYTES) : KEYS_BYTES + ROWS_BYTES;
    static constexpr int SHARED_BYTES = TILE_BYTES + WARPS * Mma<T>::SCRATCH * 4;
};

template <class T, int D> DEVICE void attention_queries(const AttentionBackward<T>& p) {
    using S = QueryShape<T, D>;
    constexpr int M = S::M, BN = S::BN, N = BN / 16, THREADS = S::THREADS;
    DYN_SHARED(memory);
    const Geometry& g = p.g;
    const int kv_head = block_id_x() % g.kv_heads, tile = g.tiles - 1 - block_id_x() / g.kv_heads;
    const Span d = find_span<S::ROWS>(g, p.bounds, tile, g.group);
    const QueryRows rows = query_rows(g, d, kv_head, d.first, min_of(S::ROWS, d.tokens * g.group - d.first));
    if (rows.count <= 0) return;

    constexpr int AT = S::HELD ? 0 : S::KEYS_BYTES;
    Tile<T, D> tq{shared_cast<T>(memory, AT)}, tdo{shared_cast<T>(memory, AT + S::ROWS_BYTES / 2)};
    Tile<T, D> tk{shared_cast<T>(memory, 0)}, tv{shared_cast<T>(memory, S::KEYS_BYTES / 2)};
    Shared<float> scratch = shared_cast<float>(memory, S::TILE_BYTES) + warp_id() * Mma<T>::SCRATCH;

    const int row0 = warp_id() * 16 * M, last = min_of(row0 + 16 * M, rows.count) - 1;
    Left<T, M, D, S::HELD> q, dout;
    {
        Fetch<T, S::ROWS, D, THREADS> fetch, also;
        fetch.start(tq, p.q, rows, g.vector);
        also.start(tdo, p.dout, rows, g.vector);
        fetch.finish(tq);
        also.finish(tdo);
        barrier();
        q.take(tq, row0);
        dout.take(tdo, row0);
        if (S::HELD) barrier();
    }
    float lse[M][ACC_ROWS], delta[M][ACC_ROWS];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int r = 0; r < ACC_ROWS; r++) {
            const int row = row0 + 16 * m + slot_row(r);
            lse[m][r] = INFINITE, delta[m][r] = 0.0f;
            if (row < rows.count) {
                const i64 at = rows.start + rows.index(row);
                float l = p.lse[at];
                lse[m][r] = l * LOG2E;
                delta[m][r] = p.delta[at];
            }
        }
    const int first_token = rows.token(row0), last_token = last < row0 ? -1 : rows.token(last);
    const int low = max_of(rows.token0 - g.window + 1, 0), high = rows.token(rows.count - 1) + 1;

    Acc dq[M][D / 16];
    clear_all(dq);
    Fetch<T, BN, D, THREADS> fetch_k, fetch_v;
    const KeyRows first = key_rows(g, d, kv_head, low, min_of(BN, high - low));
    fetch_k.start(tk, p.k, first, g.vector);
    fetch_k.finish(tk);
    fetch_v.start(tv, p.v, first, g.vector);
    fetch_v.finish(tv);
    barrier();
    for (int key = low; key < high; key += BN) {
        const bool more = key + BN < high;
        const KeyRows next = key_rows(g, d, kv_head, key + BN, min_of(BN, high - key - BN));
        const bool seen = key <= last_token && key + BN > first_token - g.window + 1;
        Rounded<T, M, N> rounded;
        if (seen) {
            Acc s[M][N], dp[M][N];
            scores(dp, dout, tv, 0);
            scores(s, q, tk, 0);
            const bool edge = key + BN - 1 > first_token || key <= last_token - g.window;
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int n = 0; n < N; n++)
#pragma unroll
                    for (int i = 0; i < ACC_ELEMS; i++) {
                        float x = exp2_fast(fma_rn(s[m][n].v[i], g.scale_log2, -lse[m][acc_slot(i)]));
                        if (edge) {
                            const int behind = rows.token(row0 + 16 * m + acc_row(i)) - (key + 16 * n + acc_col(i));
                            if (behind < 0 || behind >= g.window) x = 0.0f;
                        }
                        s[m][n].v[i] = x * (dp[m][n].v[i] - delta[m][acc_slot(i)]);
                    }
            rounded.take(s);
        }
        // All have read v; the next one comes during the product with k.
        barrier();
        // A tile of the largest rows on its way does not fit the registers of one warp beside a product.
        if (more && !S::IN_TURN) fetch_v.start(tv, p.v, next, g.vector);
        if (seen) accumulate(dq, rounded, tk, 0, scratch);
        barrier();
        if (more) {
            if (S::IN_TURN) {
                fetch_v.start(tv, p.v, next, g.vector);
                fetch_v.finish(tv);
            }
            fetch_k.start(tk, p.k, next, g.vector);
            if (!S::IN_TURN) fetch_v.finish(tv);
            fetch_k.finish(tk);
        }
        barrier();
    }
    scale_all(dq, g.scale);
    store_rows<T, M, D>(p.dq, rows, tq, row0, dq, g.vector);
}

KERNEL_OCC(attention_dkdv_64_f32, AttentionBackward<float>, (KeyShape<float, 64>::THREADS), (KeyShape<float, 64>::BLOCKS)) { attention_keys<float, 64, Want::Both>(p); }
KERNEL_OCC(attention_dkdv_96_f32, AttentionBackward<float>, (KeyShape<float, 96>::THREADS), (KeyShape<float, 96>::BLOCKS)) { attention_keys<float, 96, Want::Both>(p); }
KERNEL_OCC(attention_dkdv_128_f32, AttentionBackward<float>, (KeyShape<float, 128>::THREADS), (KeyShape<float, 128>::BLOCKS)) { attention_keys<float, 128, Want::Both>(p); }
KERNEL_OCC(attention_dv_256_f32, AttentionBackward<float>, (KeyShape<float, 256>::THREADS), (KeyShape<float, 256>::BLOCKS)) { attention_keys<float, 256, Want::Values>(p); }
KERNEL_OCC(attention_dk_256_f32, AttentionBackward<float>, (KeyShape<float, 256>::THREADS), (KeyShape<float, 256>::BLOCKS)) { attention_keys<float, 256, Want::Keys>(p); }
KERNEL_OCC(attention_dkdv_64_bf16, AttentionBackward<bf16>, (KeyShape<bf16, 64>::THREADS), (KeyShape<bf16, 64>::BLOCKS)) { attention_keys<bf16, 64, Want::Both>(p); }
KERNEL_OCC(attention_dkdv_96_bf16, AttentionBackward<bf16>, (KeyShape<bf16, 96>::THREADS), (KeyShape<bf16, 96>::BLOCKS)) { attention_keys<bf16, 96, Want::Both>(p); }
KERNEL_OCC(attention_dkdv_128_bf16, AttentionBackward<bf16>, (KeyShape<bf16, 128>::THREADS), (KeyShape<bf16, 128>::BLOCKS)) { attention_keys<bf16, 128, Want::Both>(p); }
KERNEL_OCC(attention_dv_256_bf16, AttentionBackward<bf16>, (KeyShape<bf16, 256>::THREADS), (KeyShape<bf16, 256>::BLOCKS)) { attention_keys<bf16, 256, Want::Values>(p); }
KERNEL_OCC(attention_dk_256_bf16, AttentionBackward<bf16>, (KeyShape<bf16, 256>::THREADS), (KeyShape<bf16, 256>::BLOCKS)) { attention_keys<bf16, 256, Want::Keys>(p); }
KERNEL_OCC(attention_dq_64_f32, AttentionBackward<float>, (QueryShape<float, 64>::THREADS), (QueryShape<float, 64>::BLOCKS)) { attention_queries<float, 64>(p); }
KERNEL_OCC(attention_dq_96_f32, AttentionBackward<float>, (QueryShape<float, 96>::THREADS), (QueryShape<float, 96>::BLOCKS)) { attention_queries<float, 96>(p); }
KERNEL_OCC(attention_dq_128_f32, AttentionBackward<float>, (QueryShape<float, 128>::THREADS), (QueryShape<float, 128>::BLOCKS)) { attention_queries<float, 128>(p); }
KERNEL_OCC(attention_dq_256_f32, AttentionBackward<float>, (QueryShape<float, 256>::THREADS), (QueryShape<float, 256>::BLOCKS)) { attention_queries<float, 256>(p); }
KERNEL_OCC(attention_dq_64_bf16, AttentionBackward<bf16>, (QueryShape<bf16, 64>::THREADS), (QueryShape<bf16, 64>::BLOCKS)) { attention_queries<bf16, 64>(p); }
KERNEL_OCC(attention_dq_96_bf16, AttentionBackward<bf16>, (QueryShape<bf16, 96>::THREADS), (QueryShape<bf16, 96>::BLOCKS)) { attention_queries<bf16, 96>(p); }
KERNEL_OCC(attention_dq_128_bf16, AttentionBackward<bf16>, (QueryShape<bf16, 128>::THREADS), (QueryShape<bf16, 128>::BLOCKS)) { attention_queries<bf16, 128>(p); }
KERNEL_OCC(attention_dq_256_bf16, AttentionBackward<bf16>, (QueryShape<bf16, 256>::THREADS), (QueryShape<bf16, 256>::BLOCKS)) { attention_queries<bf16, 256>(p); }
