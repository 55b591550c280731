// How does a grid walk over elements one by one? In pieces of N elements, whose narrowest operand takes 16 bytes, a piece a thread,
// grid-stride; what is left behind the last whole piece, and operands that begin at no multiple of 16 bytes, element by element.
// An operation is a struct with `template <int N> void run(i64 at)` that does elements at .. at + N.
#ifndef ZRT_ELEMENTWISE_CUH
#define ZRT_ELEMENTWISE_CUH

#include "rows.cuh"

constexpr int ELEM_THREADS = 256;

template <int N, class Op> DEVICE void for_each_element(const Op& op, i64 elems, bool vector) {
    const i64 me = (i64)block_id_x() * ELEM_THREADS + thread_id(), stride = (i64)grid_x() * ELEM_THREADS;
    if (!vector) {
        for (i64 at = me; at < elems; at += stride) op.template run<1>(at);
        return;
    }
    const i64 pieces = elems / N;
    for (i64 i = me; i < pieces; i += stride) op.template run<N>(i * N);
    if (pieces * N + me < elems) op.template run<1>(pieces * N + me);
}

// N elements of either type from or to 16-byte accesses; bf16 of 4 elements takes 8 bytes.
template <class T, int N> DEVICE void load_any(Piece<N>& to, Ptr<T> p) {
    if constexpr (N == 4 && sizeof(T) == 2) {
        Raw8 raw = load_raw8(p);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            to.v[2 * i] = bits_float(raw.w[i] << 16);
            to.v[2 * i + 1] = bits_float(raw.w[i] & 0xffff0000u);
        }
    } else {
        load_floats(to, p);
    }
}
template <class T, int N> DEVICE void store_any(Ptr<T> p, const Piece<N>& from) {
    if constexpr (N == 1 || N == VEC<T>) {
        store_piece(p, from);
    } else if constexpr (sizeof(T) == 4) {
        store_floats(p, from);
    } else {
        static_assert(N == 4, "bf16 is stored by 8, 4 or 1");
        u32 e[4];
#pragma unroll
        for (int i = 0; i < 4; i++) e[i] = from_float<T>(from.v[i]).bits;
        store_raw8(p, Raw8{{e[0] | e[1] << 16, e[2] | e[3] << 16}});
    }
}

#endif
