// Rotary embedding (Su et al. 2021), rotate-half: dimension i turns with i + D/2 by the row of its position in a table of D/2
// cosines and D/2 sines; in place. Backward is the transposed rotation: the same with the sines' sign turned.
//
// Memory: x [tokens, heads, D] read and written once, a row of the table a token (from L2: heads of a token share it). Limited by
// memory. A thread takes a piece of the first half of a head and its partner of the second; a block a few tokens, so that narrow
// ones (kv heads) fill it too.
#include "elementwise.cuh"

template <class T> struct Rope {
    Ptr<u64> fault;
    Ptr<T> x;
    Ptr<const float> table;
    Ptr<const i32> positions;
    i64 tokens;
    i32 tokens_per_block;
    i32 heads;
    i32 head_dim;
    i32 rows;  // of the table
    i32 vector;
    float sign;
};

template <class T, int N> DEVICE void rotate(const Rope<T>& p) {
    const int half = p.head_dim / 2, per_head = half / N, per_token = p.heads * per_head;
    const i64 first = (i64)block_id_x() * p.tokens_per_block;
    const int tokens = (int)min_of<i64>(p.tokens_per_block, p.tokens - first);
    for (int i = thread_id(); i < tokens * per_token; i += ELEM_THREADS) {
        const i64 token = first + i / per_token;
        const i32 position = p.positions[token];
        if (position < 0 || position >= p.rows) {
            report_fault(p.fault, (u64)token, position);
            continue;
        }
        const int head = i % per_token / per_head, d = i % per_head * N;
        const i64 at = (token * p.heads + head) * p.head_dim + d;
        const i64 row = (i64)position * p.head_dim + d;
        Piece<N> a, b, cos, sin;
        load_piece(a, p.x + at);
        load_piece(b, p.x + (at + half));
        load_floats(cos, p.table + row);
        load_floats(sin, p.table + (row + half));
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float s = sin.v[j] * p.sign, x = a.v[j], y = b.v[j];
            a.v[j] = x * cos.v[j] - y * s;
            b.v[j] = y * cos.v[j] + x * s;
        }
        store_piece(p.x + at, a);
        store_piece(p.x + (at + half), b);
    }
}

KERNEL(rope_f32, Rope<float>, ELEM_THREADS) {
    if (p.vector)
        rotate<float, 4>(p);
    else
        rotate<float, 1>(p);
}
KERNEL(rope_bf16, Rope<bf16>, ELEM_THREADS) {
    if (p.vector)
        rotate<bf16, 8>(p);
    else
        rotate<bf16, 1>(p);
}
