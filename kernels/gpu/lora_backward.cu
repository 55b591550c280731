// LoRA backward: of all adapters that share an input x [N,I], from dy [N,O] and t [N,R] of lora.cu,
//   db = scale dy^T t,   dt = scale dy B,   da = dt^T drop(x),   dx += drop'(dt A)
// on matrix cores, bf16 or f32 activations; adapters, t and dt are split so that they keep f32 precision (split.cuh).
//
// Memory alone limits it, so each pass reads its wide matrix once for two products:
//   lora_dy   dt and db: a block has a group of tokens and a chunk of columns of one adapter's dy, and walks over them in tiles of 64 tokens x
//             128 (on wide machines 64) columns. Half of its warps make dt, the others db. A block of n tokens and w columns leaves n R
//             partial sums of dt and w R of db for the n w numbers that it read, 4 R (1/n + 1/w) bytes a byte of bf16 dy in and out
//             again. The host chooses the n, w that make this least while every unit has a block: no choice makes it less.
//   lora_x    da and dx: a block has 32 columns of x and a group of tokens, walks over them with its columns of A in shared memory
//             and of da in registers, and adds dt A to dx. x once, dx once in and out, 8 groups ranks I bytes of partial sums.
// lora_sum of lora.cu adds partial sums in order.
#include "lora.cuh"

// ---- dt = scale dy B, db = scale dy^T t --------------------------------------------------------------------------------

// Up to 64 ranks of an adapter.
template <class T> struct DySlice {
    Ptr<const T> dy;       // [N, W]
    Ptr<const float> t;    // [N, ld]
    Ptr<const float> b;    // [W, ld]
    Ptr<float> dt;         // [N, dt_ld], or partial sums of it, one of each chunk
    Ptr<float> db;         // [W, db_ld], or partial sums of it, one of each group
    i64 dt_part;           // elements between partial sums of two chunks
    i64 db_part;           // and of two groups
    i32 width;             // W
    i32 rank;
    i32 ld;
    i32 dt_ld;
    i32 db_ld;
    i32 first;       // block that it begins with
    i32 vector;      // rows of dy begin at multiples of 16 bytes
    i32 vector_t;    // rows of t do
    i32 vector_b;    // rows of B do
    i32 add;         // db is added to
    float dt_scale;  // 1 of partial sums
    float db_scale;
};

template <class T> struct LoraDy {
    i32 tokens;
    i32 group;  // tokens of a block, a multiple of DY_TOKENS
    i32 chunk;  // columns of a block, a multiple of 64
    i32 slices;
    DySlice<T> slice[MAX_SLICES];
};

constexpr int DY_TOKENS = 64, DY_COLS = COPY_ENGINE ? 128 : 64;

template <class T, bool LARGE> struct DyPass {
    static constexpr int TILES = LARGE ? 4 : 1, RANKS = 16 * TILES, V = VEC<T>;
    // A warp has N rank tiles, and of them MT tiles of tokens (for dt) or MC of columns (for db).
    static constexpr int HALF = WARPS / 2, N = LARGE ? 2 : 1, ACROSS = TILES / N, DOWN = HALF / ACROSS;
    static constexpr int MT = DY_TOKENS / 16 / DOWN, MC = DY_COLS / 16 / DOWN;
    static constexpr int STAGES = COPY_ENGINE ? 3 : 2;
    using Dy = Tile<T, DY_COLS>;
    using Move = Mover<T, DY_TOKENS, DY_COLS, LORA_THREADS>;
    using Ranks = SplitTile<T, RANKS>;
    static constexpr int DY_BYTES = DY_TOKENS * DY_COLS * (int)sizeof(T), T_AT = STAGES * DY_BYTES, B_AT = T_AT + DY_TOKENS * RANKS * 4;
    static constexpr int T_ALL = DY_TOKENS * RANKS / V, T_CHUNKS = (T_ALL + LORA_THREADS - 1) / LORA_THREADS;
};

template <class T, bool LARGE> DEVICE void lora_dy(const LoraDy<T>& p) {
    using D = DyPass<T, LARGE>;
    constexpr int V = D::V, N = D::N, MT = D::MT, MC = D::MC, K = Mma<T>::K, CHUNKS = D::RANKS / V;
    DYN_SHARED(memory);
    const int warp = uniform(warp_id()), part = warp % D::HALF, across = part % D::ACROSS * N, down = part / D::ACROSS;
    const bool makes_dt = warp < D::HALF;
    const DySlice<T>& of = p.slice[slice_of(p, block_id_x())];
    const int chunk = block_id_x() - of.first;
    const i32 first = block_id_y() * p.group, end = first + min_of(p.tokens - first, p.group);
    const i32 begin = chunk * p.chunk, after = min_of(of.width, begin + p.chunk);
    const int down_steps = div_up(end - first, DY_TOKENS), steps = down_steps * div_up(after - begin, DY_COLS);
    const Matrix<T> dy = {of.dy, of.width, end, after};
    const bool async = COPY_ENGINE && of.vector;
    auto token = [&](int s) { return first + s % down_steps * DY_TOKENS; };
    auto column = [&](int s) { return begin + s / down_steps * DY_COLS; };
    auto tile_dy = [&](int s) { return typename D::Dy{shared_cast<T>(memory, s % D::STAGES * D::DY_BYTES)}; };
    const typename D::Ranks tile_t = D::Ranks::of(memory, D::T_AT, DY_TOKENS), tile_b = D::Ranks::of(memory, D::B_AT, DY_COLS);

    typename D::Move move;
    float held[D::T_CHUNKS][V];
    auto fetch_dy = [&](int s) {
        if (s < steps && uniform(of.vector)) move.template fetch<true>(dy, token(s), column(s));
    };
    auto copy_dy = [&](int s) {
        if (s < steps) D::Move::copy(tile_dy(s), dy, token(s), column(s));
        copy_commit();
    };
    auto fetch_t = [&](int s) {
#pragma unroll
        for (int i = 0; i < D::T_CHUNKS; i++) {
            const int c = thread_id() + i * LORA_THREADS, col = c % CHUNKS * V;
            const i32 n = token(s) + c / CHUNKS;
#pragma unroll
            for (int j = 0; j < V; j++) held[i][j] = 0.0f;
            if (s < steps && c < D::T_ALL && n < end && col < of.rank) load_row(held[i], of.t + (i64)n * of.ld, col, of.rank, of.vector_t);
        }
    };

    Acc db[MC][N];
#pragma unroll
    for (int m = 0; m < MC; m++)
#pragma unroll
        for (int n = 0; n < N; n++) clear(db[m][n]);
    if (async)
        for (int s = 0; s < D::STAGES - 1; s++) copy_dy(s);
    else if (!COPY_ENGINE)
        fetch_dy(0);
    fetch_t(0);
    for (int s = 0; s < steps; s++) {
        const i32 n0 = token(s), w0 = column(s);
        if (async) {
            copy_wait<D::STAGES - 2>();
        } else if (!COPY_ENGINE && uniform(of.vector)) {
            move.publish(tile_dy(s));
        } else {
            D::Move::move_single(tile_dy(s), dy, n0, w0);
        }
#pragma unroll
        for (int i = 0; i < D::T_CHUNKS; i++) {
            const int c = thread_id() + i * LORA_THREADS;
            if (c < D::T_ALL) tile_t.store(c / CHUNKS, c % CHUNKS * V, held[i]);
        }
        if (n0 == first) {
#pragma unroll 1
            for (int c = thread_id(); c < DY_COLS * CHUNKS; c += LORA_THREADS) {
                const int row = c / CHUNKS, col = c % CHUNKS * V;
                tile_b.store_row(row, col, of.b + (i64)(w0 + row) * of.ld, col, w0 + row < after ? of.rank : 0, of.vector_b);
            }
        }
        barrier();
        if (async)
            copy_dy(s + D::STAGES - 1);
        else if (!COPY_ENGINE)
            fetch_dy(s + 1);
        fetch_t(s + 1);
        if (makes_dt) {
            // The chunk's earlier columns left their sum in memory, in the caches.
            const Ptr<float> out = of.dt + (chunk * of.dt_part + (i64)n0 * of.dt_ld);
            const bool more = w0 > begin;
            const float scale = w0 + DY_COLS >= after ? of.dt_scale : 1.0f;
            Acc acc[MT][N];
            auto each = [&](auto use) {
#pragma unroll
                for (int m = 0; m < MT; m++)
#pragma unroll
                    for (int n = 0; n < N; n++)
#pragma unroll
                        for (int e = 0; e < ACC_ELEMS; e++) {
                            const int row = 16 * (down * MT + m) + acc_row(e), rank = 16 * (across + n) + acc_col(e);
                            use(acc[m][n].v[e], row * of.dt_ld + rank, n0 + row < end && rank < of.rank);
                        }
            };
            each([&](float& v, int at, bool inside) {
                v = 0.0f;
                if (more && inside) v = out[at];
            });
#pragma unroll 1
            for (int k = 0; k < DY_COLS; k += K) {
                typename Mma<T>::A a[MT];
#pragma unroll
                for (int m = 0; m < MT; m++) load_a(a[m], tile_dy(s), 16 * (down * MT + m), k);
#pragma unroll
                for (int n = 0; n < N; n++) {
                    if (16 * (across + n) >= of.rank) continue;
                    SplitB<T> b;
                    load_b_t(b, tile_b, 16 * (across + n), k);
#pragma unroll
                    for (int m = 0; m < MT; m++) mma<T>(acc[m][n], a[m], b);
                }
            }
            each([&](float& v, int at, bool inside) {
                if (inside) out[at] = v * scale;
            });
        } else {
#pragma unroll 1
            for (int k = 0; k < DY_TOKENS; k += K) {
                typename Mma<T>::A a[MC];
#pragma unroll
                for (int m = 0; m < MC; m++) load_a_t(a[m], tile_dy(s), 16 * (down * MC + m), k);
#pragma unroll
                for (int n = 0; n < N; n++) {
                    if (16 * (across + n) >= of.rank) continue;
                    SplitB<T> b;
                    load_b_t(b, tile_t, 16 * (across + n), k);
#pragma unroll
                    for (int m = 0; m < MC; m++) mma<T>(db[m][n], a[m], b);
                }
            }
            if (n0 + DY_TOKENS >= end) {
                const Ptr<float> out = of.db + (block_id_y() * of.db_part + (i64)w0 * of.db_ld);
#pragma unroll
                for (int m = 0; m < MC; m++)
#pragma unroll
                    for (int n = 0; n < N; n++) {
#pragma unroll
                        for (int e = 0; e < ACC_ELEMS; e++) {
                            const int row = 16 * (down * MC + m) + acc_row(e), rank = 16 * (across + n) + acc_col(e);
                            if (w0 + row >= after || rank >= of.rank) continue;
                            const i64 at = (i64)row * of.db_ld + rank;
                            float v = db[m][n].v[e] * of.db_scale;
                            if (of.add) v += out[at];
                            out[at] = v;
                        }
                        clear(db[m][n]);
                    }
            }
        }
        barrier();
    }
    if (async) copy_wait<0>();
}

KERNEL(lora_dy_f32, LoraDy<float>, LORA_THREADS) { lora_dy<float, false>(p); }
KERNEL(lora_dy_bf16, LoraDy<bf16>, LORA_THREADS) { lora_dy<bf16, false>(p); }
KERNEL(lora_dy_large_f32, LoraDy<float>, LORA_THREADS) { lora_dy<float, true>(p); }
KERNEL(lora_dy_large_bf16, LoraDy<bf16>, LORA_THREADS) { lora_dy<bf16, true>(p); }

// ---- da = dt^T drop(x), dx += drop'(dt A) -----------------------------------------------------------------------------

template <class T> struct LoraX {
    Ptr<const T> x;  // [N, W]
    Ptr<T> dx;       // null: not wanted
    i64 tokens;
    i64 group;  // tokens of a block, a multiple of its step
    i32 width;
    i32 tiles;
    i32 slices;
    i32 vector;
    i32 vector_dx;
    i32 unused;
    Dropout drop;
    Slice<T> slice[MAX_SLICES];
};

constexpr int X_COLS = 32;

template <class T, bool LARGE> struct XPass {
    static constexpr int TILES = LARGE ? LARGE_TILES : SMALL_TILES, V = VEC<T>;
    // 2 warps along columns, RW along ranks (for da) and tokens (for dx).
    static constexpr int RW = WARPS / 2, TOKENS = 16 * RW, NT = TILES / RW;
    using X = Tile<T, X_COLS>;
    using Move = Mover<T, TOKENS, X_COLS, LORA_THREADS>;
    using Skinny = SplitTile<T, 16 * TILES>;
    using A = SplitTile<T, X_COLS>;
    static constexpr int X_BYTES = TOKENS * X_COLS * (int)sizeof(T), SKINNY_AT = WIDE_STAGES * X_BYTES;
    static constexpr int A_AT = SKINNY_AT + TOKENS * 16 * TILES * 4, STRIPS_AT = A_AT + X_COLS * 16 * TILES * 4;
    // Strips are used when a step's masks are no longer needed.
    static constexpr int DROPPED_AT = STRIPS_AT, BITS_AT = STRIPS_AT + (WARPS * 1024 > X_BYTES ? WARPS * 1024 : X_BYTES);
};

template <class T, bool LARGE> DEVICE void lora_x(const LoraX<T>& p) {
    using D = XPass<T, LARGE>;
    constexpr int V = D::V, NT = D::NT, TOKENS = D::TOKENS, K = Mma<T>::K;
    DYN_SHARED(memory);
    const int warp = uniform(warp_id()), ct = warp % 2, rw = warp / 2;
    const i32 w0 = block_id_x() * X_COLS;
    const i32 first = block_id_y() * (i32)p.group, end = first + min_of((i32)p.tokens - first, (i32)p.group);
    const int steps = (int)div_up(end - first, (i32)TOKENS);
    const Matrix<T> x = {p.x, p.width, end, p.width};
    const bool async = COPY_ENGINE && p.vector, drops = p.drop.least != 0;
    // 0: no dx; 1: dx; 2: its rows begin at multiples of 16 bytes. Asked for by `uniform` where it is used: kept as conditions, it and
    // its like would need more scalar registers than AMD's machines have.
    const int mode = p.dx ? 1 + (p.vector_dx != 0) : 0;
    const float keep = drops ? p.drop.keep : 1.0f;
    const Dropout drop = per_lane(p.drop);
    auto tile_x = [&](int s) { return typename D::X{shared_cast<T>(memory, s % WIDE_STAGES * D::X_BYTES)}; };
    const typename D::Skinny skinny = D::Skinny::of(memory, D::SKINNY_AT, TOKENS);
    const typename D::A tile_a = D::A::of(memory, D::A_AT, 16 * D::TILES);
    const Tile<float, 16> strip{shared_cast<float>(memory, D::STRIPS_AT + warp_id() * 1024)};
    const typename D::X dropped{shared_cast<T>(memory, D::DROPPED_AT)};
    const Shared<u16> bits = shared_cast<u16>(memory, D::BITS_AT);

    typename D::Move move;
    auto token = [&](int s) { return first + s * TOKENS; };
    auto fetch_x = [&](int s) {
        if (s < steps && uniform(p.vector)) move.template fetch<true>(x, token(s), w0);
    };
    auto copy_x = [&](int s) {
        if (s < steps) D::Move::copy(tile_x(s), x, token(s), w0);
        copy_commit();
    };
    if (async)
        for (int s = 0; s < WIDE_STAGES - 1; s++) copy_x(s);
    else if (!COPY_ENGINE)
        fetch_x(0);
    if (p.dx) {
#pragma unroll 1
        for (int c = thread_id(); c < 16 * p.tiles * (X_COLS / V); c += LORA_THREADS) {
            const int row = c / (X_COLS / V), col = c % (X_COLS / V) * V;
            const Slice<T>& of = p.slice[slice_of(p, row / 16)];
            const int rank = row - 16 * of.first;
            tile_a.store_row(row, col, of.adapter + (i64)rank * p.width, w0 + col, rank < of.rank ? p.width : 0, of.vector);
        }
    }

    Acc grad[NT];
#pragma unroll
    for (int j = 0; j < NT; j++) clear(grad[j]);
    auto add_grad = [&](const typename D::X& x, int from, int to) {
        // Bit j: rank tile rw NT + j is one of them.
        const u32 wanted = ((1u << to) - (1u << from)) >> (rw * NT);
#pragma unroll 1
        for (int k = 0; k < TOKENS; k += K) {
            typename Mma<T>::B b;
            load_b_t(b, x, 16 * ct, k);
#pragma unroll
            for (int j = 0; j < NT; j++) {
                const int tile = rw * NT + j;
                if (!(wanted >> j & 1u)) continue;
                SplitA<T> a;
                load_a_t(a, skinny, 16 * tile, k);
                mma<T>(grad[j], a, b);
            }
        }
    };
    auto add_dx = [&](Acc& acc, int from, int to) {
#pragma unroll 1
        for (int k = 16 * from; k < 16 * to; k += K) {
            SplitA<T> a;
            SplitB<T> b;
            load_a(a, skinny, 16 * rw, k);
            load_b_t(b, tile_a, 16 * ct, k);
            mma<T>(acc, a, b);
        }
    };

    for (int s = 0; s < steps; s++) {
        const i32 n0 = token(s);
        if (async) {
            copy_wait<WIDE_STAGES - 2>();
        } else if (uniform(p.vector)) {
            move.publish(tile_x(s));
        } else {
            D::Move::move_single(tile_x(s), x, n0, w0);
        }
#pragma unroll 1
        for (int c = thread_id(); c < TOKENS * 2 * p.tiles * (8 / V); c += LORA_THREADS) {
            const int row = c / (p.tiles * (16 / V)), col = c % (p.tiles * (16 / V)) * V;
            const Slice<T>& of = p.slice[slice_of(p, col / 16)];
            const i32 ranks = n0 + row < end ? of.rank : 0;
            skinny.store_row(row, col, of.skinny + (i64)(n0 + row) * of.ld, col - 16 * of.first, ranks, of.vector_t);
        }
        barrier();
        if (async)
            copy_x(s + WIDE_STAGES - 1);
        else if (!COPY_ENGINE)
            fetch_x(s + 1);
        // This warp's 16 x 16 of dx, in chunks along rows.
        constexpr int PIECES = 256 / V >= WARP ? 256 / V / WARP : 1;
        Raw16 before[PIECES];
        auto at = [&](int j, int& row, int& col) {
            const int piece = lane_id() + j * WARP;
            row = piece / (16 / V);
            col = piece % (16 / V) * V;
            return piece < 256 / V && n0 + 16 * rw + row < end && w0 + 16 * ct + col < p.width;
        };
        auto place = [&](int row, int col) { return p.dx + (i64)(n0 + 16 * rw + row) * p.width + (w0 + 16 * ct + col); };
        if (uniform(mode) == 2) {
#pragma unroll
            for (int j = 0; j < PIECES; j++) {
                int row, col;
                if (at(j, row, col)) before[j] = load_raw16(place(row, col));
            }
        }
        Acc acc;
        clear(acc);
        // All ranks at once, or with dropout each slice with an input of its own.
#pragma unroll 1
        for (int i = 0; i < (drops ? p.slices : 1); i++) {
            const int from = uniform(drops) ? p.slice[i].first : 0, to = uniform(drops) ? slice_end(p, i) : p.tiles;
            if (uniform(drops)) {
                for (int c = thread_id(); c < D::Move::ALL; c += LORA_THREADS) {
                    const int row = c / D::Move::ACROSS, col = c % D::Move::ACROSS * V;
                    const u32 kept_bits = kept<V>((u64)(n0 + row) * (u64)p.width + (u64)(w0 + col), p.slice[i].site, drop);
                    store_raw16(dropped.ptr(row, col), masked<T>(load_raw16(tile_x(s).ptr(row, col)), kept_bits));
                    bits[c] = (u16)kept_bits;
                }
                barrier();
            }
            add_grad(uniform(drops) ? dropped : tile_x(s), from, to);
            if (uniform(mode)) {
                Acc one;
                clear(one);
                add_dx(one, from, to);
#pragma unroll
                for (int e = 0; e < ACC_ELEMS; e++) {
                    const int row = 16 * rw + acc_row(e), col = 16 * ct + acc_col(e);
                    u32 b = 0xffu;
                    if (uniform(drops)) b = bits[row * (X_COLS / V) + col / V];
                    acc.v[e] += b >> (col % V) & 1u ? one.v[e] * keep : 0.0f;
                }
            }
            if (uniform(drops)) barrier();
        }
        if (uniform(mode)) {
            warp_sync();
            store_acc(strip, 0, 0, acc);
            warp_sync();
#pragma unroll
            for (int j = 0; j < PIECES; j++) {
                int row, col;
                if (!at(j, row, col)) continue;
                float v[V], old[V];
#pragma unroll
                for (int e = 0; e < V; e += 4) {
                    Raw16 raw = load_raw16(strip.ptr(row, col + e));
#pragma unroll
                    for (int q = 0; q < 4; q++) v[e + q] = bits_float(raw.w[q]);
                }
                Ptr<T> to = place(row, col);
                if (uniform(mode) == 2) {
                    unpack16(old, before[j]);
#pragma unroll
                    for (int e = 0; e < V; e++) v[e] += old[e];
                    store_raw16(to, pack16(v));
                } else {
                    // Through shared memory again, so that one element after the other needs few registers. A lane's V numbers take 4 V
                    // of the 128 bytes of all banks; lanes that far apart begin with different ones.
                    const int inside = min_of(V, p.width - (w0 + 16 * ct + col));
#pragma unroll 1
                    for (int i = 0; i < V; i++) {
                        const int e = (i + lane_id() / (128 / (4 * V))) % V;
                        if (e >= inside) continue;
                        T was = to[e];
                        to[e] = from_float<T>(strip.base[strip.at(row, col + e)] + to_float(was));
                    }
                }
            }
        }
        barrier();
    }
    if (async) copy_wait<0>();

#pragma unroll
    for (int j = 0; j < NT; j++) {
        const int tile = rw * NT + j;
        if (tile >= p.tiles) continue;
        const Slice<T>& of = p.slice[slice_of(p, tile)];
        Ptr<float> out = of.grad + block_id_y() * of.grad_part;
        warp_sync();
        store_acc(strip, 0, 0, grad[j]);
        warp_sync();
        // Neighbouring lanes write neighbouring elements.
#pragma unroll 1
        for (int i = lane_id(); i < 256; i += WARP) {
            const int row = i / 16, across = i % 16, rank = 16 * (tile - of.first) + row;
            const i32 col = w0 + 16 * ct + across;
            if (rank >= of.rank || col >= p.width) continue;
            const i64 to = (i64)rank * p.width + col;
            float v = strip.base[strip.at(row, across)] * of.scale;
            if (of.add) v += out[to];
            out[to] = v;
        }
    }
}

KERNEL(lora_x_f32, LoraX<float>, LORA_THREADS) { lora_x<float, false>(p); }
KERNEL(lora_x_bf16, LoraX<bf16>, LORA_THREADS) { lora_x<bf16, false>(p); }
KERNEL(lora_x_large_f32, LoraX<float>, LORA_THREADS) { lora_x<float, true>(p); }
KERNEL(lora_x_large_bf16, LoraX<bf16>, LORA_THREADS) { lora_x<bf16, true>(p); }
