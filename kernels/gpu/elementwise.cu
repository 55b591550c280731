// Operations on elements one by one, and sums of them: add, add_into, scale, cast, fill, count_nonfinite, sum.
//
// Memory: every operand once. Limited by memory alone. 16-byte accesses, as many threads as fill the machine, each with one piece
// in flight per iteration. Results are the CPU's to the bit: one operation in f32, rounded once.
#include "elementwise.cuh"

// out = a + b; `out` may be either. add_into is out = a.
template <class A, class B> struct Add {
    Ptr<A> out;
    Ptr<const A> a;
    Ptr<const B> b;
    i64 elems;
    i32 vector;
    i32 unused;
    template <int N> DEVICE void run(i64 at) const {
        Piece<N> x, y;
        load_any(x, a + at);
        load_any(y, b + at);
#pragma unroll
        for (int i = 0; i < N; i++) x.v[i] += y.v[i];
        store_any(out + at, x);
    }
};

using AddF32 = Add<float, float>;
using AddBf16 = Add<bf16, bf16>;
using AddMixed = Add<bf16, float>;
KERNEL(add_f32, AddF32, ELEM_THREADS) { for_each_element<4>(p, p.elems, p.vector); }
KERNEL(add_bf16, AddBf16, ELEM_THREADS) { for_each_element<8>(p, p.elems, p.vector); }
KERNEL(add_bf16_f32, AddMixed, ELEM_THREADS) { for_each_element<8>(p, p.elems, p.vector); }

// out = in * factor, converted: scale (in place) and cast (factor 1, which changes no bits of a number).
template <class To, class From, bool SCALED> struct Convert {
    Ptr<To> out;
    Ptr<const From> in;
    i64 elems;
    i32 vector;
    float factor;
    template <int N> DEVICE void run(i64 at) const {
        Piece<N> x;
        load_any(x, in + at);
        if constexpr (SCALED) {
#pragma unroll
            for (int i = 0; i < N; i++) x.v[i] *= factor;
        }
        store_any(out + at, x);
    }
};

using ScaleF32 = Convert<float, float, true>;
using ScaleBf16 = Convert<bf16, bf16, true>;
using CastF32 = Convert<float, float, false>;
using CastBf16 = Convert<bf16, bf16, false>;
using Narrow = Convert<bf16, float, false>;
using Widen = Convert<float, bf16, false>;
KERNEL(scale_f32, ScaleF32, ELEM_THREADS) { for_each_element<4>(p, p.elems, p.vector); }
KERNEL(scale_bf16, ScaleBf16, ELEM_THREADS) { for_each_element<8>(p, p.elems, p.vector); }
KERNEL(cast_f32_f32, CastF32, ELEM_THREADS) { for_each_element<4>(p, p.elems, p.vector); }
KERNEL(cast_bf16_bf16, CastBf16, ELEM_THREADS) { for_each_element<8>(p, p.elems, p.vector); }
KERNEL(cast_f32_bf16, Narrow, ELEM_THREADS) { for_each_element<8>(p, p.elems, p.vector); }
KERNEL(cast_bf16_f32, Widen, ELEM_THREADS) { for_each_element<8>(p, p.elems, p.vector); }

// Sets `elems` elements of sizeof(T) bytes to the low bits of `bits`, which the host repeats over 32 bits.
template <class T> struct Fill {
    Ptr<T> out;
    i64 elems;
    u32 bits;
    i32 vector;
    template <int N> DEVICE void run(i64 at) const {
        if constexpr (N == 1)
            out[at] = (T)bits;
        else
            store_raw16(out + at, Raw16{{bits, bits, bits, bits}});
    }
};

KERNEL(fill_u32, Fill<u32>, ELEM_THREADS) { for_each_element<4>(p, p.elems, p.vector); }
KERNEL(fill_u16, Fill<u16>, ELEM_THREADS) { for_each_element<8>(p, p.elems, p.vector); }
KERNEL(fill_u8, Fill<u8>, ELEM_THREADS) { for_each_element<16>(p, p.elems, p.vector); }

// count += elements with all exponent bits set. A sum of integers has no order, so it may be atomic. count starts as 0.
template <class T> struct CountNonfinite {
    Ptr<u32> count;
    Ptr<const T> in;
    i64 elems;
    i32 vector;
    i32 unused;
};

template <class T> DEVICE void count_nonfinite(const CountNonfinite<T>& p) {
    constexpr int N = VEC<T>;
    const i64 me = (i64)block_id_x() * ELEM_THREADS + thread_id(), stride = (i64)grid_x() * ELEM_THREADS;
    const i64 pieces = p.vector ? p.elems / N : 0;
    u32 bad = 0;
    for (i64 i = me; i < pieces; i += stride) {
        Piece<N> x;
        load_piece(x, p.in + i * N);
#pragma unroll
        for (int j = 0; j < N; j++) bad += (float_bits(x.v[j]) & 0x7f800000u) == 0x7f800000u;
    }
    for (i64 at = pieces * N + me; at < p.elems; at += stride) {
        T x = p.in[at];
        bad += (float_bits(to_float(x)) & 0x7f800000u) == 0x7f800000u;
    }
    bad = warp_sum_u32(bad);
    if (lane_id() == 0 && bad > 0) atomic_add(p.count, bad);
}

KERNEL(count_nonfinite_f32, CountNonfinite<float>, ELEM_THREADS) { count_nonfinite(p); }
KERNEL(count_nonfinite_bf16, CountNonfinite<bf16>, ELEM_THREADS) { count_nonfinite(p); }

// A count of u32 becomes an f32, in place.
struct CountToFloat {
    Ptr<u32> count;
};

KERNEL(count_to_float, CountToFloat, WARP) {
    if (thread_id() > 0) return;
    u32 n = p.count[0];
    p.count[0] = float_bits((float)n);
}

// out[0] = sum of x in the CPU's order: eight sums in f64 of every eighth element, added in order, rounded once. Losses of a
// micro-batch: few, so one block, whose other threads only bring elements to shared memory.
struct Sum {
    Ptr<float> out;
    Ptr<const float> in;
    i64 elems;
};

constexpr int SUM_LANES = 8;
constexpr int SUM_TILE = 2048;

KERNEL(sum_f32, Sum, ELEM_THREADS) {
    SHARED(float, tile, SUM_TILE);
    SHARED(double, sums, SUM_LANES);
    double s = 0.0;
    for (i64 first = 0; first < p.elems; first += SUM_TILE) {
        for (int i = thread_id(); i < SUM_TILE; i += ELEM_THREADS) tile[i] = first + i < p.elems ? (float)p.in[first + i] : 0.0f;
        barrier();
        const int n = (int)min_of<i64>(SUM_TILE, p.elems - first);
        if (thread_id() < SUM_LANES)
            for (int i = thread_id(); i < n; i += SUM_LANES) s += (double)(float)tile[i];
        barrier();
    }
    if (thread_id() < SUM_LANES) sums[thread_id()] = s;
    barrier();
    if (thread_id() > 0) return;
    double total = 0.0;
    for (int i = 0; i < SUM_LANES; i++) total += sums[i];
    p.out[0] = (float)total;
}
