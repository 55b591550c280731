// How does a tile of a matrix get from device memory to shared memory, wherever the matrix ends and however it is aligned?
// A tile is ROWS x LD elements (see Tile in compat.h), moved by THREADS threads in chunks of 16 bytes; what lies outside the matrix
// becomes zero and is never read. Two ways:
//
// * `copy`: asynchronous copies, where the machine has a copy engine and all rows begin at multiples of 16 bytes;
// * `fetch`, later `publish`: through registers, so that a load is under way while the tile before it is multiplied. Rows that begin
//   anywhere are fetched element by element.
#ifndef ZRT_TILE_CUH
#define ZRT_TILE_CUH

#include "compat.h"

// A machine with an engine that copies from device to shared memory; the others load into registers ahead of time.
constexpr bool COPY_ENGINE = WARP == 32;

// A row-major matrix in device memory.
template <class T> struct Matrix {
    Ptr<const T> base;
    i64 ld;
    i32 rows, cols;
};

// All ones where i < n, else 0: a mask in an ordinary register; conditions take two scalar ones each, and AMD's would run out.
DEVICE u32 ones_below(i32 i, i32 n) { return (u32)((i - n) >> 31); }

// One chunk of 16 bytes: elements (row, col ...) of the matrix, zeros outside. VECTOR: a chunk is inside or outside as a whole.
template <bool VECTOR, class T> DEVICE Raw16 load_chunk(const Matrix<T>& m, i32 row, i32 col) {
    Raw16 out = {{0, 0, 0, 0}};
    if (row >= m.rows || col >= m.cols) return out;
    Ptr<const T> from = m.base + ((i64)row * m.ld + col);
    if constexpr (VECTOR) {
        return load_raw16(from);
    } else {
        // The last element is read again behind the end: a branch for each would need many registers.
#pragma unroll
        for (int i = 0; i < VEC<T>; i++) {
            T x = from[min_of(i, m.cols - 1 - col)];
            const u32 inside = ones_below(col + i, m.cols);
            if constexpr (sizeof(T) == 4)
                out.w[i] = float_bits(x) & inside;
            else
                out.w[i / 2] |= (u32)x.bits << (i % 2 * 16) & inside;
        }
        return out;
    }
}

template <class T, int ROWS, int LD, int THREADS> struct Mover {
    static constexpr int ACROSS = LD / VEC<T>, ALL = ROWS * ACROSS, CHUNKS = (ALL + THREADS - 1) / THREADS;
    Raw16 held[CHUNKS];

    // Whether there is a c-th chunk: always, where threads share them evenly.
    static DEVICE bool mine(int c) { return ALL % THREADS == 0 || c < ALL; }

    // Element (0, 0) of the tile is element (row0, col0) of the matrix.
    static DEVICE void copy(Tile<T, LD> tile, const Matrix<T>& m, i32 row0, i32 col0) {
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            const int c = thread_id() + i * THREADS, row = c / ACROSS, col = c % ACROSS * VEC<T>;
            if (mine(c)) copy16_async(tile.ptr(row, col), m.base + ((i64)(row0 + row) * m.ld + (col0 + col)), row0 + row < m.rows && col0 + col < m.cols);
        }
    }
    template <bool VECTOR> DEVICE void fetch(const Matrix<T>& m, i32 row0, i32 col0) {
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            const int c = thread_id() + i * THREADS;
            if (mine(c)) held[i] = load_chunk<VECTOR>(m, row0 + c / ACROSS, col0 + c % ACROSS * VEC<T>);
        }
    }
    // Element by element, at once: slow, but takes few registers.
    static DEVICE void move_single(Tile<T, LD> tile, const Matrix<T>& m, i32 row0, i32 col0) {
#pragma unroll 1
        for (int i = thread_id(); i < ROWS * LD; i += THREADS) {
            const int row = i / LD, col = i % LD;
            T x = from_float<T>(0.0f);
            if (row0 + row < m.rows && col0 + col < m.cols) x = m.base[(i64)(row0 + row) * m.ld + (col0 + col)];
            tile.base[tile.at(row, col)] = x;
        }
    }
    DEVICE void publish(Tile<T, LD> tile) const {
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            const int c = thread_id() + i * THREADS;
            if (mine(c)) store_raw16(tile.ptr(c / ACROSS, c % ACROSS * VEC<T>), held[i]);
        }
    }
};

#endif
