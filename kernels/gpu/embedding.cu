// Rows of a table by token id, y[n] = table[ids[n]], and the table's gradient, dtable[ids[n]] += dy[n] in token order: a repeated
// token's sum has one order, without atomics, the CPU's to the bit.
//
// Memory: forward reads and writes N rows. Backward reads N rows of dy and reads and writes a row of dtable for each different id
// (and clears the table first, where it is overwritten). Limited by memory, but for one thing: the rows of one id are a chain that
// one group of threads walks, some hundred nanoseconds each.
//
// Backward links the tokens of an id in three kernels: within chunks of CHUNK tokens each token finds the next one of its id (all
// chunks at once); one block then joins the chunks from the last to the first, with the last seen token of every id in `heads`; the
// first token of every id walks its chain.
#include "elementwise.cuh"

template <class T> struct Embedding {
    Ptr<u64> fault;
    Ptr<T> y;
    Ptr<const T> table;
    Ptr<const i32> ids;
    i64 tokens;
    i64 hidden;
    i32 vocab;
    i32 vector;
};

// One block a token.
template <class T> DEVICE void embedding(const Embedding<T>& p) {
    const i64 token = block_id_x();
    const i32 id = p.ids[token];
    if (id < 0 || id >= p.vocab) {
        if (thread_id() == 0) report_fault(p.fault, (u64)token, id);
        return;
    }
    Ptr<T> to = p.y + token * p.hidden;
    Ptr<const T> from = p.table + id * p.hidden;
    if (p.vector) {
        for (i64 i = (i64)thread_id() * VEC<T>; i < p.hidden; i += ELEM_THREADS * VEC<T>) store_raw16(to + i, load_raw16(from + i));
    } else {
        for (i64 i = thread_id(); i < p.hidden; i += ELEM_THREADS) {
            T x = from[i];
            to[i] = x;
        }
    }
}

KERNEL(embedding_f32, Embedding<float>, ELEM_THREADS) { embedding(p); }
KERNEL(embedding_bf16, Embedding<bf16>, ELEM_THREADS) { embedding(p); }

constexpr int CHUNK = 1024;
// Links: the next token of the same id, or these.
constexpr i32 LAST = -1;     // none follows
constexpr i32 NOT_SEEN = -1;  // no token of this id yet, in `heads`

struct EmbeddingLinks {
    Ptr<u64> fault;
    Ptr<i32> next;        // [tokens] the next token of the same id, LAST if there is none
    Ptr<i32> first;       // [tokens] 1: no token of the same id comes before
    Ptr<i32> heads;       // [vocab] NOT_SEEN
    Ptr<const i32> ids;   // [tokens]
    i64 tokens;
    i32 vocab;
    i32 unused;
};

// Links within one chunk. An id that is out of range is reported and linked to nothing.
KERNEL(embedding_links_chunk, EmbeddingLinks, CHUNK) {
    SHARED(i32, ids, CHUNK);
    const i64 start = (i64)block_id_x() * CHUNK, token = start + thread_id();
    const int n = (int)min_of<i64>(CHUNK, p.tokens - start);
    const i32 id = thread_id() < n ? (i32)p.ids[token] : -1;
    ids[thread_id()] = id;
    barrier();
    if (thread_id() >= n) return;
    if (id < 0 || id >= p.vocab) {
        report_fault(p.fault, (u64)token, id);
        p.next[token] = LAST;
        p.first[token] = 0;
        return;
    }
    i32 next = LAST;
    for (int i = thread_id() + 1; i < n && next == LAST; i++)
        if (ids[i] == id) next = (i32)(start + i);
    bool first = true;
    for (int i = thread_id() - 1; i >= 0 && first; i--) first = ids[i] != id;
    p.next[token] = next;
    p.first[token] = first;
}

// Joins the chunks: one block, from the last chunk to the first.
KERNEL(embedding_links_join, EmbeddingLinks, CHUNK) {
    for (i64 start = (p.tokens - 1) / CHUNK * CHUNK; start >= 0; start -= CHUNK) {
        const i64 token = start + thread_id();
        i32 id = -1, before = NOT_SEEN;
        bool first = false, last = false;
        if (token < p.tokens) {
            id = p.ids[token];
            first = p.first[token] != 0;
            last = p.next[token] == LAST;
        }
        const bool good = id >= 0 && id < p.vocab;
        if (good) before = p.heads[id];
        barrier();
        if (good && last) p.next[token] = before;
        if (good && first) {
            p.heads[id] = (i32)token;
            // In a later chunk there is a token that was thought to be the first.
            if (before != NOT_SEEN) p.first[before] = 0;
        }
        barrier();
    }
}

template <class T> struct EmbeddingBackward {
    Ptr<float> dtable;
    Ptr<const T> dy;
    Ptr<const i32> ids;
    Ptr<const i32> next;
    Ptr<const i32> first;
    i64 hidden;
    i32 vector;
    i32 unused;
};

template <class T, int N> DEVICE void sum_chain(const EmbeddingBackward<T>& p, i64 at) {
    const i32 head = block_id_x(), id = p.ids[head];
    Ptr<float> to = p.dtable + (id * p.hidden + at);
    Piece<N> sum;
    load_floats(sum, to);
    i32 token = head;
    while (token >= 0) {
        // The link is fetched before the row, so that the next row need not wait for this one.
        const i32 after = p.next[token];
        Piece<N> d;
        load_piece(d, p.dy + (token * p.hidden + at));
#pragma unroll
        for (int j = 0; j < N; j++) sum.v[j] += d.v[j];
        token = after;
    }
    store_floats(to, sum);
}

// A block takes a token and, along y, its share of the columns; only the first token of an id has work.
template <class T> DEVICE void embedding_backward(const EmbeddingBackward<T>& p) {
    if (p.first[block_id_x()] == 0) return;
    const i64 me = (i64)block_id_y() * ELEM_THREADS + thread_id(), step = (i64)grid_y() * ELEM_THREADS;
    if (p.vector) {
        for (i64 i = me * VEC<T>; i < p.hidden; i += step * VEC<T>) sum_chain<T, VEC<T>>(p, i);
    } else {
        for (i64 i = me; i < p.hidden; i += step) sum_chain<T, 1>(p, i);
    }
}

KERNEL(embedding_backward_f32, EmbeddingBackward<float>, ELEM_THREADS) { embedding_backward(p); }
KERNEL(embedding_backward_bf16, EmbeddingBackward<bf16>, ELEM_THREADS) { embedding_backward(p); }
