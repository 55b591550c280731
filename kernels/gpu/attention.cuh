// What do the passes of attention share? How a block finds its document, how rows of q, k and v become tiles in shared memory, and
// the two products of tiles that all passes are made of.
//
// The G = H / K query heads of a kv head are rows of one matrix: row r of a document is the query of token r / G in head r % G of
// the group, so a tile of keys is read once for the whole group.
//
// Documents: their boundaries are known on the device alone. Tiles of at most ceil(rows / TILE) per document are numbered so that
// document d begins at floor(rows before it / TILE) + d: that ascends strictly, leaves room for every document's last, partial tile,
// and ends at floor(all rows / TILE) + documents, which the host knows. A block finds its document by halving; a number that no
// tile has does nothing. Everything a block then does is relative to its document, so other documents change no bit.
#ifndef ZRT_ATTENTION_CUH
#define ZRT_ATTENTION_CUH

#include "compat.h"

struct Geometry {
    i32 documents;
    i32 tokens;
    i32 heads;
    i32 kv_heads;
    i32 group;  // heads / kv_heads
    u32 share;  // ceil(2^24 / group): x / group is x share >> 24 for the small x here
    i32 dim;    // of a head; tiles are padded by zeros to their width
    i32 window; // at most `tokens`
    i32 tiles;  // see above
    i32 vector; // all rows begin at multiples of 16 bytes
    float scale;
    float scale_log2;  // scale log2(e): exponentials are powers of two
};

constexpr float LN2 = 0.693147181f, LOG2E = 1.44269504f;
constexpr bool NARROW = WARP < 64;
#define INFINITE bits_float(0x7f800000u)

// A document and the first row of it that is this block's.
struct Span {
    i32 start;
    i32 tokens;
    i32 first;
};

// Boundaries that do not ascend fail the stream; until that is seen, they must not lead outside the operands.
DEVICE i32 boundary(const Geometry& g, Ptr<const i32> bounds, int i) {
    i32 at = bounds[i];
    return min_of(max_of(at, 0), g.tokens);
}

constexpr int BOUNDARY_THREADS = 256;

DEVICE void check_boundaries(Ptr<const i32> bounds, i32 documents, i32 tokens, Ptr<u64> fault) {
    for (int i = thread_id(); i <= documents; i += block_threads()) {
        const i32 at = bounds[i];
        bool wrong = i == 0 ? at != 0 : i == documents && at != tokens;
        if (i > 0) {
            const i32 before = bounds[i - 1];
            wrong |= at < before;
        }
        if (wrong) report_fault(fault, (u64)i, at);
    }
}

// The document of tile `tile`, of TILE rows each, `per_token` rows a token.
template <int TILE> DEVICE Span find_span(const Geometry& g, Ptr<const i32> bounds, int tile, int per_token) {
    int low = 0, high = g.documents;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if ((i64)boundary(g, bounds, middle) * per_token / TILE + middle <= tile)
            low = middle;
        else
            high = middle;
    }
    Span d;
    d.start = boundary(g, bounds, low);
    d.tokens = max_of(boundary(g, bounds, low + 1) - d.start, 0);
    const i64 first = (i64)(tile - low - (i32)((i64)d.start * per_token / TILE)) * TILE;
    d.first = (i32)min_of(first, (i64)d.tokens * per_token);
    return d;
}

// Rows of the queries' matrices [N, H*D] from one row of a document on.
struct QueryRows {
    i64 start;  // index in [N, H] of the first token's first head of the group
    i32 token0; // in its document
    i32 head0;  // of the first row
    i32 group;
    u32 share;
    i32 heads;
    i32 dim;
    i32 count;
    // In its document.
    DEVICE i32 token(int row) const { return token0 + (i32)(((u32)(head0 + row) * share) >> 24); }
    // Relative to `start`, in [N, H].
    DEVICE i32 index(int row) const {
        const i32 x = head0 + row, t = (i32)(((u32)x * share) >> 24);
        return t * heads + x - t * group;
    }
    DEVICE i32 offset(int row) const { return index(row) * dim; }
};
DEVICE QueryRows query_rows(const Geometry& g, const Span& d, int kv_head, int first, int count) {
    QueryRows r;
    r.token0 = first / g.group;
    r.head0 = first - r.token0 * g.group;
    r.start = (i64)(d.start + r.token0) * g.heads + (i64)kv_head * g.group;
    r.group = g.group, r.share = g.share, r.heads = g.heads, r.dim = g.dim, r.count = count;
    return r;
}

// Rows of [N, K*D] from one token of a document on.
struct KeyRows {
    i64 start;  // first element
    i32 stride;
    i32 dim;
    i32 count;
    DEVICE i32 offset(int row) const { return row * stride; }
};
DEVICE KeyRows key_rows(const Geometry& g, const Span& d, int kv_head, int key, int count) {
    KeyRows r;
    r.start = ((i64)(d.start + key) * g.kv_heads + kv_head) * g.dim;
    r.stride = g.kv_heads * g.dim, r.dim = g.dim, r.count = count;
    return r;
}
DEVICE i64 first_element(const QueryRows& r) { return r.start * r.dim; }
DEVICE i64 first_element(const KeyRows& r) { return r.start; }

// 16 bytes of a row, zeros behind its end. Where rows begin anywhere, element by element, in a loop that stays one: unrolled and
// moved out of the loops around it, its conditions would fill the scalar registers.
DEVICE u32 element_bits(float x) { return float_bits(x); }
DEVICE u32 element_bits(bf16 x) { return x.bits; }
template <class T> DEVICE T bits_element(u32 bits);
template <> DEVICE float bits_element<float>(u32 bits) { return bits_float(bits); }
template <> DEVICE bf16 bits_element<bf16>(u32 bits) { return bf16{(u16)bits}; }

// Shifts one element in at the end and the first one out.
template <class T> DEVICE void rotate(Raw16& v, u32 in) {
    constexpr int WORD = 8 * (int)sizeof(u32), BITS = 8 * (int)sizeof(T), LEFT = WORD - BITS;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 next = i < 3 ? v.w[i + 1] : in;
        v.w[i] = BITS == WORD ? next : v.w[i] >> (BITS % WORD) | next << LEFT;
    }
}
template <class T> DEVICE Raw16 load_chunk(Ptr<const T> row, int col, int dim, bool vector) {
    if (vector) return load_raw16(row + col);
    Raw16 v = {{0, 0, 0, 0}};
#pragma unroll 1
    for (int i = 0; i < VEC<T>; i++) {
        T e = row[min_of(col + i, dim - 1)];
        rotate<T>(v, col + i < dim ? element_bits(e) : 0);
    }
    return v;
}
template <class T> DEVICE void store_chunk(Ptr<T> row, int col, int dim, bool vector, Raw16 v) {
    if (vector) {
        store_raw16(row + col, v);
        return;
    }
#pragma unroll 1
    for (int i = 0; i < VEC<T>; i++) {
        if (col + i < dim) row[col + i] = bits_element<T>(sizeof(T) == 4 ? v.w[0] : v.w[0] & 0xffff);
        rotate<T>(v, 0);
    }
}

// A tile on its way from device to shared memory. `start` names the tile, which no one may be reading any more; after `finish` and
// a barrier it is there. Narrow machines copy in the background; on wide ones, whose copies are a load and a store, registers hold
// it meanwhile, and the tile may still be read until `finish`.
//
// Threads form a grid of rows x ACROSS chunks of 16 bytes, and each takes the same place in every part of the tile, so that all its
// addresses are one and constants: ACROSS chunks are permuted among themselves, and parts are whole multiples of the rows after
// which that repeats.
template <class T, int ROWS, int D, int THREADS> struct Fetch {
    static constexpr int CHUNKS = D / VEC<T>, ACROSS = SWIZZLE<CHUNKS>, DOWN = THREADS / ACROSS < ROWS ? THREADS / ACROSS : ROWS;
    static constexpr int PARTS_DOWN = ROWS / DOWN, PARTS_ACROSS = CHUNKS / ACROSS;
    static_assert(ROWS % DOWN == 0, "whole parts");
    Raw16 held[NARROW ? 1 : PARTS_DOWN * PARTS_ACROSS];

    // One part of the tile, by copy or by way of a register.
    template <bool VECTOR, class R> DEVICE void part(Tile<T, D> to, Ptr<const T> from, const R& rows, i32 dim, int i, int j) {
        const int row = thread_id() / ACROSS + i * DOWN, col = thread_id() % ACROSS * VEC<T> + j * ACROSS * VEC<T>;
        const Ptr<const T> source = from + (row < rows.count ? rows.offset(row) : 0);
        const bool valid = row < rows.count && col < dim;
        if constexpr (NARROW && VECTOR) {
            copy16_async(to.ptr(row, col), source + (valid ? col : 0), valid);
        } else {
            Raw16 here = {{0, 0, 0, 0}};
            if (valid) here = load_chunk(source, col, dim, VECTOR);
            if constexpr (NARROW)
                store_raw16(to.ptr(row, col), here);
            else
                held[i * PARTS_ACROSS + j] = here;
        }
    }
    template <bool VECTOR, class R> DEVICE void parts(Tile<T, D> to, Ptr<const T> from, const R& rows, i32 dim) {
        // The slow way stays a loop where no registers are indexed by it.
        constexpr int DOWN_AT_ONCE = NARROW && !VECTOR ? 1 : PARTS_DOWN, ACROSS_AT_ONCE = NARROW && !VECTOR ? 1 : PARTS_ACROSS;
#pragma unroll DOWN_AT_ONCE
        for (int i = 0; i < PARTS_DOWN; i++)
#pragma unroll ACROSS_AT_ONCE
            for (int j = 0; j < PARTS_ACROSS; j++) part<VECTOR>(to, from, rows, dim, i, j);
    }
    template <class R> DEVICE void start(Tile<T, D> to, Ptr<const T> from, const R& rows, bool vector) {
        if (ACROSS * DOWN == THREADS || thread_id() / ACROSS < DOWN) {
            from = from + first_element(rows);
            // The dimension, as something that changes with the tile: which columns exist is then found again for each tile, instead of
            // being kept in a mask per column from before the loop. Counts are not negative.
            const i32 dim = rows.dim + (rows.count >> 31);
            if (vector)
                parts<true>(to, from, rows, dim);
            else
                parts<false>(to, from, rows, dim);
        }
        copy_commit();
    }
    DEVICE void finish(Tile<T, D> to) {
        if constexpr (NARROW) {
            copy_wait<0>();
        } else {
            const int t = thread_id(), row0 = t / ACROSS, col0 = t % ACROSS * VEC<T>;
            if (ACROSS * DOWN == THREADS || row0 < DOWN) {
#pragma unroll
                for (int i = 0; i < PARTS_DOWN; i++)
#pragma unroll
                    for (int j = 0; j < PARTS_ACROSS; j++)
                        store_raw16(to.ptr(row0 + i * DOWN, col0 + j * ACROSS * VEC<T>), held[i * PARTS_ACROSS + j]);
            }
        }
    }
};

// Writes a warp's 16 M rows, staged in rows from `row0` on of a tile that only this warp uses, to rows of device memory.
template <class T, int M, int D, class R> DEVICE void store_rows(Ptr<T> to, const R& rows, Tile<T, D> tile, int row0, const Acc (&acc)[M][D / 16], bool vector) {
    constexpr int CHUNKS = D / VEC<T>, ALL = 16 * M * CHUNKS / WARP, AT_ONCE = NARROW ? 2 : ALL;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int c = 0; c < D / 16; c++) store_acc(tile, row0 + 16 * m, 16 * c, acc[m][c]);
    warp_sync();
    to = to + first_element(rows);
#pragma unroll AT_ONCE
    for (int i = 0; i < ALL; i++) {
        const int at = lane_id() + i * WARP, row = row0 + at / CHUNKS, col = at % CHUNKS * VEC<T>;
        if (row < rows.count && col < rows.dim) store_chunk(to + rows.offset(row), col, rows.dim, vector, load_raw16(tile.ptr(row, col)));
    }
}

// The left operand of `scores`: 16 M rows of a tile, in registers, or read again for every product.
template <class T, int M, int D, bool HELD> struct Left;
template <class T, int M, int D> struct Left<T, M, D, true> {
    typename Mma<T>::A a[M][D / Mma<T>::K];
    DEVICE void take(Tile<T, D> tile, int row0) {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int k = 0; k < D / Mma<T>::K; k++) load_a(a[m][k], tile, row0 + 16 * m, k * Mma<T>::K);
    }
    DEVICE typename Mma<T>::A get(int m, int k) const { return a[m][k]; }
};
template <class T, int M, int D> struct Left<T, M, D, false> {
    Tile<T, D> tile;
    int row0;
    DEVICE void take(Tile<T, D> from, int row) { tile = from, row0 = row; }
    DEVICE typename Mma<T>::A get(int m, int k) const {
        typename Mma<T>::A a;
        load_a(a, tile, row0 + 16 * m, k * Mma<T>::K);
        return a;
    }
};

template <int M, int N> DEVICE void clear_all(Acc (&acc)[M][N]) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++) clear(acc[m][n]);
}

// s = a b^T: s[m][n] of the left rows and rows row0 + 16 n of tile b, summed over D. Two fragments at a time where one instruction takes
// both; elsewhere the second pair would only cost registers.
template <int M, int N, int D, bool HELD> DEVICE void scores(Acc (&s)[M][N], const Left<bf16, M, D, HELD>& left, Tile<bf16, D> b, int row0) {
    constexpr int STEP = NARROW ? 1 : 2;
    clear_all(s);
#pragma unroll
    for (int k = 0; k < D / 16; k += STEP) {
        Mma<bf16>::A a0[M], a1[M];
#pragma unroll
        for (int m = 0; m < M; m++) {
            a0[m] = left.get(m, k);
            if (STEP == 2) a1[m] = left.get(m, k + 1);
        }
#pragma unroll
        for (int n = 0; n < N; n++) {
            Mma<bf16>::B b0, b1;
            load_b(b0, b, row0 + 16 * n, 16 * k);
            if (STEP == 2) load_b(b1, b, row0 + 16 * n, 16 * k + 16);
#pragma unroll
            for (int m = 0; m < M; m++) {
                if (STEP == 2)
                    mma2(s[m][n], a0[m], a1[m], b0, b1);
                else
                    mma(s[m][n], a0[m], b0);
            }
        }
    }
}
// In f32 by a loop that stays one where the left operand is not held: unrolled, operands and addresses would fill the registers.
template <int N, int D, bool HELD> DEVICE void scores(Acc (&s)[1][N], const Left<float, 1, D, HELD>& left, Tile<float, D> b, int row0) {
    constexpr int UNROLL = HELD ? D / 4 : 1;
    clear_all(s);
#pragma unroll UNROLL
    for (int k = 0; k < D / 4; k++) {
        const Mma<float>::A a = left.get(0, k);
#pragma unroll
        for (int n = 0; n < N; n++) {
            Mma<float>::B bn;
            load_b(bn, b, row0 + 16 * n, 4 * k);
            mma(s[0][n], a, bn);
        }
    }
}

// The left operand of `accumulate`: scores, rounded to T at once, so that fewer registers are taken meanwhile; in f32 as they are.
template <class T, int M, int N> struct Rounded;
template <int M, int N> struct Rounded<bf16, M, N> {
    Mma<bf16>::A a[M][N][1];
    DEVICE void take(const Acc (&s)[M][N]) {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < N; n++) a_from_acc(a[m][n], s[m][n], Shared<float>{});
    }
};
template <int M, int N> struct Rounded<float, M, N> {
    Acc a[M][N];
    DEVICE void take(const Acc (&s)[M][N]) {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < N; n++) a[m][n] = s[m][n];
    }
};

// o += p v: p[m][n] are scores of rows row0 + 16 n of tile v. `scratch`: Mma<T>::SCRATCH floats of this warp.
template <int M, int N, int D> DEVICE void accumulate(Acc (&o)[M][D / 16], const Rounded<bf16, M, N>& p, Tile<bf16, D> v, int row0, Shared<float>) {
    constexpr int STEP = NARROW ? 1 : 2;
    static_assert(N % STEP == 0, "two fragments at a time");
#pragma unroll
    for (int n = 0; n < N; n += STEP) {
#pragma unroll
        for (int c = 0; c < D / 16; c++) {
            Mma<bf16>::B b0, b1;
            load_b_t(b0, v, 16 * c, row0 + 16 * n);
            if (STEP == 2) load_b_t(b1, v, 16 * c, row0 + 16 * n + 16);
#pragma unroll
            for (int m = 0; m < M; m++) {
                if (STEP == 2)
                    mma2(o[m][c], p.a[m][n][0], p.a[m][n + STEP - 1][0], b0, b1);
                else
                    mma(o[m][c], p.a[m][n][0], b0);
            }
        }
    }
}
// In f32 by a loop over k that stays one, for the same reason as above.
template <int N, int D> DEVICE void accumulate(Acc (&o)[1][D / 16], const Rounded<float, 1, N>& p, Tile<float, D> v, int row0, Shared<float> scratch) {
    const Tile<float, 16> t{scratch};
#pragma unroll
    for (int n = 0; n < N; n++) {
        warp_sync();
        store_acc(t, 0, 0, p.a[0][n]);
        warp_sync();
#pragma unroll 1
        for (int k = 0; k < 16; k += 4) {
            Mma<float>::A a;
            load_a(a, t, 0, k);
#pragma unroll
            for (int c = 0; c < D / 16; c++) {
                // Operands are loads like any others here: without this the compiler starts all of them at once.
                if constexpr (NARROW) warp_sync();
                Mma<float>::B b;
                load_b_t(b, v, 16 * c, row0 + 16 * n + k);
                mma(o[0][c], a, b);
            }
        }
    }
}

template <int M, int N> DEVICE void scale_all(Acc (&acc)[M][N], float factor) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < ACC_ELEMS; i++) acc[m][n].v[i] *= factor;
}

#endif
