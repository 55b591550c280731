// SwiGLU (Shazeer 2020): h = silu(gate) up, silu(g) = g sigmoid(g), and its backward with s = sigmoid(gate):
//   dgate = dh up s (1 + gate (1 - s)),   dup = dh gate s.
//
// Memory: forward 3, backward 5 elements moved for each element; the sigmoid is computed again instead of stored. Limited by memory:
// one exponential and one division an element. Each piece is read whole before it is written, so outputs may be inputs.
#include "elementwise.cuh"

DEVICE float sigmoid(float x) { return div_rn(1.0f, 1.0f + exp_f(-x)); }

template <class T> struct SwiGlu {
    Ptr<T> h;
    Ptr<const T> gate;
    Ptr<const T> up;
    i64 elems;
    i32 vector;
    i32 unused;
    template <int N> DEVICE void run(i64 at) const {
        Piece<N> g, u;
        load_piece(g, gate + at);
        load_piece(u, up + at);
#pragma unroll
        for (int i = 0; i < N; i++) g.v[i] = g.v[i] * sigmoid(g.v[i]) * u.v[i];
        store_piece(h + at, g);
    }
};

template <class T> struct SwiGluBackward {
    Ptr<T> dgate;
    Ptr<T> dup;
    Ptr<const T> dh;
    Ptr<const T> gate;
    Ptr<const T> up;
    i64 elems;
    i32 vector;
    i32 unused;
    template <int N> DEVICE void run(i64 at) const {
        Piece<N> d, g, u;
        load_piece(d, dh + at);
        load_piece(g, gate + at);
        load_piece(u, up + at);
#pragma unroll
        for (int i = 0; i < N; i++) {
            const float s = sigmoid(g.v[i]), slope = s * (1.0f + g.v[i] * (1.0f - s));
            const float dg = d.v[i] * u.v[i] * slope;
            u.v[i] = d.v[i] * (g.v[i] * s);
            g.v[i] = dg;
        }
        store_piece(dgate + at, g);
        store_piece(dup + at, u);
    }
};

KERNEL(swiglu_f32, SwiGlu<float>, ELEM_THREADS) { for_each_element<4>(p, p.elems, p.vector); }
KERNEL(swiglu_bf16, SwiGlu<bf16>, ELEM_THREADS) { for_each_element<8>(p, p.elems, p.vector); }
KERNEL(swiglu_backward_f32, SwiGluBackward<float>, ELEM_THREADS) { for_each_element<4>(p, p.elems, p.vector); }
KERNEL(swiglu_backward_bf16, SwiGluBackward<bf16>, ELEM_THREADS) { for_each_element<8>(p, p.elems, p.vector); }
