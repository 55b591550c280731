// How do f32 adapters keep their precision on bf16 matrix cores? Each number is split into hi + lo, two bf16 whose sum is good to
// 2^-17, and every product is made of the parts: x (hi + lo) is two instructions for an exact bf16 x, (hi + lo) (hi' + lo') three. With
// f32 activations there is one part, the number itself. These are tiles of such numbers in shared memory, and fragments of them.
#ifndef ZRT_SPLIT_CUH
#define ZRT_SPLIT_CUH

#include "tile.cuh"

template <class T> constexpr int PARTS = sizeof(T) == 2 ? 2 : 1;

// N f32 from element `col` of a row of `cols` (at least 1) on, zeros behind its end; `vector`: the row begins at a multiple of 16 bytes
// and has whole groups of 4. Else the last element is read again behind the end: a branch for each would need many registers.
template <int N> DEVICE void load_row(float (&v)[N], Ptr<const float> row, i32 col, i32 cols, bool vector) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        if (vector) {
            Raw16 raw = {{0, 0, 0, 0}};
            if (col + i < cols) raw = load_raw16(row + (col + i));
#pragma unroll
            for (int j = 0; j < 4; j++) v[i + j] = bits_float(raw.w[j]);
        } else {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float x = row[min_of(col + i + j, cols - 1)];
                v[i + j] = bits_float(float_bits(x) & ones_below(col + i + j, cols));
            }
        }
    }
}

template <class T, int LD> struct SplitTile {
    Tile<T, LD> part[PARTS<T>];
    static DEVICE constexpr int bytes(int rows) { return PARTS<T> * Tile<T, LD>::bytes(rows); }
    static DEVICE SplitTile of(Shared<u8> memory, int offset, int rows) {
        SplitTile t;
#pragma unroll
        for (int i = 0; i < PARTS<T>; i++) t.part[i] = Tile<T, LD>{shared_cast<T>(memory, offset + i * Tile<T, LD>::bytes(rows))};
        return t;
    }
    // VEC<T> numbers from (row, col) on, a chunk of each part.
    DEVICE void store(int row, int col, const float (&v)[VEC<T>]) const {
        if constexpr (sizeof(T) == 2) {
            Raw16 hi, lo;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                hi.w[i] = pack_bf16x2(v[2 * i], v[2 * i + 1]);
                lo.w[i] = pack_bf16x2(v[2 * i] - bits_float(hi.w[i] << 16), v[2 * i + 1] - bits_float(hi.w[i] & 0xffff0000u));
            }
            store_raw16(part[0].ptr(row, col), hi);
            store_raw16(part[1].ptr(row, col), lo);
        } else {
            store_raw16(part[0].ptr(row, col), pack16(v));
        }
    }
    DEVICE void store_one(int row, int col, float v) const {
        const T hi = from_float<T>(v);
        part[0].base[part[0].at(row, col)] = hi;
        if constexpr (PARTS<T> == 2) part[1].base[part[1].at(row, col)] = from_float<T>(v - to_float(hi));
    }
    // VEC<T> numbers, of elements `from` on of a row of `cols` in device memory, zeros behind its end. `vector`: the row begins at a
    // multiple of 16 bytes and has whole groups of 4; else one element after the other, those of every 8 neighbouring threads, which
    // have neighbouring chunks, in another order: at 16 bytes from one another they would meet in the same banks.
    DEVICE void store_row(int row, int col, Ptr<const float> numbers, i32 from, i32 cols, bool vector) const {
        if (vector) {
            float v[VEC<T>];
            load_row(v, numbers, from, cols, true);
            store(row, col, v);
        } else {
#pragma unroll 1
            for (int i = 0; i < VEC<T>; i++) {
                const int j = (i + thread_id() / 8 * (VEC<T> / 4)) % VEC<T>;
                float x = 0.0f;
                if (from + j < cols) x = numbers[from + j];
                store_one(row, col + j, x);
            }
        }
    }
};

template <class T> struct SplitA {
    typename Mma<T>::A part[PARTS<T>];
};
template <class T> struct SplitB {
    typename Mma<T>::B part[PARTS<T>];
};
template <class T, int LD> DEVICE void load_a(SplitA<T>& a, const SplitTile<T, LD>& t, int row0, int k0) {
#pragma unroll
    for (int i = 0; i < PARTS<T>; i++) load_a(a.part[i], t.part[i], row0, k0);
}
template <class T, int LD> DEVICE void load_a_t(SplitA<T>& a, const SplitTile<T, LD>& t, int row0, int k0) {
#pragma unroll
    for (int i = 0; i < PARTS<T>; i++) load_a_t(a.part[i], t.part[i], row0, k0);
}
template <class T, int LD> DEVICE void load_b(SplitB<T>& b, const SplitTile<T, LD>& t, int col0, int k0) {
#pragma unroll
    for (int i = 0; i < PARTS<T>; i++) load_b(b.part[i], t.part[i], col0, k0);
}
template <class T, int LD> DEVICE void load_b_t(SplitB<T>& b, const SplitTile<T, LD>& t, int col0, int k0) {
#pragma unroll
    for (int i = 0; i < PARTS<T>; i++) load_b_t(b.part[i], t.part[i], col0, k0);
}
// Small parts first.
template <class T> DEVICE void mma(Acc& acc, const typename Mma<T>::A& a, const SplitB<T>& b) {
#pragma unroll
    for (int i = PARTS<T> - 1; i >= 0; i--) mma(acc, a, b.part[i]);
}
template <class T> DEVICE void mma(Acc& acc, const SplitA<T>& a, const typename Mma<T>::B& b) {
#pragma unroll
    for (int i = PARTS<T> - 1; i >= 0; i--) mma(acc, a.part[i], b);
}
template <class T> DEVICE void mma(Acc& acc, const SplitA<T>& a, const SplitB<T>& b) {
    if constexpr (PARTS<T> == 2) {
        mma(acc, a.part[1], b.part[0]);
        mma(acc, a.part[0], b.part[1]);
    }
    mma(acc, a.part[0], b.part[0]);
}

#endif
