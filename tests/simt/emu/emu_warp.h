// What do the instructions of a whole warp compute? Shuffles, ldmatrix, mma.sync (PTX ISA, "Matrix Fragments for mma.m16n8k16")
// and MFMA (AMD Instinct ISA guides, "Matrix Arithmetic"), on the registers that each lane gave, by the documented lane layouts.
// Sums are made in f64 and rounded once: the order and the rounding inside a matrix unit are not documented.
#pragma once

namespace emu {

inline float half_float(u32 bits) {
    u32 u = bits << 16;
    float x;
    memcpy(&x, &u, 4);
    return x;
}
// Element e of a lane's packed bf16 registers.
inline float element(const u32* registers, int e) { return half_float(registers[e / 2] >> (e % 2 * 16) & 0xffff); }
inline float as_float(u32 u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}
inline u32 as_bits(float x) {
    u32 u;
    memcpy(&u, &x, 4);
    return u;
}

DEVICE u32 shuffle(u32 v, int from, int where) {
    self->in[0] = v;
    self->in[1] = (u32)from;
    warp_collective(Collective::Shuffle, where);
    return self->out[0];
}

#if GPU_WARP == 32
// in[0..4] a, in[4..6] b, in[6] unused; the accumulator stays with its lane.
inline void mma_bf16(Fiber* w) {
    float a[16][16], b[16][8];
    for (int l = 0; l < 32; l++) {
        int g = l / 4, t = l % 4;
        for (int e = 0; e < 8; e++) a[g + (e / 2 % 2) * 8][2 * t + e % 2 + (e / 4) * 8] = element(w[l].in, e);
        for (int e = 0; e < 4; e++) b[2 * t + e % 2 + (e / 2) * 8][g] = element(w[l].in + 4, e);
    }
    for (int l = 0; l < 32; l++) {
        int g = l / 4, t = l % 4;
        for (int e = 0; e < 4; e++) {
            double s = 0;
            for (int k = 0; k < 16; k++) s += (double)a[g + (e / 2) * 8][k] * b[k][2 * t + e % 2];
            w[l].out[e] = as_bits((float)s);
        }
    }
    block->counters.matrix++;
}
DEVICE void mma_m16n8k16(float* d, const u32* a, const u32* b) {
    memcpy(self->in, a, 16);
    memcpy(self->in + 4, b, 8);
    warp_collective(Collective::MmaBf16, 0);
    for (int e = 0; e < 4; e++) d[e] += as_float(self->out[e]);
}

// in[0..2]: address of the row that this lane names.
inline bool ldmatrix(Fiber* w, bool trans) {
    for (int l = 0; l < 32; l++)
        for (int m = 0; m < 4; m++) {
            int g = l / 4, t = l % 4;
            u32 halves[2];
            for (int e = 0; e < 2; e++) {
                int row = trans ? 2 * t + e : g, col = trans ? g : 2 * t + e;
                const u16* p;
                memcpy(&p, w[8 * m + row].in, 8);
                halves[e] = p[col];
            }
            w[l].out[m] = halves[0] | halves[1] << 16;
        }
    return true;
}
inline void ldmatrix_row(u32* r, Pointer<bf16, true> row, Collective what) {
    // One phase of the instruction reads the 8 rows of one matrix: counted as the 16 bytes that each lane names.
    touch<true>((uintptr_t)row.raw, 16, false);
    memcpy(self->in, &row.raw, 8);
    warp_collective(what, 0);
    memcpy(r, self->out, 16);
}
DEVICE void ldmatrix_x4(u32* r, Pointer<bf16, true> row) { ldmatrix_row(r, row, Collective::LdMatrix); }
DEVICE void ldmatrix_x4_trans(u32* r, Pointer<bf16, true> row) { ldmatrix_row(r, row, Collective::LdMatrixTrans); }
#else
// in[0..K/4 / 2] a, then b; with `elems` bf16 of each per lane. d row 4 (l / 16) + i, column l % 16.
inline void mfma_bf16(Fiber* w, int elems) {
    float a[16][32], b[32][16];
    for (int l = 0; l < 64; l++)
        for (int j = 0; j < elems; j++) {
            a[l % 16][elems * (l / 16) + j] = element(w[l].in, j);
            b[elems * (l / 16) + j][l % 16] = element(w[l].in + elems / 2, j);
        }
    for (int l = 0; l < 64; l++)
        for (int i = 0; i < 4; i++) {
            double s = 0;
            for (int k = 0; k < 4 * elems; k++) s += (double)a[4 * (l / 16) + i][k] * b[k][l % 16];
            w[l].out[i] = as_bits((float)s);
        }
    block->counters.matrix++;
}
inline void mfma_f32(Fiber* w) {
    for (int l = 0; l < 64; l++)
        for (int i = 0; i < 4; i++) {
            double s = 0;
            for (int k = 0; k < 4; k++) s += (double)as_float(w[4 * (l / 16) + i + 16 * k].in[0]) * as_float(w[l % 16 + 16 * k].in[1]);
            w[l].out[i] = as_bits((float)s);
        }
    block->counters.matrix++;
}
DEVICE void mfma_16x16x16_bf16(float* d, Raw8 a, Raw8 b) {
    memcpy(self->in, &a, 8);
    memcpy(self->in + 2, &b, 8);
    warp_collective(Collective::MfmaBf16, 0);
    for (int i = 0; i < 4; i++) d[i] += as_float(self->out[i]);
}
DEVICE void mfma_16x16x32_bf16(float* d, Raw16 a, Raw16 b) {
    memcpy(self->in, &a, 16);
    memcpy(self->in + 4, &b, 16);
    warp_collective(Collective::MfmaBf16K32, 0);
    for (int i = 0; i < 4; i++) d[i] += as_float(self->out[i]);
}
DEVICE void mfma_16x16x4_f32(float* d, float a, float b) {
    self->in[0] = as_bits(a);
    self->in[1] = as_bits(b);
    warp_collective(Collective::MfmaF32, 0);
    for (int i = 0; i < 4; i++) d[i] += as_float(self->out[i]);
}
#endif

// Executes the instruction that all lanes of a warp are at. False: it failed.
inline bool execute(Fiber* w, Collective what) {
    switch (what) {
        case Collective::Sync: break;
        case Collective::Shuffle:
            block->counters.shuffles++;
            for (int l = 0; l < WARP; l++) {
                u32 from = w[l].in[1];
                if (from >= (u32)WARP) {
                    self = &w[l];
                    fail("shuffles from lane %d of %d", (int)from, WARP);
                    return false;
                }
                w[l].out[0] = w[from].in[0];
            }
            break;
#if GPU_WARP == 32
        case Collective::LdMatrix: return ldmatrix(w, false);
        case Collective::LdMatrixTrans: return ldmatrix(w, true);
        case Collective::MmaBf16: mma_bf16(w); break;
#else
        case Collective::MfmaBf16: mfma_bf16(w, 4); break;
        case Collective::MfmaBf16K32: mfma_bf16(w, 8); break;
        case Collective::MfmaF32: mfma_f32(w); break;
#endif
        default: break;
    }
    return true;
}

}  // namespace emu

#if GPU_WARP == 32
using emu::ldmatrix_x4;
using emu::ldmatrix_x4_trans;
using emu::mma_m16n8k16;
#else
using emu::mfma_16x16x16_bf16;
using emu::mfma_16x16x32_bf16;
using emu::mfma_16x16x4_f32;
#endif
