// Softmax and cross entropy over rows of logits l [rows, V] f32, in a chunk of tokens between two products (gemm.cu):
//   loss = log(sum exp(l - max)) + max - l[label],   dl = grad_scale (softmax(l) - onehot(label)),   both 0 where label < 0.
//
// Memory: 4 V bytes a row are read, again for dl (from L2 while a chunk fits there), and V elements of dl written: bf16 for the
// products of bf16, or f32 over the logits. Limited by memory; a row's exponentials are made twice, which is hidden behind it.
//
// Shape: a block a row, since rows are long (32 k to 256 k) and chunks have hundreds. Each thread keeps its own largest logit and
// scales its sum when it grows, so that one pass gives both; threads are then combined in a fixed order.
#include "compat.h"

constexpr int CE_THREADS = 512;

template <class T> struct CrossEntropy {
    Ptr<u64> fault;
    Ptr<float> loss;         // [rows]
    Ptr<const i32> labels;   // [rows]
    Ptr<float> logits;       // [rows, ld], ld a multiple of 8
    Ptr<T> dlogits;          // [rows, ld], null: not wanted; may be the logits. Columns from V on become 0
    i64 first;               // number of the first row in the batch
    i32 vocab;
    i32 ld;
    float grad_scale;
    i32 unused;
};

DEVICE float log_f(float x) {
    float y = log2_fast(x) * 0.693147182f;
    // One step of Newton: the fast logarithm is only good to 2^-22.
    return y + (x * exp_f(-y) - 1.0f);
}

template <class T> DEVICE void cross_entropy(const CrossEntropy<T>& p) {
    SHARED(float, part, 2 * CE_THREADS / WARP);
    const i64 row = block_id_x();
    Ptr<float> l = p.logits + row * p.ld;
    const i32 label = p.labels[row];
    const bool out_of_range = label >= p.vocab, trained = label >= 0 && !out_of_range;
    if (out_of_range && thread_id() == 0) report_fault(p.fault, (u64)(p.first + row), label);
    if (!trained) {
        if (thread_id() == 0) p.loss[row] = 0.0f;
        if (!p.dlogits) return;
        for (i32 i = thread_id() * VEC<T>; i < p.ld; i += CE_THREADS * VEC<T>) store_raw16(p.dlogits + (row * p.ld + i), Raw16{{0, 0, 0, 0}});
        return;
    }
    float most = -3.0e38f, sum = 0.0f;
    for (i32 i = thread_id() * 4; i < p.vocab; i += CE_THREADS * 4) {
        float v[4];
        unpack16(v, load_raw16(l + i));
        float top = v[0];
#pragma unroll
        for (int j = 1; j < 4; j++)
            if (i + j < p.vocab) top = max_f(top, v[j]);
        if (top > most) {
            sum *= exp_f(most - top);
            most = top;
        }
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (i + j < p.vocab) sum += exp_f(v[j] - most);
    }
    float top = most;
#pragma unroll
    for (int mask = WARP / 2; mask > 0; mask /= 2) top = max_f(top, shuffle_xor(top, mask));
    const float warp_total = warp_sum(sum * exp_f(most - top));
    if (lane_id() == 0) {
        part[2 * warp_id()] = top;
        part[2 * warp_id() + 1] = warp_total;
    }
    barrier();
    top = part[0];
#pragma unroll
    for (int w = 1; w < CE_THREADS / WARP; w++) top = max_f(top, part[2 * w]);
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < CE_THREADS / WARP; w++) total += part[2 * w + 1] * exp_f(part[2 * w] - top);
    const float chosen = l[label];
    if (thread_id() == 0) p.loss[row] = log_f(total) + (top - chosen);
    if (!p.dlogits) return;
    // The chosen logit has been read before another thread's gradient may replace it.
    barrier();
    const float factor = div_rn(p.grad_scale, total);
    for (i32 i = thread_id() * 8; i < p.ld; i += CE_THREADS * 8) {
        float g[8];
#pragma unroll
        for (int j = 0; j < 8; j += 4) {
            Raw16 raw = load_raw16(l + (i + j));
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float v = exp_f(bits_float(raw.w[e]) - top) * factor;
                if (i + j + e == label) v -= p.grad_scale;
                g[j + e] = i + j + e < p.vocab ? v : 0.0f;
            }
        }
#pragma unroll
        for (int j = 0; j < 8; j += VEC<T>) {
            float piece[VEC<T>];
#pragma unroll
            for (int e = 0; e < VEC<T>; e++) piece[e] = g[j + e];
            store_raw16(p.dlogits + (row * p.ld + i + j), pack16(piece));
        }
    }
}

KERNEL(cross_entropy_f32, CrossEntropy<float>, CE_THREADS) { cross_entropy(p); }
KERNEL(cross_entropy_bf16, CrossEntropy<bf16>, CE_THREADS) { cross_entropy(p); }
