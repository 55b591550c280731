// What does a kernel run on when there is no GPU? On this: the words of compat.h for the host. Every GPU thread is a fiber with
// its own stack; a block runs on one thread of the host, fiber after fiber, until all wait at a barrier or a warp instruction.
// So barriers and warp instructions are exact, the order of threads is ours to choose, and every access to memory can be seen.
//
// * emu.h: the words of section 1 of compat.h.       * emu_core.h: fibers, blocks, barriers, orders, errors.
// * emu_memory.h: bounds, races, bytes, bank conflicts. * emu_warp.h: shuffles and matrix instructions on documented layouts.
//
// An error (an access outside the declared operands, a race in shared memory, a barrier that not all threads reach) ends the
// launch and is returned as text; nothing is thrown through fibers.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#ifndef GPU_WARP
#error "define GPU_WARP as 32 or 64"
#endif
#define DEVICE inline __attribute__((always_inline))

constexpr int WARP = GPU_WARP;
#if GPU_WARP == 32
#define ZRT_MMA_SYNC 1
#else
#define ZRT_MFMA 1
#endif
#if defined(GPU_EMU_GFX950)
#define ZRT_MFMA_K32 1
#endif

// Parameter structs are shared with the host side, whose pointers have eight bytes.
static_assert(sizeof(void*) == 8, "64-bit hosts only");

#include "emu_core.h"
#include "emu_memory.h"
#include "emu_warp.h"

#define KERNEL(name, Params, threads)                                                                                              \
    static void name##_body(const Params p);                                                                                       \
    extern "C" int emu_launch_##name(const void* params, const emu::Run* run) {                                                    \
        return emu::launch([](const void* params) { name##_body(*(const Params*)params); }, params, #name, threads, run);          \
    }                                                                                                                              \
    extern "C" unsigned emu_bytes_##name() { return sizeof(Params); }                                                              \
    static void name##_body(const Params p)
#define KERNEL_OCC(name, Params, threads, blocks) KERNEL(name, Params, threads)

DEVICE int thread_id() { return emu::self->tid; }
DEVICE int block_threads() { return emu::block->threads; }
DEVICE int block_id_x() { return (int)emu::block->id[0]; }
DEVICE int block_id_y() { return (int)emu::block->id[1]; }
DEVICE int block_id_z() { return (int)emu::block->id[2]; }
DEVICE int grid_x() { return (int)emu::block->run->grid[0]; }
DEVICE int grid_y() { return (int)emu::block->run->grid[1]; }

// The line tells barriers apart: all threads must be at the same one.
#define barrier() emu::barrier_at(__LINE__)
DEVICE void warp_sync() { emu::warp_collective(emu::Collective::Sync, 0); }
DEVICE int uniform(int v) { return v; }
DEVICE u32 shuffle_bits(u32 v, int from) { return emu::shuffle(v, from, 0); }
DEVICE u32 shuffle_xor_bits(u32 v, int mask) { return emu::shuffle(v, (emu::self->lane ^ mask), mask); }

template <class T> using Ptr = emu::Pointer<T, false>;
template <class T> using Shared = emu::Pointer<T, true>;
#define SHARED(T, name, elems)    \
    static const char name##_key = 0; \
    Shared<T> name{(T*)emu::static_shared(&name##_key, (elems) * sizeof(T))}
#define DYN_SHARED(name) \
    Shared<u8> name { emu::block->arena }
template <class T> DEVICE Shared<T> shared_cast(Shared<u8> base, int bytes) { return Shared<T>{(T*)(base.raw + bytes)}; }

template <class T, bool S> DEVICE Raw16 load_raw16(emu::Pointer<T, S> p) { return emu::load_bytes<Raw16, S>(p.raw); }
template <class T, bool S> DEVICE void store_raw16(emu::Pointer<T, S> p, Raw16 v) { emu::store_bytes<Raw16, S>(p.raw, v); }
template <class T, bool S> DEVICE Raw8 load_raw8(emu::Pointer<T, S> p) { return emu::load_bytes<Raw8, S>(p.raw); }
template <class T, bool S> DEVICE void store_raw8(emu::Pointer<T, S> p, Raw8 v) { emu::store_bytes<Raw8, S>(p.raw, v); }

// The store happens at the wait; until then the place holds NaN, so a missing wait shows. It counts as written at once, too,
// since a machine without a copy engine stores at once.
template <class T, class U> DEVICE void copy16_async(Shared<T> to, Ptr<U> from, bool valid) {
    Raw16 data = {{0, 0, 0, 0}};
    if (valid) data = load_raw16(from);
    store_raw16(to, Raw16{{~0u, ~0u, ~0u, ~0u}});
    emu::self->pending.push_back({to.raw, data, emu::self->groups});
}
DEVICE void copy_commit() { emu::self->groups++; }
template <int LEFT> DEVICE void copy_wait() {
    auto& pending = emu::self->pending;
    size_t done = 0;
    while (done < pending.size() && pending[done].group + LEFT < emu::self->groups) {
        emu::store_bytes<Raw16, true>(pending[done].to, pending[done].data);
        done++;
    }
    pending.erase(pending.begin(), pending.begin() + (long)done);
}

DEVICE u32 float_bits(float x) {
    u32 u;
    memcpy(&u, &x, 4);
    return u;
}
DEVICE float bits_float(u32 u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}
DEVICE float exp2_fast(float x) { return exp2f(x); }
DEVICE float log2_fast(float x) { return log2f(x); }
DEVICE float fma_rn(float a, float b, float c) { return fmaf(a, b, c); }
DEVICE float mul_rn(float a, float b) { return a * b; }
DEVICE float add_rn(float a, float b) { return a + b; }
DEVICE float sub_rn(float a, float b) { return a - b; }
DEVICE float div_rn(float a, float b) { return a / b; }
DEVICE float sqrt_rn(float a) { return sqrtf(a); }
DEVICE u32 pack_bf16x2(float lo, float hi) {
    u32 a = float_bits(lo), b = float_bits(hi);
    a += 0x7fffu + ((a >> 16) & 1u);
    b += 0x7fffu + ((b >> 16) & 1u);
    return (lo != lo ? 0x7fffu : a >> 16) | (hi != hi ? 0x7fff0000u : b & 0xffff0000u);
}
DEVICE void atomic_min(Ptr<u64> p, u64 v) {
    emu::touch<false>((uintptr_t)p.raw, sizeof(u64), true);
    auto* cell = (std::atomic<u64>*)p.raw;
    u64 seen = cell->load();
    while (v < seen && !cell->compare_exchange_weak(seen, v)) {
    }
}
DEVICE void atomic_add(Ptr<u32> p, u32 v) {
    emu::touch<false>((uintptr_t)p.raw, sizeof(u32), true);
    ((std::atomic<u32>*)p.raw)->fetch_add(v);
}
