// What do the passes of LoRA share? How warps and stages are counted, and a slice: some ranks of one of the adapters that a launch has.
#ifndef ZRT_LORA_CUH
#define ZRT_LORA_CUH

#define ADDRESS_BY_ELEMENT
#include "philox.cuh"
#include "split.cuh"

constexpr int LORA_THREADS = 256;
constexpr int WARPS = LORA_THREADS / WARP;
// Wide tiles in shared memory: under way by asynchronous copy, or one in registers.
constexpr int WIDE_STAGES = COPY_ENGINE ? 4 : 2;
constexpr int MAX_SLICES = 4;
// 16 ranks make a tile; SMALL kernels take that many tiles of all adapters together, LARGE ones more.
constexpr int SMALL_TILES = 4, LARGE_TILES = 12;

// Some ranks of an adapter (all, unless there are more than a kernel takes).
template <class T> struct Slice {
    Ptr<float> skinny;         // [N, ld]
    Ptr<const float> adapter;  // A [rank, W], or for `up` B [W, ld]
    Ptr<float> grad;           // of the adapter, or partial sums of it
    Ptr<T> y;                  // null where y is f32 and T is not
    Ptr<float> y_f32;          // else this
    i64 grad_part;             // elements between partial sums of two groups
    i32 rank;
    i32 ld;
    i32 first;        // rank tile, or block of columns, that it begins with
    i32 width;        // W
    i32 vector;       // rows of the adapter begin at multiples of 16 bytes
    i32 vector_t;     // rows of skinny do
    i32 vector_wide;  // rows of y do
    u32 site;
    float scale;
    i32 add;  // the gradient is added to
};

// The slice that rank tile (or block of columns) `i` is in.
template <class P> DEVICE int slice_of(const P& p, int i) {
    int s = 0;
    while (s + 1 < p.slices && p.slice[s + 1].first <= i) s++;
    return s;
}
template <class P> DEVICE int slice_end(const P& p, int s) { return s + 1 < p.slices ? p.slice[s + 1].first : p.tiles; }

#endif
