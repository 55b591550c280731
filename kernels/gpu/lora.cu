// LoRA (Hu et al. 2021) of all adapters that share an input x [N,I], over f32 adapters A [R,I], B [O,R]:
//   forward    t = drop(x) A^T,   y += scale t B^T
//   backward   db = scale dy^T t,   dt = scale dy B,   da = dt^T drop(x),   dx += drop'(dt A)
// on matrix cores, bf16 or f32 activations; adapters and t, dt are split so that they keep f32 precision (split.cuh). Dropout's masks are
// made again where they are needed (philox.cuh). "Wide" below is x or dy [N,W], "skinny" t or dt [N,R].
//
// Memory alone limits it (2 R operations for each byte of x at rank R), so every pass is shaped to touch wide matrices once:
//   lora_down   t: a block has 64 tokens and a part of I, all adapters' ranks. Parts leave f32 sums [parts, N, ranks], lora_sum adds
//               them in order. Reads x once; 8 parts N ranks bytes of partial sums.
//   lora_up     y += t B^T: a block has 128 columns of one adapter and walks over tokens with B in shared memory. y once in, once out.
//   lora_x      da and dx: a block has 32 columns of x and a group of tokens, walks over them with its columns of A in shared memory
//               and of da in registers, and adds dt A to dx. x once, dx once in and out, 8 groups ranks I bytes of partial sums.
//   lora_down_b dt, as lora_down with dy for x, one adapter at a time, and
//   lora_x      db, as da with dy for x and without dx: dy is read twice, once by each.
// The host chooses parts and groups: as few as give every compute unit a block.
#define ADDRESS_BY_ELEMENT
#include "philox.cuh"
#include "split.cuh"

constexpr int LORA_THREADS = 256;
constexpr int WARPS = LORA_THREADS / WARP;
// Wide tiles in shared memory: under way by asynchronous copy, or one in registers.
constexpr int WIDE_STAGES = COPY_ENGINE ? 4 : 2;
constexpr int MAX_SLICES = 4;
// 16 ranks make a tile; SMALL kernels take that many tiles of all adapters together, LARGE ones more.
constexpr int SMALL_TILES = 4, LARGE_TILES = 12;

// Some ranks of an adapter (all, unless there are more than a kernel takes).
template <class T> struct Slice {
    Ptr<float> skinny;         // [N, ld]
    Ptr<const float> adapter;  // A [rank, W], or B [W, ld]
    Ptr<float> grad;           // of the adapter, or partial sums of it
    Ptr<T> y;                  // null where y is f32 and T is not
    Ptr<float> y_f32;          // else this
    i64 grad_part;             // elements between partial sums of two groups
    i32 rank;
    i32 ld;
    i32 first;        // rank tile, or block of columns, that it begins with
    i32 width;        // W
    i32 vector;       // rows of the adapter begin at multiples of 16 bytes
    i32 vector_t;     // rows of skinny do
    i32 vector_wide;  // rows of y or dy do
    i32 grad_ld;      // of db or its partial sums: [W, grad_ld]
    u32 site;
    float scale;
    i32 add;  // the gradient is added to
    i32 unused;
};

// The slice that rank tile (or block of columns) `i` is in.
template <class P> DEVICE int slice_of(const P& p, int i) {
    int s = 0;
    while (s + 1 < p.slices && p.slice[s + 1].first <= i) s++;
    return s;
}
template <class P> DEVICE int slice_end(const P& p, int s) { return s + 1 < p.slices ? p.slice[s + 1].first : p.tiles; }

// ---- t = drop(x) A^T, and dt = scale dy B of large ranks -------------------------------------------------------------

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

constexpr int DOWN_TOKENS = 64;

// How the warps of a block share its work: 2 along tokens, CW along ranks, KW along the inner dimension.
template <class T, bool LARGE, bool OF_B> struct Down {
    static constexpr int TILES = LARGE ? LARGE_TILES : SMALL_TILES, KW = LARGE ? 1 : WARPS / 2, CW = LARGE ? WARPS / 2 : 1, NT = TILES / CW;
    static constexpr int STEP = (WARP == 32 && !LARGE ? 128 : 64) / (int)sizeof(T), V = VEC<T>;
    // A [ranks][inner], or B [inner][ranks].
    static constexpr int P_ROWS = OF_B ? STEP : 16 * TILES, P_LD = OF_B ? 16 * TILES : STEP, P_CHUNKS = P_ROWS * P_LD / V / LORA_THREADS;
    using X = Tile<T, STEP>;
    using P = SplitTile<T, P_LD>;
    using Move = Mover<T, DOWN_TOKENS, STEP, LORA_THREADS>;
    static constexpr int X_BYTES = DOWN_TOKENS * STEP * (int)sizeof(T), P_BYTES = 16 * TILES * STEP * 4;
    static constexpr int P_AT = WIDE_STAGES * X_BYTES, DROPPED_AT = P_AT + 2 * P_BYTES;
    static_assert(P_ROWS * P_LD / V % LORA_THREADS == 0, "threads share the chunks of P");
};

template <class T, bool LARGE, bool OF_B> DEVICE void lora_down(const LoraDown<T>& p) {
    using D = Down<T, LARGE, OF_B>;
    constexpr int STEP = D::STEP, V = D::V, NT = D::NT;
    DYN_SHARED(memory);
    const int warp = uniform(warp_id()), tw = warp % 2, cw = warp / 2 % D::CW, kw = warp / 2 / D::CW;
    const i32 n0 = block_id_x() * DOWN_TOKENS, k0 = block_id_y() * p.part, k1 = min_of(p.width, k0 + p.part);
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
            const int c = thread_id() + i * LORA_THREADS, row = c / (D::P_LD / V), col = c % (D::P_LD / V) * V;
            const int tile = (OF_B ? col : row) / 16;
            const i32 k = k0 + s * STEP + (OF_B ? row : col);
#pragma unroll
            for (int j = 0; j < V; j++) held[i][j] = 0.0f;
            if (tile >= p.tiles || k >= k1) continue;
            const Slice<T>& of = p.slice[slice_of(p, tile)];
            const int rank = (OF_B ? col : row) - 16 * of.first;
            if (rank >= of.rank) continue;
            if constexpr (OF_B)
                load_row(held[i], of.adapter + (i64)k * of.ld, rank, of.rank, of.vector);
            else
                load_row(held[i], of.adapter + (i64)rank * p.width, k, k1, of.vector);
        }
    };
    auto publish_p = [&](int s) {
#pragma unroll
        for (int i = 0; i < D::P_CHUNKS; i++) {
            const int c = thread_id() + i * LORA_THREADS;
            tile_p(s).store(c / (D::P_LD / V), c % (D::P_LD / V) * V, held[i]);
        }
    };

    Acc acc[2][NT];
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < NT; j++) clear(acc[i][j]);
    // Adds the products of a step's x with rank tiles [from, to).
    auto multiply = [&](const typename D::X& x, const typename D::P& a, int from, int to) {
        constexpr int EACH = STEP / D::KW;
#pragma unroll 1
        for (int k = kw * EACH; k < (kw + 1) * EACH; k += Mma<T>::K) {
            typename Mma<T>::A rows[2];
#pragma unroll
            for (int i = 0; i < 2; i++) load_a(rows[i], x, 32 * tw + 16 * i, k);
#pragma unroll
            for (int j = 0; j < NT; j++) {
                const int tile = cw * NT + j;
                if (tile < from || tile >= to) continue;
                SplitB<T> b;
                if constexpr (OF_B)
                    load_b_t(b, a, 16 * tile, k);
                else
                    load_b(b, a, 16 * tile, k);
#pragma unroll
                for (int i = 0; i < 2; i++) mma<T>(acc[i][j], rows[i], b);
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
        if (OF_B || p.drop.least == 0) {
            multiply(tile_x(s), tile_p(s), 0, p.tiles);
        }
        for (int i = 0; !OF_B && drop.least != 0 && i < p.slices; i++) {
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
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < NT; j++) store_acc(sums, DOWN_TOKENS * kw + 32 * tw + 16 * i, 16 * (cw * NT + j), acc[i][j]);
    barrier();
    const int cols = 16 * p.tiles;
    for (int i = thread_id(); i < DOWN_TOKENS * cols; i += LORA_THREADS) {
        const int row = i / cols, col = i % cols;
        if (n0 + row >= p.tokens) break;
        float v = 0.0f;
#pragma unroll
        for (int k = 0; k < D::KW; k++) v += sums.base[sums.at(DOWN_TOKENS * k + row, col)];
        if (p.partial) {
            p.partial[((i64)block_id_y() * p.tokens + n0 + row) * cols + col] = v;
        } else {
            const Slice<T>& of = p.slice[slice_of(p, col / 16)];
            const int rank = col - 16 * of.first;
            if (rank < of.rank) of.skinny[(i64)(n0 + row) * of.ld + rank] = v * of.scale;
        }
    }
}

KERNEL(lora_down_f32, LoraDown<float>, LORA_THREADS) { lora_down<float, false, false>(p); }
KERNEL(lora_down_bf16, LoraDown<bf16>, LORA_THREADS) { lora_down<bf16, false, false>(p); }
KERNEL_OCC(lora_down_large_f32, LoraDown<float>, LORA_THREADS, 1) { lora_down<float, true, false>(p); }
KERNEL(lora_down_large_bf16, LoraDown<bf16>, LORA_THREADS) { lora_down<bf16, true, false>(p); }
KERNEL(lora_down_b_f32, LoraDown<float>, LORA_THREADS) { lora_down<float, true, true>(p); }
KERNEL(lora_down_b_bf16, LoraDown<bf16>, LORA_THREADS) { lora_down<bf16, true, true>(p); }

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

// ---- da = dt^T drop(x), dx += drop'(dt A); and db = dy^T t of large ranks ----------------------------------------------

template <class T> struct LoraX {
    Ptr<const T> x;  // [N, W]
    Ptr<T> dx;       // null: not wanted
    i64 tokens;
    i64 group;  // tokens of a block, a multiple of its step
    i32 width;
    i32 tiles;
    i32 slices;
    i32 transposed;  // the gradient is [W, rank], not [rank, W]
    i32 vector;
    i32 vector_dx;
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
                    // Through shared memory again, so that one element after the other needs few registers.
                    const int inside = min_of(V, p.width - (w0 + 16 * ct + col));
#pragma unroll 1
                    for (int e = 0; e < inside; e++) {
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
            const int major = i / 16, minor = i % 16, row = uniform(p.transposed) ? minor : major, across = uniform(p.transposed) ? major : minor;
            const int rank = 16 * (tile - of.first) + row;
            const i32 col = w0 + 16 * ct + across;
            if (rank >= of.rank || col >= p.width) continue;
            const i64 to = uniform(p.transposed) ? (i64)col * of.grad_ld + rank : (i64)rank * p.width + col;
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
