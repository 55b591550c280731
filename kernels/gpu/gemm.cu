// Dense products on matrix cores: c [M,N] (+)= a b^T + bias, where a is [M,K] and b [N,K], and either may lie transposed:
//   nt: a [M,K], b [N,K]   y = x W^T          nn: a [M,K], b [K,N]   dx = dy W          tn: a [K,M], b [K,N]   dw = dy^T x
// bf16 with f32 sums (the result bf16 or f32), or f32 throughout. Any M, N, K; rows that begin anywhere (then loads are slower).
//
// Memory: a block reads (BM + BN) K elements for BM BN results, from L2 except for the first block that needs them: blocks run in
// groups of RASTER rows of tiles, so that a group's a and the b it passes over stay there. Limited by the matrix cores where M, N
// and K are all some hundreds; 128 x 128 gives 64 multiplications for each element that a block loads, enough for L2, and leaves
// room for two blocks on a compute unit. K advances by 64 bytes a step: STAGES steps are under way by asynchronous copy, or one is
// in registers (see tile.cuh). A warp has 64 x 32 results (64 x 64 with 64 lanes): 16 fragments of operands for 32 products.
//
// Where the grid would be too small for the machine (weight gradients: M, N small, K tokens), K is split over grid.z, each part
// writes its own f32 result to the workspace and column_sum adds them in order. Results go through shared memory to be stored in
// whole lines.
#include "tile.cuh"

constexpr int GEMM_THREADS = 256;
constexpr int BM = 128, BN = 128;
// Steps of K whose operands are in shared memory.
constexpr int STAGES = COPY_ENGINE ? 4 : 2;
constexpr int RASTER = 8;

template <class T> struct Gemm {
    Ptr<T> c;          // null where the result is f32 and T is not
    Ptr<float> c_f32;  // else this
    Ptr<const T> a;
    Ptr<const T> b;
    Ptr<const T> bias;  // [N], null: none
    i64 lda;
    i64 ldb;
    i64 ldc;
    i32 m;
    i32 n;
    i32 k;
    i32 k_split;   // K of one part, a multiple of a step; part z writes to c_f32 + z M ldc
    i32 vector;    // rows of a and b begin at multiples of 16 bytes
    i32 vector_c;  // rows of c do
    i32 add;       // c is added to
    i32 unused;
};

// The tile of one operand, and how it is read. T: it lies as [K, M], tile [BK][128], else [128][BK].
template <class T, bool TRANS> struct Operand {
    static constexpr int BK = 64 / (int)sizeof(T), ROWS = TRANS ? BK : 128, LD = TRANS ? 128 : BK;
    using Of = Tile<T, LD>;
    using Move = Mover<T, ROWS, LD, GEMM_THREADS>;
    static constexpr int BYTES = 128 * 64;
    static DEVICE i32 row(i32 outer, i32 k) { return TRANS ? k : outer; }
    static DEVICE i32 col(i32 outer, i32 k) { return TRANS ? outer : k; }
};

// Results of a warp: FM x FN fragments.
constexpr int WARPS = GEMM_THREADS / WARP, WARPS_N = WARPS / 2, WM = BM / 2, WN = BN / WARPS_N;
constexpr int FM = WM / 16, FN = WN / 16;

template <class T, bool TA, bool TB>
DEVICE void multiply(Acc (&acc)[FM][FN], typename Operand<T, TA>::Of ta, typename Operand<T, TB>::Of tb) {
    constexpr int K = Mma<T>::K, BK = Operand<T, TA>::BK, PAIR = WARP == 64 ? 2 : 1, UNROLL = sizeof(T) == 4 || TA || TB ? 1 : 2;
    const int m0 = warp_id() / WARPS_N * WM, n0 = warp_id() % WARPS_N * WN;
#pragma unroll UNROLL
    for (int k = 0; k < BK; k += K * PAIR) {
        typename Mma<T>::A a[FM][PAIR];
#pragma unroll
        for (int i = 0; i < FM; i++)
#pragma unroll
            for (int j = 0; j < PAIR; j++) {
                if constexpr (TA)
                    load_a_t(a[i][j], ta, m0 + 16 * i, k + j * K);
                else
                    load_a(a[i][j], ta, m0 + 16 * i, k + j * K);
            }
#pragma unroll
        for (int n = 0; n < FN; n++) {
            typename Mma<T>::B b[PAIR];
#pragma unroll
            for (int j = 0; j < PAIR; j++) {
                if constexpr (TB)
                    load_b_t(b[j], tb, n0 + 16 * n, k + j * K);
                else
                    load_b(b[j], tb, n0 + 16 * n, k + j * K);
            }
#pragma unroll
            for (int i = 0; i < FM; i++) {
                if constexpr (PAIR == 2)
                    mma2(acc[i][n], a[i][0], a[i][1], b[0], b[1]);
                else
                    mma(acc[i][n], a[i][0], b[0]);
            }
        }
    }
}

// acc = a b^T over k in [k0, k1) for the block's rows from m0 on and columns from n0 on.
template <class T, bool TA, bool TB, bool VECTOR>
DEVICE void product(Acc (&acc)[FM][FN], const Gemm<T>& p, Shared<u8> memory, i32 m0, i32 n0, i32 k0, i32 k1) {
    using A = Operand<T, TA>;
    using B = Operand<T, TB>;
    constexpr int BK = A::BK, STAGE_BYTES = A::BYTES + B::BYTES;
    const Matrix<T> a = {p.a, p.lda, TA ? k1 : p.m, TA ? p.m : k1}, b = {p.b, p.ldb, TB ? k1 : p.n, TB ? p.n : k1};
    const int steps = (int)div_up(k1 - k0, (i32)BK);
    auto tile_a = [&](int s) { return typename A::Of{shared_cast<T>(memory, s * STAGE_BYTES)}; };
    auto tile_b = [&](int s) { return typename B::Of{shared_cast<T>(memory, s * STAGE_BYTES + A::BYTES)}; };
    if constexpr (COPY_ENGINE && VECTOR) {
        auto copy = [&](int s) {
            if (s < steps) {
                const i32 k = k0 + s * BK;
                A::Move::copy(tile_a(s % STAGES), a, A::row(m0, k), A::col(m0, k));
                B::Move::copy(tile_b(s % STAGES), b, B::row(n0, k), B::col(n0, k));
            }
            copy_commit();
        };
        for (int s = 0; s < STAGES - 1; s++) copy(s);
        for (int s = 0; s < steps; s++) {
            copy_wait<STAGES - 2>();
            barrier();
            copy(s + STAGES - 1);
            multiply<T, TA, TB>(acc, tile_a(s % STAGES), tile_b(s % STAGES));
        }
        copy_wait<0>();
    } else if constexpr (VECTOR) {
        typename A::Move move_a;
        typename B::Move move_b;
        auto fetch = [&](int s) {
            const i32 k = k0 + s * BK;
            move_a.template fetch<true>(a, A::row(m0, k), A::col(m0, k));
            move_b.template fetch<true>(b, B::row(n0, k), B::col(n0, k));
        };
        if (steps > 0) fetch(0);
        for (int s = 0; s < steps; s++) {
            move_a.publish(tile_a(s % 2));
            move_b.publish(tile_b(s % 2));
            barrier();
            if (s + 1 < steps) fetch(s + 1);
            multiply<T, TA, TB>(acc, tile_a(s % 2), tile_b(s % 2));
        }
    } else {
        // Rows that begin anywhere: the slow way, which costs the others no registers.
        for (int s = 0; s < steps; s++) {
            const i32 k = k0 + s * BK;
            A::Move::move_single(tile_a(s % 2), a, A::row(m0, k), A::col(m0, k));
            B::Move::move_single(tile_b(s % 2), b, B::row(n0, k), B::col(n0, k));
            barrier();
            multiply<T, TA, TB>(acc, tile_a(s % 2), tile_b(s % 2));
        }
    }
    // Shared memory is used again.
    barrier();
}

// Writes N neighbouring results of row `row` from column `col` on: bias and what is there are added.
template <class T, class C, int N> DEVICE void write_results(const Gemm<T>& p, Ptr<C> c, i32 row, i32 col, float (&v)[N]) {
    if (row >= p.m || col >= p.n) return;
    Ptr<C> to = c + ((i64)row * p.ldc + col);
    const bool whole = p.vector_c && col + N <= p.n;
    if (p.bias) {
#pragma unroll
        for (int i = 0; i < N; i++)
            if (col + i < p.n) {
                T x = p.bias[col + i];
                v[i] += to_float(x);
            }
    }
    if (whole) {
        if (p.add) {
            float before[N];
            unpack16(before, load_raw16(to));
#pragma unroll
            for (int i = 0; i < N; i++) v[i] += before[i];
        }
        store_raw16(to, pack16(v));
    } else {
#pragma unroll
        for (int i = 0; i < N; i++)
            if (col + i < p.n) {
                if (p.add) {
                    C x = to[i];
                    v[i] += to_float(x);
                }
                to[i] = from_float<C>(v[i]);
            }
    }
}

// Stores the block's results as C, 16 rows of a warp at a time by way of its own part of shared memory.
template <class T, class C> DEVICE void store(const Acc (&acc)[FM][FN], const Gemm<T>& p, Ptr<C> c, Shared<u8> memory, i32 m0, i32 n0) {
    constexpr int N = VEC<C>, PIECES = 16 * WN / N / WARP;
    Tile<float, WN> strip{shared_cast<float>(memory, warp_id() * 16 * WN * 4)};
    const i32 row0 = m0 + warp_id() / WARPS_N * WM, col0 = n0 + warp_id() % WARPS_N * WN;
#pragma unroll
    for (int i = 0; i < FM; i++) {
        warp_sync();
#pragma unroll
        for (int n = 0; n < FN; n++) store_acc(strip, 0, 16 * n, acc[i][n]);
        warp_sync();
#pragma unroll
        for (int j = 0; j < PIECES; j++) {
            const int piece = lane_id() + j * WARP, row = piece / (WN / N), col = piece % (WN / N) * N;
            float v[N];
#pragma unroll
            for (int e = 0; e < N; e += 4) {
                Raw16 raw = load_raw16(strip.ptr(row, col + e));
#pragma unroll
                for (int x = 0; x < 4; x++) v[e + x] = bits_float(raw.w[x]);
            }
            write_results(p, c, row0 + 16 * i + row, col0 + col, v);
        }
    }
}

template <class T, bool TA, bool TB> DEVICE void gemm(const Gemm<T>& p) {
    DYN_SHARED(memory);
    const int tiles_m = (int)div_up(p.m, (i32)BM), tiles_n = (int)div_up(p.n, (i32)BN);
    const int group = block_id_x() / (RASTER * tiles_n), in_group = block_id_x() % (RASTER * tiles_n);
    const int high = min_of(tiles_m - group * RASTER, RASTER);
    const i32 m0 = (group * RASTER + in_group % high) * BM, n0 = in_group / high * BN;
    const i32 part = block_id_z(), k0 = part * p.k_split, k1 = min_of(p.k, k0 + p.k_split);
    Acc acc[FM][FN];
#pragma unroll
    for (int i = 0; i < FM; i++)
#pragma unroll
        for (int n = 0; n < FN; n++) clear(acc[i][n]);
    if (p.vector)
        product<T, TA, TB, true>(acc, p, memory, m0, n0, k0, k1);
    else
        product<T, TA, TB, false>(acc, p, memory, m0, n0, k0, k1);
    if (p.c_f32)
        store(acc, p, p.c_f32 + (i64)part * p.m * p.ldc, memory, m0, n0);
    else
        store(acc, p, p.c, memory, m0, n0);
}

KERNEL(gemm_nt_f32, Gemm<float>, GEMM_THREADS) { gemm<float, false, false>(p); }
KERNEL(gemm_nn_f32, Gemm<float>, GEMM_THREADS) { gemm<float, false, true>(p); }
KERNEL(gemm_tn_f32, Gemm<float>, GEMM_THREADS) { gemm<float, true, true>(p); }
KERNEL_OCC(gemm_nt_bf16, Gemm<bf16>, GEMM_THREADS, 2) { gemm<bf16, false, false>(p); }
KERNEL_OCC(gemm_nn_bf16, Gemm<bf16>, GEMM_THREADS, 2) { gemm<bf16, false, true>(p); }
KERNEL_OCC(gemm_tn_bf16, Gemm<bf16>, GEMM_THREADS, 2) { gemm<bf16, true, true>(p); }

// The gradient of a bias, sums of rows: partial [groups, cols] = sum over a group's rows of dy [rows, cols]. One read of dy.
template <class T> struct RowSums {
    Ptr<float> partial;
    Ptr<const T> dy;
    i64 rows;
    i64 rows_per_group;
    i64 cols;
};

template <class T> DEVICE void row_sums(const RowSums<T>& p) {
    const i64 col = (i64)block_id_x() * GEMM_THREADS + thread_id();
    const i64 first = block_id_y() * p.rows_per_group, end = min_of(first + p.rows_per_group, p.rows);
    if (col >= p.cols) return;
    float sum = 0.0f;
    for (i64 row = first; row < end; row++) {
        T x = p.dy[row * p.cols + col];
        sum += to_float(x);
    }
    p.partial[(i64)block_id_y() * p.cols + col] = sum;
}

KERNEL(row_sums_f32, RowSums<float>, GEMM_THREADS) { row_sums(p); }
KERNEL(row_sums_bf16, RowSums<bf16>, GEMM_THREADS) { row_sums(p); }
