// How do threads share rows of a matrix? A group of THREADS threads (a warp, or a whole block) takes a row, each thread every
// THREADS-th piece of 16 bytes of it, so that a warp's access is one run of memory; where the row's length or its address is no
// multiple of 16 bytes, pieces of one element. A row stays in registers between two passes, MAX_CHUNKS pieces a thread, so that it
// is read from memory once; longer rows are read again, by then from L2.
#ifndef ZRT_ROWS_CUH
#define ZRT_ROWS_CUH

#include "compat.h"

// N elements of a row as f32: one piece of a thread.
template <int N> struct Piece {
    float v[N];
};

template <class T, int N> DEVICE void load_piece(Piece<N>& to, Ptr<T> p) {
    if constexpr (N == 1) {
        bare<T> x = p[0];
        to.v[0] = to_float(x);
    } else {
        static_assert(N == VEC<bare<T>>, "a piece is 16 bytes or one element");
        unpack16(to.v, load_raw16(p));
    }
}

// As load_piece, N elements of any float type: f32 partners of bf16 pieces take two accesses.
template <class T, int N> DEVICE void load_floats(Piece<N>& to, Ptr<T> p) {
    if constexpr (N == 1 || N == VEC<bare<T>>) {
        load_piece(to, p);
    } else {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            Raw16 raw = load_raw16(p + i);
#pragma unroll
            for (int j = 0; j < 4; j++) to.v[i + j] = bits_float(raw.w[j]);
        }
    }
}

template <class T, int N> DEVICE void store_piece(Ptr<T> p, const Piece<N>& from) {
    if constexpr (N == 1) {
        p[0] = from_float<T>(from.v[0]);
    } else {
        static_assert(N == VEC<T>, "a piece is 16 bytes or one element");
        store_raw16(p, pack16(from.v));
    }
}

// Stores f32 for N elements: 16 bytes at a time.
template <int N> DEVICE void store_floats(Ptr<float> p, const Piece<N>& from) {
    if constexpr (N == 1) {
        p[0] = from.v[0];
    } else {
#pragma unroll
        for (int i = 0; i < N; i += 4)
            store_raw16(p + i, Raw16{{float_bits(from.v[i]), float_bits(from.v[i + 1]), float_bits(from.v[i + 2]), float_bits(from.v[i + 3])}});
    }
}

// Sum over the threads that share a row. `part`: THREADS / WARP floats where they are a block.
template <int THREADS> DEVICE float group_sum(float v, Shared<float> part) {
    if constexpr (THREADS == WARP) {
        return warp_sum(v);
    } else {
        return block_sum<THREADS>(v, part);
    }
}

#endif
