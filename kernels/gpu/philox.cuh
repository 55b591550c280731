// Which elements does dropout keep? The bits of the CPU (kernels/src/cpu/dropout.rs): element e = row I + column of adapter `site`'s
// input uses word e % 4 of philox4x32([e / 4 low, e / 4 high, site, micro_batch], key) (Salmon et al. 2011), and is kept iff the word's
// upper 24 bits are at least `least`. Masks are bits, of 8 neighbouring elements; what is kept is scaled once, in f32, at the end.
#ifndef ZRT_PHILOX_CUH
#define ZRT_PHILOX_CUH

#include "compat.h"

struct Dropout {
    u32 key[2];       // of the step, computed on the host
    u32 micro_batch;
    u32 least;        // 0: nothing is dropped
    float keep;       // 1 / (1 - p)
    u32 unused;
};

struct Words {
    u32 w[4];
};

DEVICE Words philox4x32(u64 group, u32 site, u32 micro_batch, u32 key0, u32 key1) {
    u32 c0 = (u32)group, c1 = (u32)(group >> 32), c2 = site, c3 = micro_batch;
#pragma unroll
    for (int i = 0; i < 10; i++) {
        const u64 p0 = (u64)c0 * 0xD2511F53u, p1 = (u64)c2 * 0xCD9E8D57u;
        c0 = (u32)(p1 >> 32) ^ c1 ^ key0;
        c1 = (u32)p1;
        c2 = (u32)(p0 >> 32) ^ c3 ^ key1;
        c3 = (u32)p0;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return Words{{c0, c1, c2, c3}};
}

// The same, with a key that a compiler cannot know to be that of all lanes: else AMD's keeps its twenty round keys in scalar registers,
// of which there are not enough. All lanes of a warp must call it.
DEVICE Dropout per_lane(Dropout d) {
    d.key[0] = shuffle_bits(d.key[0], lane_id());
    d.key[1] = shuffle_bits(d.key[1], lane_id());
    return d;
}

// Bit i < N: element e + i is kept. N is 4 or 8.
template <int N> DEVICE u32 kept(u64 e, u32 site, const Dropout& d) {
    u32 bits = 0;
    const int skip = (int)(e & 3);
#pragma unroll
    for (int g = 0; g <= N / 4; g++) {
        if (g == N / 4 && skip == 0) break;
        Words w = philox4x32((e >> 2) + (u64)g, site, d.micro_batch, d.key[0], d.key[1]);
#pragma unroll
        for (int i = 0; i < 4; i++) bits |= (u32)(w.w[i] >> 8 >= d.least) << (4 * g + i);
    }
    return bits >> skip & ((1u << N) - 1u);
}

// A chunk of 8 bf16 (4 f32) with what is dropped replaced by zero; `bits` of its first elements.
template <class T> DEVICE Raw16 masked(Raw16 v, u32 bits);
template <> DEVICE Raw16 masked<bf16>(Raw16 v, u32 bits) {
#pragma unroll
    for (int i = 0; i < 4; i++) v.w[i] &= (bits >> (2 * i) & 1u ? 0xffffu : 0u) | (bits >> (2 * i + 1) & 1u ? 0xffff0000u : 0u);
    return v;
}
template <> DEVICE Raw16 masked<float>(Raw16 v, u32 bits) {
#pragma unroll
    for (int i = 0; i < 4; i++) v.w[i] = bits >> i & 1u ? v.w[i] : 0u;
    return v;
}

#endif
