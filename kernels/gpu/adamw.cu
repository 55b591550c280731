// AdamW (Loshchilov & Hutter 2019): the sequence of correctly rounded operations that `Ops::adamw` documents, none of them
// contracted, so that the host's optimizer and the device's give the same bits.
//
// Memory, per weight: reads g, p, m, v and writes p, m, v (28 bytes), and 2 or 4 for the copy in the storage type. Limited by memory:
// two divisions and a square root each are far below it. A scale that is NaN (a step that is skipped) writes the copy alone.
#include "elementwise.cuh"

template <class C> struct AdamW {
    Ptr<float> param;
    Ptr<float> m;
    Ptr<float> v;
    Ptr<C> copy_out;  // null: not wanted
    Ptr<const float> g;
    Ptr<const float> scale;
    i64 elems;
    i32 vector;
    float lr, decay, beta1, rest1, beta2, rest2, step, root2, eps;
    template <int N> DEVICE void run(i64 at) const {
        const float factor = scale[0];
        Piece<N> pp;
        load_floats(pp, param + at);
        if (factor == factor) {
            Piece<N> pm, pv, pg;
            load_floats(pm, m + at);
            load_floats(pv, v + at);
            load_floats(pg, g + at);
#pragma unroll
            for (int i = 0; i < N; i++) {
                // Adding 0 turns -0 into 0, so that the sign of an absent gradient shows nowhere.
                const float gi = add_rn(mul_rn(pg.v[i], factor), 0.0f);
                const float w = sub_rn(pp.v[i], mul_rn(mul_rn(pp.v[i], lr), decay));
                pm.v[i] = add_rn(mul_rn(beta1, pm.v[i]), mul_rn(rest1, gi));
                pv.v[i] = add_rn(mul_rn(beta2, pv.v[i]), mul_rn(rest2, mul_rn(gi, gi)));
                const float denominator = add_rn(div_rn(sqrt_rn(pv.v[i]), root2), eps);
                pp.v[i] = sub_rn(w, div_rn(mul_rn(step, pm.v[i]), denominator));
            }
            store_floats(param + at, pp);
            store_floats(m + at, pm);
            store_floats(v + at, pv);
        }
        if (copy_out) store_any(copy_out + at, pp);
    }
};

KERNEL(adamw_f32, AdamW<float>, ELEM_THREADS) { for_each_element<4>(p, p.elems, p.vector); }
KERNEL(adamw_bf16, AdamW<bf16>, ELEM_THREADS) { for_each_element<4>(p, p.elems, p.vector); }
