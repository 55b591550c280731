// Which words does a kernel use for the machine below it? This header is the only file that knows a vendor, or that the
// kernel may be running on the host under the emulator (GPU_EMU): everything else is written once, for 32 and for 64 lanes.
//
// * Memory: `Ptr<T>` points into device memory, `Shared<T>` into a block's shared memory. On a GPU both are plain pointers;
//   in the emulator they check bounds and races, and count. 16-byte accesses need 16-byte alignment.
// * Threads: blocks have one dimension and are whole warps, WARP lanes each. All lanes of a warp must reach a shuffle or a
//   matrix instruction together, all threads of a block a `barrier()`.
// * Numbers: sums are f32; bf16 is rounded to nearest even with the bits of the CPU; `*_rn` are single, correctly rounded
//   operations that no compiler may contract, for operations whose bits must equal the CPU's.
// * Matrix instructions: fragments of 16 x 16 results (section 3), one interface for mma.sync, MFMA and plain FMA.
#ifndef ZRT_COMPAT_H
#define ZRT_COMPAT_H

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

// Storage of 16 bits: the upper half of an f32.
struct bf16 {
    u16 bits;
};

// ---- 1. The machine -------------------------------------------------------------------------------------------------
// Each branch defines: DEVICE, KERNEL, WARP, thread_id, block_id_x/y/z, grid_x, barrier, warp_sync, uniform, shuffle, Ptr, Shared,
// SHARED, DYN_SHARED, shared_cast, Raw16 loads and stores, asynchronous copies, exp2_fast, log2_fast, *_rn, integer atomics
// (whose results have no order), and the matrix instructions of its lane count.

struct alignas(16) Raw16 {
    u32 w[4];
};
struct alignas(8) Raw8 {
    u32 w[2];
};

#if defined(GPU_EMU)

#include "emu.h"

#elif defined(__CUDACC__)

#define DEVICE __device__ __forceinline__
// `threads` bounds the block; params are read from constant memory where they are used.
#define KERNEL(name, Params, threads) extern "C" __global__ void __launch_bounds__(threads) name(const __grid_constant__ Params p)
// As KERNEL, with as many blocks of it resident on one compute unit as `blocks`.
#define KERNEL_OCC(name, Params, threads, blocks) \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name(const __grid_constant__ Params p)

constexpr int WARP = 32;
#define ZRT_MMA_SYNC 1
DEVICE int thread_id() { return (int)threadIdx.x; }
DEVICE int block_threads() { return (int)blockDim.x; }
DEVICE int block_id_x() { return (int)blockIdx.x; }
DEVICE int block_id_y() { return (int)blockIdx.y; }
DEVICE int block_id_z() { return (int)blockIdx.z; }
DEVICE int grid_x() { return (int)gridDim.x; }
DEVICE int grid_y() { return (int)gridDim.y; }

DEVICE void barrier() { __syncthreads(); }
DEVICE void warp_sync() { __syncwarp(); }
// A number that is the same in all lanes of a warp, known to be.
DEVICE int uniform(int v) { return v; }
DEVICE u32 shuffle_bits(u32 v, int from) { return __shfl_sync(0xffffffffu, v, from, 32); }
DEVICE u32 shuffle_xor_bits(u32 v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask, 32); }

template <class T> using Ptr = T*;
template <class T> using Shared = T*;
#define SHARED(T, name, elems)      \
    __shared__ __attribute__((aligned(16))) T name##_memory[elems]; \
    Shared<T> name = name##_memory
#define DYN_SHARED(name)                        \
    extern __shared__ uint4 zrt_dynamic_shared[]; \
    Shared<u8> name = (u8*)zrt_dynamic_shared
template <class T> DEVICE Shared<T> shared_cast(Shared<u8> base, int bytes) { return (T*)(base + bytes); }

template <class T> DEVICE Raw16 load_raw16(const T* p) {
    uint4 v = *(const uint4*)p;
    return Raw16{{v.x, v.y, v.z, v.w}};
}
template <class T> DEVICE void store_raw16(T* p, Raw16 v) { *(uint4*)p = make_uint4(v.w[0], v.w[1], v.w[2], v.w[3]); }
template <class T> DEVICE Raw8 load_raw8(const T* p) {
    uint2 v = *(const uint2*)p;
    return Raw8{{v.x, v.y}};
}
template <class T> DEVICE void store_raw8(T* p, Raw8 v) { *(uint2*)p = make_uint2(v.w[0], v.w[1]); }

// 16 bytes from device to shared memory; zeros where `valid` is false, and `from` is then not read.
template <class T, class U> DEVICE void copy16_async(T* to, const U* from, bool valid) {
    u32 bytes = valid ? 16 : 0, at = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes) : "memory");
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }

DEVICE u32 float_bits(float x) { return __float_as_uint(x); }
DEVICE float bits_float(u32 x) { return __uint_as_float(x); }
DEVICE float exp2_fast(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
DEVICE float log2_fast(float x) {
    float r;
    asm("lg2.approx.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
DEVICE float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE float mul_rn(float a, float b) { return __fmul_rn(a, b); }
DEVICE float add_rn(float a, float b) { return __fadd_rn(a, b); }
DEVICE float sub_rn(float a, float b) { return __fsub_rn(a, b); }
DEVICE float div_rn(float a, float b) { return __fdiv_rn(a, b); }
DEVICE float sqrt_rn(float a) { return __fsqrt_rn(a); }
DEVICE void atomic_min(u64* p, u64 v) { atomicMin(p, v); }
DEVICE void atomic_add(u32* p, u32 v) { atomicAdd(p, v); }
// Two f32 as two bf16, `lo` in the low half, for fragments: one instruction, all NaN become one NaN.
DEVICE u32 pack_bf16x2(float lo, float hi) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}

// PTX mma.m16n8k16: d[4] += a[4] (16 x 16, row-major) b[2] (16 x 8, column-major).
DEVICE void mma_m16n8k16(float* d, const u32* a, const u32* b) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// PTX ldmatrix.x4: lane i names row i % 8 (16 bytes) of matrix i / 8; r[m] receives this lane's pair of matrix m.
DEVICE void ldmatrix_x4(u32* r, const bf16* row) {
    u32 at = (u32)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}
DEVICE void ldmatrix_x4_trans(u32* r, const bf16* row) {
    u32 at = (u32)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

#elif defined(__HIP__) || defined(__HIPCC__) || defined(__HIPCC_RTC__)

#if !defined(__HIPCC_RTC__) && !defined(HIP_INCLUDE_HIP_HIP_RUNTIME_H)
// Plain clang without the HIP headers knows no attributes.
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
#endif
#define DEVICE __device__ inline __attribute__((always_inline))
#define KERNEL(name, Params, threads) \
    extern "C" __global__ void __attribute__((amdgpu_flat_work_group_size(1, threads))) name(const Params p)
#define KERNEL_OCC(name, Params, threads, blocks)                                                                     \
    extern "C" __global__ void __attribute__((amdgpu_flat_work_group_size(1, threads), amdgpu_waves_per_eu((blocks) * (threads) / 256))) name( \
        const Params p)

constexpr int WARP = 64;
#define ZRT_MFMA 1
DEVICE int thread_id() { return (int)__builtin_amdgcn_workitem_id_x(); }
DEVICE int block_threads() { return (int)__builtin_amdgcn_workgroup_size_x(); }
DEVICE int block_id_x() { return (int)__builtin_amdgcn_workgroup_id_x(); }
DEVICE int block_id_y() { return (int)__builtin_amdgcn_workgroup_id_y(); }
DEVICE int block_id_z() { return (int)__builtin_amdgcn_workgroup_id_z(); }
DEVICE int grid_x() { return (int)(__builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x()); }
DEVICE int grid_y() { return (int)(__builtin_amdgcn_grid_size_y() / __builtin_amdgcn_workgroup_size_y()); }

DEVICE void barrier() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
// Lanes run in lockstep and shared memory is in order within a wave; only the compiler must be held.
DEVICE void warp_sync() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}
DEVICE int uniform(int v) { return __builtin_amdgcn_readfirstlane(v); }
DEVICE u32 shuffle_bits(u32 v, int from) { return (u32)__builtin_amdgcn_ds_bpermute(from << 2, (int)v); }
DEVICE u32 shuffle_xor_bits(u32 v, int mask) {
    int lane = (int)__builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u));
    return (u32)__builtin_amdgcn_ds_bpermute((lane ^ mask) << 2, (int)v);
}

template <class T> using Ptr = T*;
template <class T> using Shared = T*;
#define SHARED(T, name, elems)                     \
    __shared__ __attribute__((aligned(16))) T name##_memory[elems]; \
    Shared<T> name = name##_memory
#define DYN_SHARED(name)                           \
    extern __shared__ Raw16 zrt_dynamic_shared[]; \
    Shared<u8> name = (u8*)zrt_dynamic_shared
template <class T> DEVICE Shared<T> shared_cast(Shared<u8> base, int bytes) { return (T*)(base + bytes); }

typedef u32 zrt_u32x4 __attribute__((ext_vector_type(4)));
typedef u32 zrt_u32x2 __attribute__((ext_vector_type(2)));
template <class T> DEVICE Raw16 load_raw16(const T* p) {
    zrt_u32x4 v = *(const zrt_u32x4*)p;
    return Raw16{{v.x, v.y, v.z, v.w}};
}
template <class T> DEVICE void store_raw16(T* p, Raw16 v) { *(zrt_u32x4*)p = zrt_u32x4{v.w[0], v.w[1], v.w[2], v.w[3]}; }
template <class T> DEVICE Raw8 load_raw8(const T* p) {
    zrt_u32x2 v = *(const zrt_u32x2*)p;
    return Raw8{{v.x, v.y}};
}
template <class T> DEVICE void store_raw8(T* p, Raw8 v) { *(zrt_u32x2*)p = zrt_u32x2{v.w[0], v.w[1]}; }

// No copy engine here: the store happens at once, and the wait is the barrier that the kernel needs anyway.
template <class T, class U> DEVICE void copy16_async(T* to, const U* from, bool valid) {
    store_raw16(to, valid ? load_raw16(from) : Raw16{{0, 0, 0, 0}});
}
DEVICE void copy_commit() {}
template <int LEFT> DEVICE void copy_wait() {}

DEVICE u32 float_bits(float x) { return __builtin_bit_cast(u32, x); }
DEVICE float bits_float(u32 x) { return __builtin_bit_cast(float, x); }
DEVICE float exp2_fast(float x) { return __builtin_amdgcn_exp2f(x); }
DEVICE float log2_fast(float x) { return __builtin_amdgcn_logf(x); }
DEVICE float fma_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
DEVICE float mul_rn(float a, float b) {
#pragma clang fp contract(off)
    return a * b;
}
DEVICE float add_rn(float a, float b) {
#pragma clang fp contract(off)
    return a + b;
}
DEVICE float sub_rn(float a, float b) {
#pragma clang fp contract(off)
    return a - b;
}
DEVICE float div_rn(float a, float b) { return a / b; }
DEVICE float sqrt_rn(float a) { return __builtin_sqrtf(a); }
DEVICE void atomic_min(u64* p, u64 v) { __hip_atomic_fetch_min(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT); }
DEVICE void atomic_add(u32* p, u32 v) { __hip_atomic_fetch_add(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT); }
#if defined(__gfx950__)
typedef __bf16 zrt_bf16x2 __attribute__((ext_vector_type(2)));
typedef float zrt_f32x2 __attribute__((ext_vector_type(2)));
DEVICE u32 pack_bf16x2(float lo, float hi) {
    return __builtin_bit_cast(u32, __builtin_convertvector(zrt_f32x2{lo, hi}, zrt_bf16x2));
}
#else
DEVICE u32 pack_bf16x2(float lo, float hi) {
    u32 a = float_bits(lo), b = float_bits(hi);
    a += 0x7fffu + ((a >> 16) & 1u);
    b += 0x7fffu + ((b >> 16) & 1u);
    return (a >> 16) | (b & 0xffff0000u);
}
#endif

typedef short zrt_s16x4 __attribute__((ext_vector_type(4)));
typedef float zrt_f32x4 __attribute__((ext_vector_type(4)));
// v_mfma_f32_16x16x16_bf16: a row l % 16, k = 4 (l / 16) + j; b column l % 16, the same k; d row 4 (l / 16) + i, column l % 16.
DEVICE void mfma_16x16x16_bf16(float* d, Raw8 a, Raw8 b) {
    zrt_f32x4 c = {d[0], d[1], d[2], d[3]};
    c = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(__builtin_bit_cast(zrt_s16x4, a), __builtin_bit_cast(zrt_s16x4, b), c, 0, 0, 0);
    d[0] = c.x, d[1] = c.y, d[2] = c.z, d[3] = c.w;
}
// v_mfma_f32_16x16x4_f32: a row l % 16, k = l / 16; b column l % 16, the same k; d as above.
DEVICE void mfma_16x16x4_f32(float* d, float a, float b) {
    zrt_f32x4 c = {d[0], d[1], d[2], d[3]};
    c = __builtin_amdgcn_mfma_f32_16x16x4f32(a, b, c, 0, 0, 0);
    d[0] = c.x, d[1] = c.y, d[2] = c.z, d[3] = c.w;
}
#if defined(__gfx950__)
#define ZRT_MFMA_K32 1
typedef __bf16 zrt_bf16x8 __attribute__((ext_vector_type(8)));
// v_mfma_f32_16x16x32_bf16: as 16x16x16 with k = 8 (l / 16) + j. A sum over k has no order, so two fragments of 16 will do.
DEVICE void mfma_16x16x32_bf16(float* d, Raw16 a, Raw16 b) {
    zrt_f32x4 c = {d[0], d[1], d[2], d[3]};
    c = __builtin_amdgcn_mfma_f32_16x16x32_bf16(__builtin_bit_cast(zrt_bf16x8, a), __builtin_bit_cast(zrt_bf16x8, b), c, 0, 0, 0);
    d[0] = c.x, d[1] = c.y, d[2] = c.z, d[3] = c.w;
}
#endif

#else
#error "compile with nvcc, NVRTC, clang -x hip, hipRTC, or for the host with -DGPU_EMU -DGPU_WARP=32|64"
#endif

// ---- 2. What follows from it ----------------------------------------------------------------------------------------

DEVICE int lane_id() { return thread_id() % WARP; }
DEVICE int warp_id() { return thread_id() / WARP; }

DEVICE float shuffle(float v, int from) { return bits_float(shuffle_bits(float_bits(v), from)); }
DEVICE float shuffle_xor(float v, int mask) { return bits_float(shuffle_xor_bits(float_bits(v), mask)); }

template <class T> struct Bare {
    using type = T;
};
template <class T> struct Bare<const T> {
    using type = T;
};
template <class T> using bare = typename Bare<T>::type;

DEVICE float max_f(float a, float b) { return a > b ? a : b; }
DEVICE float min_f(float a, float b) { return a < b ? a : b; }
template <class I> DEVICE I min_of(I a, I b) { return a < b ? a : b; }
template <class I> DEVICE I max_of(I a, I b) { return a > b ? a : b; }
template <class I> DEVICE I div_up(I a, I b) { return (a + b - 1) / b; }

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(bf16 x) { return bits_float((u32)x.bits << 16); }
// The storage type T of x: the bits of the CPU, NaN stays the NaN it was.
template <class T> DEVICE T from_float(float x);
template <> DEVICE float from_float<float>(float x) { return x; }
template <> DEVICE bf16 from_float<bf16>(float x) {
    u32 u = float_bits(x);
    u32 rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16, nan = (u >> 16) | 0x40u;
    return bf16{(u16)((u & 0x7fffffffu) > 0x7f800000u ? nan : rounded)};
}

// Elements of 16 bytes.
template <class T> constexpr int VEC = 16 / (int)sizeof(T);

DEVICE void unpack16(float (&out)[4], const Raw16& v) {
#pragma unroll
    for (int i = 0; i < 4; i++) out[i] = bits_float(v.w[i]);
}
DEVICE void unpack16(float (&out)[8], const Raw16& v) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        out[2 * i] = bits_float(v.w[i] << 16);
        out[2 * i + 1] = bits_float(v.w[i] & 0xffff0000u);
    }
}
DEVICE Raw16 pack16(const float (&x)[4]) { return Raw16{{float_bits(x[0]), float_bits(x[1]), float_bits(x[2]), float_bits(x[3])}}; }
DEVICE Raw16 pack16(const float (&x)[8]) {
    Raw16 v;
#pragma unroll
    for (int i = 0; i < 4; i++) v.w[i] = (u32)from_float<bf16>(x[2 * i]).bits | (u32)from_float<bf16>(x[2 * i + 1]).bits << 16;
    return v;
}

// e^x with f32 precision from the fast power of two: what the product x log2(e) rounds away is put back.
DEVICE float exp_f(float x) {
    const float log2e = 1.44269502f, rest = 1.92596303e-8f;
    float whole = mul_rn(x, log2e), lost = fma_rn(x, log2e, -whole) + x * rest;
    float y = exp2_fast(whole);
    return y == 0.0f || whole > 127.9f ? y : y + y * (lost * 0.693147182f);
}

// Sums over all lanes of a warp, every lane gets the result; one fixed tree.
DEVICE float warp_sum(float v) {
#pragma unroll
    for (int mask = WARP / 2; mask > 0; mask /= 2) v += shuffle_xor(v, mask);
    return v;
}

// Sum over the THREADS threads of a block, every thread gets it. `part` holds THREADS / WARP floats and may be used again
// after the next barrier.
template <int THREADS> DEVICE float block_sum(float v, Shared<float> part) {
    v = warp_sum(v);
    if (lane_id() == 0) part[warp_id()] = v;
    barrier();
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < THREADS / WARP; i++) total += part[i];
    return total;
}

DEVICE u32 warp_sum_u32(u32 v) {
#pragma unroll
    for (int mask = WARP / 2; mask > 0; mask /= 2) v += shuffle_xor_bits(v, mask);
    return v;
}

// Reports that element `row` of a list holds `value`, which is out of range. The smallest row wins, whatever the order.
DEVICE void report_fault(Ptr<u64> cell, u64 row, i32 value) { atomic_min(cell, row << 32 | (u32)value); }

// ---- 3. Matrix fragments --------------------------------------------------------------------------------------------
// A warp multiplies 16 x 16 tiles: acc[m][n] += sum over k of a[m][k] b[n][k], k < Mma<T>::K (16 for bf16, 4 for f32).
//
//   Acc acc; clear(acc);
//   Mma<T>::A a; Mma<T>::B b;
//   load_a(a, tile, row0, k0);     a[m][k] = tile(row0 + m, k0 + k)     load_a_t: tile(k0 + k, row0 + m)
//   load_b(b, tile, col0, k0);     b[n][k] = tile(col0 + n, k0 + k)     load_b_t: tile(k0 + k, col0 + n)
//   mma(acc, a, b);                mma2 takes two neighbours along k: one instruction where the machine has it
//
// row0, col0 are multiples of 16, k0 of K, and a tile is bf16 (or f32) in shared memory, swizzled by Tile so that none of these
// loads conflicts (transposed loads of f32 and of 64 lanes are element by element).
//
// What a lane holds of an accumulator: elements i < ACC_ELEMS at row acc_row(i), column acc_col(i). They lie in ACC_ROWS rows,
// element i in the acc_slot(i)-th; the four lanes that share a row reduce it by row_sum and row_max. Elements 2 i and 2 i + 1 are
// neighbours in a row; with 64 lanes all four are. So o = softmax(s) v keeps its row maxima in float[ACC_ROWS] per lane.
//
// An accumulator becomes the next product's operand without shared memory: a_from_acc (its rows are m, its columns k) and
// b_from_acc (its rows are n, its columns k); f32 goes through 256 floats of scratch of this warp.

constexpr int ACC_ELEMS = 256 / WARP;

struct Acc {
    float v[ACC_ELEMS];
};

DEVICE void clear(Acc& acc) {
#pragma unroll
    for (int i = 0; i < ACC_ELEMS; i++) acc.v[i] = 0.0f;
}

// Where 16-byte chunk `chunk` of row `row` lies, in a tile of `CHUNKS` chunks a row: rows that would meet in the same banks are
// permuted, so that 8 neighbouring rows of one column of chunks, and one row's chunks, each fall into all banks.
template <int CHUNKS> constexpr int SWIZZLE = (CHUNKS & -CHUNKS) < 8 ? CHUNKS & -CHUNKS : 8;
template <int CHUNKS> DEVICE int swizzled(int row, int chunk) {
    constexpr int group = SWIZZLE<CHUNKS>;
    return chunk ^ (row / (8 / group) & (group - 1));
}

// Rows of LD elements in shared memory; LD * sizeof(T) is a multiple of 16. Address elements by `at`, never by hand.
template <class T, int LD> struct Tile {
    static_assert(LD % VEC<T> == 0, "rows must be whole chunks of 16 bytes");
    static constexpr int CHUNKS = LD / VEC<T>;
    Shared<T> base;
    // Offset of an element. 16-byte accesses must start at a multiple of VEC<T> columns.
    static DEVICE int at(int row, int col) { return row * LD + swizzled<CHUNKS>(row, col / VEC<T>) * VEC<T> + col % VEC<T>; }
    DEVICE Shared<T> ptr(int row, int col) const { return base + at(row, col); }
    // As ptr(row, col + lane_col), where col is a multiple of a power of two above lane_col, and of 16 bytes. What depends on the lane
    // is kept apart from col, so that a handful of addresses and constants serve all columns of an unrolled loop. Where a loop is not
    // unrolled that costs registers instead: such a file defines ADDRESS_BY_ELEMENT before it includes this one.
    DEVICE Shared<T> ptr(int row, int col, int lane_col) const {
#if defined(ADDRESS_BY_ELEMENT)
        return ptr(row, col + lane_col);
#else
        constexpr int group = SWIZZLE<CHUNKS>;
        const u32 c = (u32)col / VEC<T>, lane = (u32)lane_col / VEC<T> ^ ((u32)row / (8 / group) & (group - 1));
        const u32 within = (c & (group - 1)) ^ lane;
        return base + (int)((u32)row * LD + (within * VEC<T> + (u32)lane_col % VEC<T>)) + (int)((c & ~(u32)(group - 1)) * VEC<T>);
#endif
    }
    static DEVICE constexpr int bytes(int rows) { return rows * LD * (int)sizeof(T); }
};

template <class T> struct Mma;

#if defined(ZRT_MMA_SYNC)

// Lane l: g = l / 4, t = l % 4. Accumulator: columns 0-7 in v[0..4], 8-15 in v[4..8]; rows g and g + 8, columns 2 t, 2 t + 1.
constexpr int ACC_ROWS = 2;
DEVICE constexpr int acc_slot(int i) { return (i >> 1) & 1; }
DEVICE int slot_row(int slot) { return lane_id() / 4 + 8 * slot; }
DEVICE int acc_row(int i) { return slot_row(acc_slot(i)); }
DEVICE int acc_col(int i) { return 2 * (lane_id() % 4) + (i & 1) + 8 * (i >> 2); }
DEVICE float row_sum(float v) {
    v += shuffle_xor(v, 1);
    return v + shuffle_xor(v, 2);
}
DEVICE float row_max(float v) {
    v = max_f(v, shuffle_xor(v, 1));
    return max_f(v, shuffle_xor(v, 2));
}

template <> struct Mma<bf16> {
    static constexpr int K = 16;
    static constexpr int SCRATCH = 0;
    struct A {
        u32 r[4];
    };
    struct B {
        u32 r[4];  // columns 0-7 in r[0..2], 8-15 in r[2..4]
    };
};
template <int LD> DEVICE void load_a(Mma<bf16>::A& a, Tile<bf16, LD> t, int row0, int k0) {
    int l = lane_id();
    ldmatrix_x4(a.r, t.ptr(row0 + l % 16, k0, 8 * (l / 16)));
}
template <int LD> DEVICE void load_b(Mma<bf16>::B& b, Tile<bf16, LD> t, int col0, int k0) {
    int l = lane_id();
    ldmatrix_x4(b.r, t.ptr(col0 + l % 8 + 8 * (l / 16), k0, 8 * (l / 8 % 2)));
}
template <int LD> DEVICE void load_a_t(Mma<bf16>::A& a, Tile<bf16, LD> t, int row0, int k0) {
    int l = lane_id();
    ldmatrix_x4_trans(a.r, t.ptr(k0 + l % 8 + 8 * (l / 16), row0, 8 * (l / 8 % 2)));
}
template <int LD> DEVICE void load_b_t(Mma<bf16>::B& b, Tile<bf16, LD> t, int col0, int k0) {
    int l = lane_id();
    ldmatrix_x4_trans(b.r, t.ptr(k0 + l % 16, col0, 8 * (l / 16)));
}
DEVICE void mma(Acc& acc, const Mma<bf16>::A& a, const Mma<bf16>::B& b) {
    mma_m16n8k16(acc.v, a.r, b.r);
    mma_m16n8k16(acc.v + 4, a.r, b.r + 2);
}
DEVICE void mma2(Acc& acc, const Mma<bf16>::A& a0, const Mma<bf16>::A& a1, const Mma<bf16>::B& b0, const Mma<bf16>::B& b1) {
    mma(acc, a0, b0);
    mma(acc, a1, b1);
}
DEVICE void a_from_acc(Mma<bf16>::A (&a)[1], const Acc& acc, Shared<float>) {
#pragma unroll
    for (int i = 0; i < 4; i++) a[0].r[i] = pack_bf16x2(acc.v[2 * i], acc.v[2 * i + 1]);
}
DEVICE void b_from_acc(Mma<bf16>::B (&b)[1], const Acc& acc, Shared<float>) {
    b[0].r[0] = pack_bf16x2(acc.v[0], acc.v[1]);
    b[0].r[1] = pack_bf16x2(acc.v[4], acc.v[5]);
    b[0].r[2] = pack_bf16x2(acc.v[2], acc.v[3]);
    b[0].r[3] = pack_bf16x2(acc.v[6], acc.v[7]);
}

// f32 has no exact matrix instruction here: a lane holds the two rows and four columns of its elements and multiplies them.
template <> struct Mma<float> {
    static constexpr int K = 4;
    static constexpr int SCRATCH = 256;
    struct A {
        float r[2][4];
    };
    struct B {
        float r[4][4];  // columns acc_col of elements 0, 1, 4, 5
    };
};
template <int LD> DEVICE void load_a(Mma<float>::A& a, Tile<float, LD> t, int row0, int k0) {
#pragma unroll
    for (int s = 0; s < 2; s++) unpack16(a.r[s], load_raw16(t.ptr(row0 + slot_row(s), k0)));
}
template <int LD> DEVICE void load_b(Mma<float>::B& b, Tile<float, LD> t, int col0, int k0) {
#pragma unroll
    for (int j = 0; j < 4; j++) unpack16(b.r[j], load_raw16(t.ptr(col0 + acc_col((j & 1) + 4 * (j >> 1)), k0)));
}
template <int LD> DEVICE void load_a_t(Mma<float>::A& a, Tile<float, LD> t, int row0, int k0) {
#pragma unroll
    for (int s = 0; s < 2; s++)
#pragma unroll
        for (int k = 0; k < 4; k++) a.r[s][k] = t.ptr(k0 + k, row0, slot_row(s))[0];
}
template <int LD> DEVICE void load_b_t(Mma<float>::B& b, Tile<float, LD> t, int col0, int k0) {
#pragma unroll
    for (int j = 0; j < 4; j += 2)
#pragma unroll
        for (int k = 0; k < 4; k++) {
            // Two neighbours, an even column first, so in the same 16 bytes.
            Shared<float> two = t.ptr(k0 + k, col0, acc_col(2 * j));
            b.r[j][k] = two[0], b.r[j + 1][k] = two[1];
        }
}
DEVICE void mma(Acc& acc, const Mma<float>::A& a, const Mma<float>::B& b) {
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
        for (int i = 0; i < ACC_ELEMS; i++) acc.v[i] = fma_rn(a.r[acc_slot(i)][k], b.r[(i & 1) + 2 * (i >> 2)][k], acc.v[i]);
}

#elif defined(ZRT_MFMA)

// Lane l: q = l / 16. The instruction gives a lane four rows of one column; operands are swapped, so that here it holds four
// columns 4 q .. 4 q + 4 of row l % 16: the layout of an operand, and 8 or 16 neighbouring bytes to store.
constexpr int ACC_ROWS = 1;
DEVICE constexpr int acc_slot(int) { return 0; }
DEVICE int slot_row(int) { return lane_id() % 16; }
DEVICE int acc_row(int) { return lane_id() % 16; }
DEVICE int acc_col(int i) { return 4 * (lane_id() / 16) + i; }
DEVICE float row_sum(float v) {
    v += shuffle_xor(v, 16);
    return v + shuffle_xor(v, WARP / 2);
}
DEVICE float row_max(float v) {
    v = max_f(v, shuffle_xor(v, 16));
    return max_f(v, shuffle_xor(v, WARP / 2));
}

template <> struct Mma<bf16> {
    static constexpr int K = 16;
    static constexpr int SCRATCH = 0;
    struct A {
        Raw8 r;  // k = 4 q + j
    };
    using B = A;
};
template <int LD> DEVICE void load_a(Mma<bf16>::A& a, Tile<bf16, LD> t, int row0, int k0) {
    a.r = load_raw8(t.ptr(row0 + lane_id() % 16, k0, 4 * (lane_id() / 16)));
}
template <int LD> DEVICE void load_b(Mma<bf16>::B& b, Tile<bf16, LD> t, int col0, int k0) { load_a(b, t, col0, k0); }
template <int LD> DEVICE void load_a_t(Mma<bf16>::A& a, Tile<bf16, LD> t, int row0, int k0) {
    u32 e[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        bf16 x = t.ptr(k0 + 4 * (lane_id() / 16) + j, row0, lane_id() % 16)[0];
        e[j] = x.bits;
    }
    a.r = Raw8{{e[0] | e[1] << 16, e[2] | e[3] << 16}};
}
template <int LD> DEVICE void load_b_t(Mma<bf16>::B& b, Tile<bf16, LD> t, int col0, int k0) { load_a_t(b, t, col0, k0); }
DEVICE void mma(Acc& acc, const Mma<bf16>::A& a, const Mma<bf16>::B& b) { mfma_16x16x16_bf16(acc.v, b.r, a.r); }
DEVICE void mma2(Acc& acc, const Mma<bf16>::A& a0, const Mma<bf16>::A& a1, const Mma<bf16>::B& b0, const Mma<bf16>::B& b1) {
#if defined(ZRT_MFMA_K32)
    mfma_16x16x32_bf16(acc.v, Raw16{{b0.r.w[0], b0.r.w[1], b1.r.w[0], b1.r.w[1]}}, Raw16{{a0.r.w[0], a0.r.w[1], a1.r.w[0], a1.r.w[1]}});
#else
    mma(acc, a0, b0);
    mma(acc, a1, b1);
#endif
}
DEVICE void a_from_acc(Mma<bf16>::A (&a)[1], const Acc& acc, Shared<float>) {
    a[0].r = Raw8{{pack_bf16x2(acc.v[0], acc.v[1]), pack_bf16x2(acc.v[2], acc.v[3])}};
}
DEVICE void b_from_acc(Mma<bf16>::B (&b)[1], const Acc& acc, Shared<float> scratch) { a_from_acc(b, acc, scratch); }

template <> struct Mma<float> {
    static constexpr int K = 4;
    static constexpr int SCRATCH = 256;
    struct A {
        float r;  // k = q
    };
    using B = A;
};
template <int LD> DEVICE void load_a(Mma<float>::A& a, Tile<float, LD> t, int row0, int k0) {
    a.r = t.ptr(row0 + lane_id() % 16, k0, lane_id() / 16)[0];
}
template <int LD> DEVICE void load_b(Mma<float>::B& b, Tile<float, LD> t, int col0, int k0) { load_a(b, t, col0, k0); }
template <int LD> DEVICE void load_a_t(Mma<float>::A& a, Tile<float, LD> t, int row0, int k0) {
    a.r = t.ptr(k0 + lane_id() / 16, row0, lane_id() % 16)[0];
}
template <int LD> DEVICE void load_b_t(Mma<float>::B& b, Tile<float, LD> t, int col0, int k0) { load_a_t(b, t, col0, k0); }
DEVICE void mma(Acc& acc, const Mma<float>::A& a, const Mma<float>::B& b) { mfma_16x16x4_f32(acc.v, b.r, a.r); }

#endif

DEVICE void mma2(Acc& acc, const Mma<float>::A& a0, const Mma<float>::A& a1, const Mma<float>::B& b0, const Mma<float>::B& b1) {
    mma(acc, a0, b0);
    mma(acc, a1, b1);
}

// Stores an accumulator into a tile as T, its element (0, 0) at (row0, col0).
template <class T, int LD> DEVICE void store_acc(Tile<T, LD> t, int row0, int col0, const Acc& acc) {
    if constexpr (sizeof(T) == 4 && ACC_ELEMS == 4) {
        // Four neighbours of a row, at once: one by one, rows would meet in the same banks.
        store_raw16(t.ptr(row0 + acc_row(0), col0 + acc_col(0)), pack16(acc.v));
    } else {
#pragma unroll
        for (int i = 0; i < ACC_ELEMS; i++) t.base[t.at(row0 + acc_row(i), col0 + acc_col(i))] = from_float<T>(acc.v[i]);
    }
}

// The f32 operands of 16 along k, by way of `scratch`: Mma<float>::SCRATCH floats that only this warp uses.
DEVICE void a_from_acc(Mma<float>::A (&a)[4], const Acc& acc, Shared<float> scratch) {
    Tile<float, 16> t{scratch};
    warp_sync();
    store_acc(t, 0, 0, acc);
    warp_sync();
#pragma unroll
    for (int k = 0; k < 4; k++) load_a(a[k], t, 0, 4 * k);
}
DEVICE void b_from_acc(Mma<float>::B (&b)[4], const Acc& acc, Shared<float> scratch) {
    Tile<float, 16> t{scratch};
    warp_sync();
    store_acc(t, 0, 0, acc);
    warp_sync();
#pragma unroll
    for (int k = 0; k < 4; k++) load_b(b[k], t, 0, 4 * k);
}

#endif
