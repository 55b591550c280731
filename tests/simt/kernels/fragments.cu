// A kernel for the test of compat.h's fragments: one warp multiplies small matrices in every way that the interface offers, so that
// loads, layouts, instructions and conversions between accumulators and operands are compared with plain loops.
#include "compat.h"

template <class T> struct Fragments {
    Ptr<float> out;    // [7][16][16]
    Ptr<const T> a;    // [16][LD] m by k
    Ptr<const T> b;    // [16][LD] n by k
    Ptr<const T> at;   // [LD][16] k by m
    Ptr<const T> bt;   // [LD][16] k by n
};

template <class T, int LD, int ROWS> DEVICE void stage(Tile<T, LD> tile, Ptr<const T> from) {
    constexpr int CHUNKS = LD / VEC<T>;
    for (int i = thread_id(); i < ROWS * CHUNKS; i += WARP) copy16_async(tile.ptr(i / CHUNKS, i % CHUNKS * VEC<T>), from + i * VEC<T>, true);
}

DEVICE void write(Ptr<float> out, int which, const Acc& acc) {
#pragma unroll
    for (int i = 0; i < ACC_ELEMS; i++) out[which * 256 + acc_row(i) * 16 + acc_col(i)] = acc.v[i];
}

// LD: 2 K or more columns along k.
template <class T, int LD> DEVICE void fragments(const Fragments<T>& p) {
    constexpr int K = Mma<T>::K;
    DYN_SHARED(memory);
    Tile<T, LD> a{shared_cast<T>(memory, 0)};
    Tile<T, LD> b{shared_cast<T>(memory, a.bytes(16))};
    Tile<T, 16> at{shared_cast<T>(memory, 2 * a.bytes(16))};
    Tile<T, 16> bt{shared_cast<T>(memory, 2 * a.bytes(16) + at.bytes(LD))};
    Shared<float> scratch = shared_cast<float>(memory, 2 * a.bytes(16) + 2 * at.bytes(LD));
    stage<T, LD, 16>(a, p.a);
    stage<T, LD, 16>(b, p.b);
    stage<T, 16, LD>(at, p.at);
    stage<T, 16, LD>(bt, p.bt);
    copy_commit();
    copy_wait<0>();
    barrier();
    Acc straight, left, right, pairs;
    clear(straight), clear(left), clear(right), clear(pairs);
    for (int k = 0; k < LD; k += K) {
        typename Mma<T>::A fa;
        typename Mma<T>::B fb;
        load_a(fa, a, 0, k);
        load_b(fb, b, 0, k);
        mma(straight, fa, fb);
        load_a_t(fa, at, 0, k);
        mma(left, fa, fb);
        load_b_t(fb, bt, 0, k);
        mma(right, fa, fb);
    }
    for (int k = 0; k < LD; k += 2 * K) {
        typename Mma<T>::A a0, a1;
        typename Mma<T>::B b0, b1;
        load_a(a0, a, 0, k);
        load_a(a1, a, 0, k + K);
        load_b(b0, b, 0, k);
        load_b_t(b1, bt, 0, k + K);
        mma2(pairs, a0, a1, b0, b1);
    }
    write(p.out, 0, straight);
    write(p.out, 1, left);
    write(p.out, 2, right);
    write(p.out, 3, pairs);
    // The product as the operand of another: with the first 16 of k as columns or rows.
    typename Mma<T>::A pa[16 / K];
    typename Mma<T>::B pb[16 / K];
    a_from_acc(pa, straight, scratch);
    b_from_acc(pb, straight, scratch);
    Acc as_a, as_b, rows;
    clear(as_a), clear(as_b);
    for (int k = 0; k < 16 / K; k++) {
        typename Mma<T>::A fa;
        typename Mma<T>::B fb;
        load_b(fb, b, 0, k * K);
        mma(as_a, pa[k], fb);
        load_a(fa, a, 0, k * K);
        mma(as_b, fa, pb[k]);
    }
    write(p.out, 4, as_a);
    write(p.out, 5, as_b);
    // Row sums in the even columns, row maxima in the odd ones.
    float sum[ACC_ROWS], most[ACC_ROWS];
    for (int s = 0; s < ACC_ROWS; s++) sum[s] = 0.0f, most[s] = -1e30f;
    for (int i = 0; i < ACC_ELEMS; i++) {
        sum[acc_slot(i)] += straight.v[i];
        most[acc_slot(i)] = max_f(most[acc_slot(i)], straight.v[i]);
    }
    for (int s = 0; s < ACC_ROWS; s++) sum[s] = row_sum(sum[s]), most[s] = row_max(most[s]);
    for (int i = 0; i < ACC_ELEMS; i++) rows.v[i] = acc_col(i) % 2 ? most[acc_slot(i)] : sum[acc_slot(i)];
    write(p.out, 6, rows);
}

// Loads alone, for counting conflicts.
template <int LD> DEVICE void loads(const Fragments<bf16>& p) {
    DYN_SHARED(memory);
    Tile<bf16, LD> a{shared_cast<bf16>(memory, 0)};
    stage<bf16, LD, 16>(a, p.a);
    copy_commit();
    copy_wait<0>();
    barrier();
    Acc acc;
    clear(acc);
    for (int k = 0; k < LD / 16 * 16; k += 16) {
        Mma<bf16>::A fa;
        Mma<bf16>::B fb;
        load_a(fa, a, 0, k);
        load_b(fb, a, 0, k);
        mma(acc, fa, fb);
    }
    write(p.out, 0, acc);
}

KERNEL(fragments_f32_64, Fragments<float>, WARP) { fragments<float, 64>(p); }
KERNEL(fragments_bf16_64, Fragments<bf16>, WARP) { fragments<bf16, 64>(p); }
KERNEL(fragments_f32_24, Fragments<float>, WARP) { fragments<float, 24>(p); }
KERNEL(fragments_bf16_96, Fragments<bf16>, WARP) { fragments<bf16, 96>(p); }
KERNEL(loads_16, Fragments<bf16>, WARP) { loads<16>(p); }
KERNEL(loads_32, Fragments<bf16>, WARP) { loads<32>(p); }
KERNEL(loads_40, Fragments<bf16>, WARP) { loads<40>(p); }
KERNEL(loads_64, Fragments<bf16>, WARP) { loads<64>(p); }
KERNEL(loads_96, Fragments<bf16>, WARP) { loads<96>(p); }
KERNEL(loads_128, Fragments<bf16>, WARP) { loads<128>(p); }
KERNEL(loads_256, Fragments<bf16>, WARP) { loads<256>(p); }
