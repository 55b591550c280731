// The gradient norm with the same bits however a segment was sharded: sums of squares along one binary tree whose leaves are chunks
// of 1,024 elements, and from the nodes of all ranks the norm and the clipping factor. The order of additions is that of the CPU
// (kernels/src/cpu/norm_tree.rs says why); none is contracted with the product before it.
//
// Memory: 4 bytes an element, read once, by one warp a chunk; the tree above the chunks is 8 bytes a chunk and one block's work.
#include "compat.h"

constexpr int CHUNK_ELEMS = 1024;
constexpr int SQUARE_THREADS = 256;
constexpr int LEVELS = 48;
constexpr int NODES = 2 * LEVELS;

struct ChunkSums {
    Ptr<float> sums;  // [chunks]
    Ptr<const float> x;
    i64 elems;
    i64 chunks;
};

// Halves are added to halves: first within a lane, which holds every WARP-th element, then between lanes.
KERNEL(chunk_sums_f32, ChunkSums, SQUARE_THREADS) {
    constexpr int HELD = CHUNK_ELEMS / WARP;
    const i64 chunk = (i64)block_id_x() * (SQUARE_THREADS / WARP) + warp_id();
    if (chunk >= p.chunks) return;
    const i64 first = chunk * CHUNK_ELEMS;
    float s[HELD];
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        const i64 i = first + k * WARP + lane_id();
        const float x = i < p.elems ? (float)p.x[i] : 0.0f;
        s[k] = mul_rn(x, x);
    }
#pragma unroll
    for (int level = 1; level < HELD; level *= 2)
#pragma unroll
        for (int k = 0; k < HELD; k++)
            if (k < HELD / 2 / level) s[k] = add_rn(s[k], s[k + HELD / 2 / level]);
    float v = s[0];
#pragma unroll
    for (int mask = WARP / 2; mask > 0; mask /= 2) v = add_rn(v, shuffle_xor(v, mask));
    if (lane_id() == 0) p.sums[chunk] = v;
}

struct ChunkTree {
    Ptr<float> nodes;  // [96]
    Ptr<float> sums;   // [chunks]
    Ptr<float> other;  // [chunks] as much again, for every second level
    i64 first;
    i64 chunks;
};

// At each level the range sheds its odd ends, which are the maximal nodes, and the rest pairs up. One block.
KERNEL(chunk_tree_f32, ChunkTree, SQUARE_THREADS) {
    for (int i = thread_id(); i < NODES; i += SQUARE_THREADS) p.nodes[i] = 0.0f;
    barrier();
    Ptr<float> from = p.sums, to = p.other;
    i64 lo = p.first, hi = p.first + p.chunks;
    for (int level = 0; level < LEVELS && lo < hi; level++) {
        const i64 start = lo % 2, last = hi - 1 - lo;
        if (thread_id() == 0) {
            if (lo % 2 == 1) p.nodes[2 * level] = from[0];
            if (hi % 2 == 1) p.nodes[2 * level + 1] = from[last];
        }
        lo = (lo + 1) / 2;
        hi = hi / 2;
        for (i64 i = thread_id(); i < hi - lo; i += SQUARE_THREADS) to[i] = add_rn(from[start + 2 * i], from[start + 2 * i + 1]);
        barrier();
        Ptr<float> swap = from;
        from = to;
        to = swap;
    }
}

// Chunks of one rank in one segment.
struct Held {
    u64 first, chunks, rank;
};

struct ClipScale {
    Ptr<const u64> held;  // [segments, ranks] of Held, of each segment by first chunk
    Ptr<float> norm;      // [1]
    Ptr<float> scale;     // [1]
    Ptr<const float> nodes;  // [ranks, segments, 96]
    i32 ranks;
    i32 segments;
    i32 clip;
    float max_norm;
};

constexpr int CLIP_THREADS = 64;

// A path from a leaf to the root, along which nodes are added that come from left to right.
struct Spine {
    Shared<float> left;  // [LEVELS, CLIP_THREADS] value of a left child that waits for its sibling
    u64 waits;           // bit per level
    u64 index;           // the newest node
    int level;
    float value;
    bool some;
};

// Goes up while the parent does not hold chunk `next`, and leaves the value where it does.
DEVICE void climb(Spine& s, u64 next, bool end) {
    while (s.level < LEVELS - 1) {
        if (!end && s.index >> 1 == next >> (s.level + 1)) {
            s.left[s.level * CLIP_THREADS] = s.value;
            s.waits |= 1ull << s.level;
            return;
        }
        if ((s.index & 1) && (s.waits >> s.level & 1)) {
            s.value = add_rn(s.left[s.level * CLIP_THREADS], s.value);
            s.waits &= ~(1ull << s.level);
        }
        s.index >>= 1;
        s.level++;
    }
}

DEVICE void add_node(Spine& s, u64 index, int level, float value) {
    if (s.some) climb(s, index << level, false);
    s.some = true;
    s.index = index;
    s.level = level;
    s.value = value;
}

// One thread a segment; the segments' sums are then added in order.
KERNEL(clip_scale_f32, ClipScale, CLIP_THREADS) {
    SHARED(float, sums, CLIP_THREADS);
    SHARED(float, left, LEVELS * CLIP_THREADS);
    float total = 0.0f;
    for (int base = 0; base < p.segments; base += CLIP_THREADS) {
        const int segment = base + thread_id();
        if (segment < p.segments) {
            Spine s;
            s.left = left + thread_id();
            s.waits = 0;
            s.some = false;
            s.value = 0.0f;
            s.level = 0;
            s.index = 0;
            for (int r = 0; r < p.ranks; r++) {
                Ptr<const u64> held = p.held + ((i64)segment * p.ranks + r) * 3;
                const u64 first = held[0], chunks = held[1], rank = held[2];
                if (chunks == 0) continue;
                Ptr<const float> slots = p.nodes + (i64)(rank * p.segments + segment) * NODES;
                const u64 end = first + chunks;
                // Nodes at the left end grow to the right, those at the right end shrink again.
                for (int level = 0; level < LEVELS; level++) {
                    const u64 lo = (first + (1ull << level) - 1) >> level, hi = end >> level;
                    if (lo < hi && lo % 2 == 1) add_node(s, lo, level, slots[2 * level]);
                }
                for (int level = LEVELS - 1; level >= 0; level--) {
                    const u64 lo = (first + (1ull << level) - 1) >> level, hi = end >> level;
                    if (lo < hi && hi % 2 == 1) add_node(s, hi - 1, level, slots[2 * level + 1]);
                }
            }
            if (s.some) climb(s, 0, true);
            sums[thread_id()] = s.value;
        }
        barrier();
        if (thread_id() == 0)
            for (int i = 0; i < CLIP_THREADS && base + i < p.segments; i++) total = add_rn(total, sums[i]);
        barrier();
    }
    if (thread_id() > 0) return;
    const float norm = sqrt_rn(total);
    // What torch.nn.utils.clip_grad_norm_ adds before dividing.
    float scale = 1.0f;
    if (p.clip) scale = min_f(div_rn(p.max_norm, add_rn(norm, 1e-6f)), 1.0f);
    if ((float_bits(norm) & 0x7f800000u) == 0x7f800000u) scale = bits_float(0x7fc00000u);
    p.norm[0] = norm;
    p.scale[0] = scale;
}
