// LoRA (Hu et al. 2021) of all adapters that share an input x [N,I], over f32 adapters A [R,I], B [O,R]:
//   t = drop(x) A^T,   y += scale t B^T
// on matrix cores, bf16 or f32 activations; adapters and t are split so that they keep f32 precision (split.cuh). Dropout's masks are
// made again where they are needed (philox.cuh). Backward is in lora_backward.cu.
//
// Memory alone limits it (2 R operations for each byte of x at rank R), so x and y are touched once:
//   lora_down   t: a block has 64 tokens (32 of large ranks on wide machines, which have more units) and a part of I, all adapters' ranks.
//               Parts leave f32 sums [parts, N, ranks], lora_sum adds them in order. Reads x once; 8 parts N ranks bytes of partial sums.
//   lora_up     y += t B^T: a block has 128 columns of one adapter and walks over tokens with B in shared memory. y once in, once out.
// The host chooses parts and groups: as few as give every compute unit a block.
#include "lora.cuh"

// ---- t = drop(x) A^T -------------------------------------------------------------------------------------------------

template <class T> struct LoraDown {
    Ptr<const T> x;      // [N, W]
    Ptr<float> partial;  // [parts, N, 16 tiles]; null: one part, straight to skinny
    i64 tokens;
    i32 width;
    i32 part;  // W of one part, a multiple of a step
    i32 tiles;
    i32 slices;
    i32 vector;
    i32 unused;
    Dropout drop;
    Slice<T> slice[MAX_SLICES];
};

// How the warps of a block share its work: 2 along tokens, CW along ranks, KW along the inner dimension.
template <class T, bool LARGE> struct Down {
    static constexpr int MT = LARGE && !COPY_ENGINE ? 1 : 2, TOKENS = 32 * MT;
    static constexpr int TILES = LARGE ? LARGE_TILES : SMALL_TILES, KW = LARGE ? 1 : WARPS / 2, CW = LARGE ? WARPS / 2 : 1, NT = TILES / CW;
    static constexpr int STEP = (WARP == 32 && !LARGE ? 128 : 64) / (int)sizeof(T), V = VEC<T>;
    static constexpr int P_ROWS = 16 * TILES, P_CHUNKS = P_ROWS * STEP / V / LORA_THREADS;
    using X = Tile<T, STEP>;
    using P = SplitTile<T, STEP>;
    using Move = Mover<T, TOKENS, STEP, LORA_THREADS>;
    static constexpr int X_BYTES = TOKENS * STEP * (int)sizeof(T), P_BYTES = P_ROWS * STEP * 4;
    static constexpr int P_AT = WIDE_STAGES * X_BYTES, DROPPED_AT = P_AT + 2 * P_BYTES;
    static_assert(P_ROWS * STEP / V % LORA_THREADS == 0, "threads share the chunks of P");
};

template <class T, bool LARGE> DEVICE void lora_down(const LoraDown<T>& p) {
    using D = Down<T, LARGE>;
    constexpr int STEP = D::STEP, V = D::V, NT = D::NT, MT = D::MT, TOKENS = D::TOKENS;
    DYN_SHARED(memory);
    const int warp = uniform(warp_id()), tw = warp % 2, cw = warp / 2 % D::CW, kw = warp / 2 / D::CW;
    const i32 n0 = block_id_x() * TOKENS, k0 = block_id_y() * p.part, k1 = min_of(p.width, k0 + p.part);
    const int steps = (int)div_up(k1 - k0, (i32)STEP);
    const Matrix<T> x = {p.x, p.width, (i32)p.tokens, k1};
    const bool async = COPY_ENGINE && p.vector;
    const Dropout drop = per_lane(p.drop);
    auto tile_x = [&](int s) { return typename D::X{shared_cast<T>(memory, s % (COPY_ENGINE ? WIDE_STAGES : 2) * D::X_BYTES)}; };
    auto tile_p = [&](int s) { return D::P::of(memory, D::P_AT + s % 2 * D::P_BYTES, D::P_ROWS); };
    const typename D::X dropped{shared_cast<T>(memory, D::DROPPED_AT)};

    typename D::Move move;
    float held[D::P_CHUNKS][V];
    auto fetch_x = [&](int s) {
        if (s >= steps) return;
        if (p.vector)
            move.template fetch<true>(x, n0, k0 + s * STEP);
        else
            move.template fetch<false>(x, n0, k0 + s * STEP);
    };
    auto copy_x = [&](int s) {
        if (s < steps) D::Move::copy(tile_x(s), x, n0, k0 + s * STEP);
        copy_commit();
    };
    auto fetch_p = [&](int s) {
        if (s >= steps) return;
#pragma unroll
        for (int i = 0; i < D::P_CHUNKS; i++) {
            const int c = thread_id() + i * LORA_THREADS, row = c / (STEP / V), tile = row / 16;
            const i32 k = k0 + s * STEP + c % (STEP / V) * V;
#pragma unroll
            for (int j = 0; j < V; j++) held[i][j] = 0.0f;
            if (tile >= p.tiles || k >= k1) continue;
            const Slice<T>& of = p.slice[slice_of(p, tile)];
            const int rank = row - 16 * of.first;
            if (rank < of.rank) load_row(held[i], of.adapter + (i64)rank * p.width, k, k1, of.vector);
        }
    };
    auto publish_p = [&](int s) {
#pragma unroll
        for (int i = 0; i < D::P_CHUNKS; i++) {
            const int c = thread_id() + i * LORA_THREADS;
            tile_p(s).store(c / (STEP / V), c % (STEP / V) * V, held[i]);
        }
    };

    Acc acc[MT][NT];
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int j = 0; j < NT; j++) clear(acc[i][j]);
    // Adds the products of a step's x with rank tiles [from, to).
    auto multiply = [&](const typename D::X& x, const typename D::P& a, int from, int to) {
        constexpr int EACH = STEP / D::KW;
#pragma unroll 1
        for (int k = kw * EACH; k < (kw + 1) * EACH; k += Mma<T>::K) {
            typename Mma<T>::A rows[MT];
#pragma unroll
            for (int i = 0; i < MT; i++) load_a(rows[i], x, 16 * (MT * tw + i), k);
#pragma unroll
            for (int j = 0; j < NT; j++) {
                const int tile = cw * NT + j;
                if (tile < from || tile >= to) continue;
                SplitB<T> b;
                load_b(b, a, 16 * tile, k);
#pragma unroll
                for (int i = 0; i < MT; i++) mma<T>(acc[i][j], rows[i], b);
            }
        }
    };

    if (async)
        for (int s = 0; s < WIDE_STAGES - 1; s++) copy_x(s);
    else if (!COPY_ENGINE)
        fetch_x(0);
    fetch_p(0);
    for (int s = 0; s < steps; s++) {
        if (async) {
            copy_wait<WIDE_STAGES - 2>();
        } else {
            if (COPY_ENGINE) fetch_x(s);
            move.publish(tile_x(s));
        }
        publish_p(s);
        barrier();
        if (async)
            copy_x(s + WIDE_STAGES - 1);
        else if (!COPY_ENGINE)
            fetch_x(s + 1);
        fetch_p(s + 1);
        if (p.drop.least == 0) {
            multiply(tile_x(s), tile_p(s), 0, p.tiles);
        }
        for (int i = 0; drop.least != 0 && i < p.slices; i++) {
            barrier();
            for (int c = thread_id(); c < D::Move::ALL; c += LORA_THREADS) {
                const int row = c / D::Move::ACROSS, col = c % D::Move::ACROSS * V;
                const u64 e = (u64)(n0 + row) * (u64)p.width + (u64)(k0 + s * STEP + col);
                store_raw16(dropped.ptr(row, col), masked<T>(load_raw16(tile_x(s).ptr(row, col)), kept<V>(e, p.slice[i].site, drop)));
            }
            barrier();
            multiply(dropped, tile_p(s), p.slice[i].first, slice_end(p, i));
        }
    }
    if (async) copy_wait<0>();
    barrier();

    // The KW partial sums of each element are added in order and stored along rows.
    using Sums = Tile<float, 16 * D::TILES>;
    const Sums sums{shared_cast<float>(memory, 0)};
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int j = 0; j < NT; j++) store_acc(sums, TOKENS * kw + 16 * (MT * tw + i), 16 * (cw * NT + j), acc[i][j]);
    barrier();
    const int cols = 16 * p.tiles;
    for (int i = thread_id(); i < TOKENS * cols; i += LORA_THREADS) {
        const int row = i / cols, col = i % cols;
        if (n0 + row >= p.tokens) break;
        float v = 0.0f;
#pragma unroll
        for (int k = 0; k < D::KW; k++) v += sums.base[sums.at(TOKENS * k + row, col)];
        if (p.partial) {
            p.partial[((i64)block_id_y() * p.tokens + n0 + row) * cols + col] = v;
        } else {
            const Slice<T>& of = p.slice[slice_of(p, col / 16)];
            const int rank = col - 16 * of.first;
            if (rank < of.rank) of.skinny[(i64)(n0 + row) * of.ld + rank] = v * of.scale;
        }
    }
}

KERNEL(lora_down_f32, LoraDown<float>, LORA_THREADS) { lora_down<float, false>(p); }
KERNEL(lora_down_bf16, LoraDown<bf16>, LORA_THREADS) { lora_down<bf16, false>(p); }
KERNEL_OCC(lora_down_large_f32, LoraDown<float>, LORA_THREADS, 1) { lora_down<float, true>(p); }
KERNEL(lora_down_large_bf16, LoraDown<bf16>, LORA_THREADS) { lora_down<bf16, true>(p); }

// ---- y += scale t B^T ------------------------------------------------------------------------------------------------

template <class T> struct LoraUp {
    i64 tokens;
    i64 group;  // tokens of a block, a multiple of UP_TOKENS
    i32 slices;
    i32 unused;
    Slice<T> slice[MAX_SLICES];  // whole adapters; `first` is their first block of columns
};

constexpr int UP_TOKENS = 64, UP_COLS = 128, UP_RANKS = 32;
constexpr int UP_WN = UP_COLS / (WARPS / 2), UP_FN = UP_WN / 16;
constexpr int UP_B_AT = UP_TOKENS * UP_RANKS * 4, UP_STRIPS_AT = UP_B_AT + UP_COLS * UP_RANKS * 4;

template <class T, class C> DEVICE void lora_up_as(const LoraUp<T>& p, const Slice<T>& of, Ptr<C> y, Shared<u8> memory) {
    constexpr int V = VEC<T>, N = VEC<C>, PIECES = 16 * UP_WN / N / WARP, ACROSS = UP_RANKS / V;
    using Ranks = SplitTile<T, UP_RANKS>;
    const Ranks tile_t = Ranks::of(memory, 0, UP_TOKENS), tile_b = Ranks::of(memory, UP_B_AT, UP_COLS);
    const Tile<float, UP_WN> strip{shared_cast<float>(memory, UP_STRIPS_AT + warp_id() * 16 * UP_WN * 4)};
    const int warp = uniform(warp_id()), tw = warp % 2, cw = warp / 2;
    const i32 w0 = (block_id_x() - of.first) * UP_COLS;
    const i64 end = min_of(p.tokens, (block_id_y() + 1) * p.group);
    for (i64 n0 = block_id_y() * p.group; n0 < end; n0 += UP_TOKENS) {
        // What is added to is under way meanwhile.
        Raw16 before[2][PIECES];
        auto at = [&](int i, int j, i64& row, i32& col) {
            const int piece = lane_id() + j * WARP;
            row = n0 + 32 * tw + 16 * i + piece / (UP_WN / N);
            col = w0 + cw * UP_WN + piece % (UP_WN / N) * N;
            return row < p.tokens && col < of.width;
        };
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < PIECES; j++) {
                i64 row;
                i32 col;
                if (at(i, j, row, col) && of.vector_wide) before[i][j] = load_raw16(y + (row * of.width + col));
            }
        Acc acc[2][UP_FN];
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int n = 0; n < UP_FN; n++) clear(acc[i][n]);
        for (i32 r0 = 0; r0 < of.rank; r0 += UP_RANKS) {
            barrier();
            for (int c = thread_id(); c < UP_TOKENS * ACROSS; c += LORA_THREADS) {
                const int row = c / ACROSS, col = c % ACROSS * V;
                float v[V] = {};
                if (n0 + row < p.tokens) load_row(v, of.skinny + (n0 + row) * of.ld, r0 + col, of.rank, of.vector_t);
                tile_t.store(row, col, v);
            }
            if (n0 == block_id_y() * p.group || of.rank > UP_RANKS) {
                for (int c = thread_id(); c < UP_COLS * ACROSS; c += LORA_THREADS) {
                    const int row = c / ACROSS, col = c % ACROSS * V;
                    float v[V] = {};
                    if (w0 + row < of.width) load_row(v, of.adapter + (i64)(w0 + row) * of.ld, r0 + col, of.rank, of.vector);
                    tile_b.store(row, col, v);
                }
            }
            barrier();
#pragma unroll 1
            for (int k = 0; k < UP_RANKS && r0 + k < of.rank; k += Mma<T>::K) {
                SplitA<T> a[2];
#pragma unroll
                for (int i = 0; i < 2; i++) load_a(a[i], tile_t, 32 * tw + 16 * i, k);
#pragma unroll
                for (int n = 0; n < UP_FN; n++) {
                    SplitB<T> b;
                    load_b(b, tile_b, cw * UP_WN + 16 * n, k);
#pragma unroll
                    for (int i = 0; i < 2; i++) mma<T>(acc[i][n], a[i], b);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            warp_sync();
#pragma unroll
            for (int n = 0; n < UP_FN; n++) store_acc(strip, 0, 16 * n, acc[i][n]);
            warp_sync();
#pragma unroll
            for (int j = 0; j < PIECES; j++) {
                i64 row;
                i32 col;
                if (!at(i, j, row, col)) continue;
                const int piece = lane_id() + j * WARP;
                float v[N], old[N];
#pragma unroll
                for (int e = 0; e < N; e += 4) {
                    Raw16 raw = load_raw16(strip.ptr(piece / (UP_WN / N), piece % (UP_WN / N) * N + e));
#pragma unroll
                    for (int x = 0; x < 4; x++) v[e + x] = bits_float(raw.w[x]);
                }
                Ptr<C> to = y + (row * of.width + col);
                if (of.vector_wide) {
                    unpack16(old, before[i][j]);
#pragma unroll
                    for (int e = 0; e < N; e++) v[e] = old[e] + of.scale * v[e];
                    store_raw16(to, pack16(v));
                } else {
#pragma unroll
                    for (int e = 0; e < N; e++)
                        if (col + e < of.width) {
                            C x = to[e];
                            to[e] = from_float<C>(to_float(x) + of.scale * v[e]);
                        }
                }
            }
        }
    }
}

template <class T> DEVICE void lora_up(const LoraUp<T>& p) {
    DYN_SHARED(memory);
    const Slice<T>& of = p.slice[slice_of(p, block_id_x())];
    if (of.y_f32)
        lora_up_as<T, float>(p, of, of.y_f32, memory);
    else
        lora_up_as<T, T>(p, of, of.y, memory);
}

KERNEL(lora_up_f32, LoraUp<float>, LORA_THREADS) { lora_up<float>(p); }
KERNEL(lora_up_bf16, LoraUp<bf16>, LORA_THREADS) { lora_up<bf16>(p); }

// ---- partial sums in order ---------------------------------------------------------------------------------------------

constexpr int MAX_SUMS = 16;

struct LoraSumJob {
    Ptr<float> out;            // [rows, out_ld]
    Ptr<const float> partial;  // [parts, rows, in_ld]
    i64 part;                  // elements between parts
    i64 elems;                 // rows cols
    i32 cols;
    i32 out_ld;
    i32 in_ld;
    i32 parts;
    float scale;
    i32 add;
};

struct LoraSum {
    LoraSumJob job[MAX_SUMS];
};

KERNEL(lora_sum_f32, LoraSum, LORA_THREADS) {
    const LoraSumJob& job = p.job[block_id_y()];
    for (i64 i = (i64)block_id_x() * LORA_THREADS + thread_id(); i < job.elems; i += (i64)grid_x() * LORA_THREADS) {
        const i64 row = i / job.cols, col = i % job.cols;
        float v = 0.0f;
        for (int k = 0; k < job.parts; k++) v += job.partial[k * job.part + row * job.in_ld + col];
        v *= job.scale;
        const i64 to = row * job.out_ld + col;
        if (job.add) v += job.out[to];
        job.out[to] = v;
    }
}
