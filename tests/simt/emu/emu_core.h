// How do thousands of GPU threads run on one host thread, in an order that we choose? Fibers, scheduled by warp. A fiber runs
// until it waits or ends. When all lanes of a warp wait at the same warp instruction, it is executed for all of them at once;
// when all threads of a block wait at the same barrier, they go on. Anything else that can no longer go on is an error.
#pragma once

namespace emu {

// Bytes that a launch may touch.
struct Range {
    u64 begin, end;
    u32 writable, unused;
};

// What a launch did, summed over its blocks. Mirrored in Rust.
struct Counters {
    u64 read_bytes, write_bytes;          // useful bytes of device memory
    u64 read_sectors, write_sectors;      // 32-byte sectors touched, per warp access: traffic of the first cache
    u64 distinct_reads, distinct_writes;  // sectors touched at all in a launch: traffic of the memory behind perfect caches
    u64 shared_accesses, shared_cycles;   // warp accesses to shared memory, and cycles of the banks they took
    u64 worst_ways;                       // most cycles of one phase of an access: 1 is conflict-free
    u64 matrix, shuffles, barriers, blocks;
};

// One launch. Mirrored in Rust.
struct Run {
    u32 grid[3];
    u32 threads;
    u32 shared_bytes;
    u32 order;    // 0 forward, 1 reverse, 2 random
    u32 workers;  // host threads
    u32 count;    // fill counters
    u64 seed;
    const Range* ranges;
    u32 n_ranges, error_bytes;
    u32 sorted;  // ranges are disjoint and ascend
    u32 unused;
    Counters* counters;
    char* error;
};

enum class State : u8 { Ready, Barrier, Collective, Done };
enum class Collective : u8 { Sync, Shuffle, LdMatrix, LdMatrixTrans, MmaBf16, MfmaBf16, MfmaBf16K32, MfmaF32 };

// An access to memory by one lane, kept until its warp's next wait, when the lanes' accesses are matched.
struct Access {
    const void* site;
    u64 at;
    u16 bytes;
    bool shared, write;
};

// Which sectors of a range a launch has read before it wrote them (1), and written (2).
struct Touched {
    u64 first = 0;
    std::vector<std::atomic<u8>> bits;
    Touched(const Range& r) : first(r.begin / 32), bits(r.end > r.begin ? (r.end - 1) / 32 - r.begin / 32 + 1 : 0) {}
};

struct Pending {
    void* to;
    Raw16 data;
    int group;
};

// A GPU thread.
struct Fiber {
    void* stack_pointer;
    State state;
    Collective what;
    int where;  // line of a barrier, operand of a shuffle
    int tid, lane;
    u32 in[8], out[8];  // registers given to and received from a warp instruction
    int groups;
    u64 steps;  // accesses to memory so far
    std::vector<Pending> pending;
    std::vector<Access> accesses;
};

// Who touched two bytes of shared memory last; times are of the worker, so that a new block starts with nothing known.
struct Shadow {
    u64 write_epoch, read_epoch;
    u32 write_sync, read_sync;
    int writer, reader, read_warp;  // -1: several
};

constexpr size_t STACK_BYTES = 256 << 10;
// A thread that accesses memory more often is in a loop that does not end; tests are far below.
constexpr u64 MOST_STEPS = 20000000;
constexpr size_t ARENA_BYTES = 256 << 10;

// A block on its host thread.
struct Block {
    const Run* run;
    void (*body)(const void*);
    const void* params;
    const char* name;
    u32 id[3];
    int threads;
    void* scheduler;  // its stack pointer while a fiber runs
    Fiber* fibers;
    char* stacks;
    int capacity;
    u8* arena;
    size_t arena_used;
    std::vector<std::pair<const void*, size_t>> statics;
    std::vector<Shadow> shadow;
    u64 epoch;
    std::vector<u32> warp_syncs;
    u64 random;
    std::vector<Touched>* touched;  // by range; null: not counted
    bool failed;
    char error[512];
    Counters counters;
};

inline thread_local Block* block __attribute__((tls_model("initial-exec")));
inline thread_local Fiber* self __attribute__((tls_model("initial-exec")));

#if defined(__SANITIZE_ADDRESS__)
extern "C" void __asan_unpoison_memory_region(void const volatile* at, size_t bytes);
#endif
extern "C" void zrt_emu_switch(void** save, void* to);
#if defined(__x86_64__)
// Saves what a call must keep, changes stacks, and goes on there.
asm(R"(
.pushsection .text
.weak zrt_emu_switch
.type zrt_emu_switch,@function
zrt_emu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rcx
    jmpq *%rcx
.popsection
)");
constexpr int SAVED_WORDS = 6;
#elif defined(__aarch64__)
asm(R"(
.pushsection .text
.weak zrt_emu_switch
.type zrt_emu_switch,%function
zrt_emu_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.popsection
)");
#else
#error "the emulator switches stacks on x86-64 and aarch64 only"
#endif

inline void to_scheduler() { zrt_emu_switch(&self->stack_pointer, block->scheduler); }

inline u64 next_random() {
    u64 x = block->random += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// Keeps the first error and leaves the fiber for good.
template <class... A> [[noreturn]] __attribute__((noinline)) void fail_fiber(const char* format, A... args);

template <class... A> __attribute__((noinline)) void fail(const char* format, A... args) {
    if (block->failed) return;
    block->failed = true;
    int n = snprintf(block->error, sizeof block->error, "%s, block (%u, %u, %u)", block->name, block->id[0], block->id[1], block->id[2]);
    if (self) n += snprintf(block->error + n, sizeof block->error - (size_t)n, ", thread %d", self->tid);
    n += snprintf(block->error + n, sizeof block->error - (size_t)n, ": ");
    snprintf(block->error + n, sizeof block->error - (size_t)n, format, args...);
}

template <class... A> void fail_fiber(const char* format, A... args) {
    fail(format, args...);
    for (;;) to_scheduler();
}

inline void flush_accesses(Fiber* warp, int lanes);
inline bool execute(Fiber* warp, Collective what);

inline __attribute__((noinline)) void wait(State state, Collective what, int where) {
    self->state = state;
    self->what = what;
    self->where = where;
    to_scheduler();
}

inline void barrier_at(int line) { wait(State::Barrier, Collective::Sync, line); }
inline void warp_collective(Collective what, int where) { wait(State::Collective, what, where); }

inline void fiber_main() {
    block->body(block->params);
    if (!self->pending.empty()) fail("%d asynchronous copies were never waited for", (int)self->pending.size());
    self->state = State::Done;
    for (;;) to_scheduler();
}

inline void start(Fiber& f, int tid) {
#if defined(__SANITIZE_ADDRESS__)
    // The last fiber of this stack was left, not ended: its frames are still marked.
    __asan_unpoison_memory_region(block->stacks + (size_t)tid * STACK_BYTES, STACK_BYTES);
#endif
    // Stacks start at different cache sets, else all fibers would share one.
    char* top = block->stacks + (size_t)(tid + 1) * STACK_BYTES - ((size_t)tid * 832 & 0x3fc0);
    void** sp = (void**)((uintptr_t)top & ~(uintptr_t)63);
#if defined(__x86_64__)
    *--sp = nullptr;
    *--sp = (void*)&fiber_main;
    for (int i = 0; i < SAVED_WORDS; i++) *--sp = nullptr;
#else
    sp -= 20;
    memset(sp, 0, 160);
    sp[11] = (void*)&fiber_main;  // x30
#endif
    f.stack_pointer = sp;
    f.state = State::Ready;
    f.tid = tid;
    f.lane = tid % WARP;
    f.groups = 0;
    f.steps = 0;
    f.pending.clear();
    f.accesses.clear();
}

// The i-th of n in this launch's order.
inline int ordered(int i, int n, u64 r) {
    switch (block->run->order) {
        case 0: return i;
        case 1: return n - 1 - i;
        default: return (int)((r % (u64)n + (u64)i * (n % 7 ? 7u : n % 5 ? 5u : 1u)) % (u64)n);
    }
}

// Runs one warp until its lanes are at a barrier or done.
inline void run_warp(int w) {
    Fiber* warp = block->fibers + w * WARP;
    for (;;) {
        u64 r = block->run->order == 2 ? next_random() : 0;
        for (int i = 0; i < WARP; i++) {
            Fiber& f = warp[ordered(i, WARP, r)];
            if (f.state != State::Ready) continue;
            self = &f;
            zrt_emu_switch(&block->scheduler, f.stack_pointer);
            if (block->failed) return;
        }
        self = nullptr;
        if (block->run->count) flush_accesses(warp, WARP);
        int waiting = 0;
        for (int i = 0; i < WARP; i++) waiting += warp[i].state == State::Collective;
        if (waiting == 0) return;
        for (int i = 0; i < WARP; i++) {
            bool same = warp[i].state == State::Collective && warp[i].what == warp[0].what && warp[i].where == warp[0].where;
            if (same) continue;
            self = &warp[i];
            const char* states[] = {"runs", "waits at a barrier", "is at another warp instruction", "has ended"};
            return fail("warp %d diverged: %d lanes are at a warp instruction, lane %d %s", w, waiting, i, states[(int)warp[i].state]);
        }
        if (!execute(warp, warp[0].what)) return;
        if (warp[0].what == Collective::Sync) block->warp_syncs[(size_t)w]++;
        for (int i = 0; i < WARP; i++) warp[i].state = State::Ready;
    }
}

inline void run_block() {
    Block& b = *block;
    // Poison: NaN as f32 and bf16, -1 as an integer.
    memset(b.arena, 0xff, std::max(b.arena_used, (size_t)b.run->shared_bytes));
    b.epoch++;
    int warps = b.threads / WARP;
    for (int i = 0; i < b.threads; i++) start(b.fibers[i], i);
    b.counters.blocks++;
    for (;;) {
        u64 r = b.run->order == 2 ? next_random() : 0;
        for (int i = 0; i < warps; i++) {
            run_warp(ordered(i, warps, r));
            if (b.failed) return;
        }
        int at_barrier = 0, line = -1;
        for (int i = 0; i < b.threads; i++) {
            Fiber& f = b.fibers[i];
            if (f.state != State::Barrier) continue;
            at_barrier++;
            self = &f;
            if (line >= 0 && line != f.where) return fail("waits at the barrier of line %d, others at that of line %d", f.where, line);
            line = f.where;
        }
        self = nullptr;
        if (at_barrier == 0) return;
        if (at_barrier < b.threads) return fail("the barrier of line %d is reached by %d of %d threads", line, at_barrier, b.threads);
        b.counters.barriers++;
        b.epoch++;
        for (int i = 0; i < b.threads; i++) b.fibers[i].state = State::Ready;
    }
}

// Memory of one host thread, used again by its later launches.
struct Worker {
    Block b{};
    Worker() {
        b.arena = (u8*)aligned_alloc(256, ARENA_BYTES);
        b.shadow.resize(ARENA_BYTES / 2);
    }
    ~Worker() {
        release_stacks();
        delete[] b.fibers;
        free(b.arena);
    }
    void release_stacks() {
        if (!b.stacks) return;
#if defined(__SANITIZE_ADDRESS__)
        // As in `start`; other memory will be here.
        __asan_unpoison_memory_region(b.stacks, (size_t)b.capacity * STACK_BYTES);
#endif
        munmap(b.stacks, (size_t)b.capacity * STACK_BYTES);
    }
    void prepare(int threads) {
        if (threads <= b.capacity) return;
        release_stacks();
        delete[] b.fibers;
        b.capacity = threads;
        b.fibers = new Fiber[(size_t)threads];
        b.stacks = (char*)mmap(nullptr, (size_t)threads * STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    }
};

inline void add(Counters& to, const Counters& c) {
    u64* t = (u64*)&to;
    const u64* f = (const u64*)&c;
    u64 worst = std::max(to.worst_ways, c.worst_ways);
    for (size_t i = 0; i < sizeof(Counters) / sizeof(u64); i++) t[i] += f[i];
    to.worst_ways = worst;
}

// Runs a kernel. Returns 0, or 1 with a text in run->error.
inline int launch(void (*body)(const void*), const void* params, const char* name, int most_threads, const Run* run) {
    if (run->threads == 0 || run->threads % WARP || (int)run->threads > most_threads || run->shared_bytes > ARENA_BYTES) {
        snprintf(run->error, run->error_bytes, "%s: %u threads and %u bytes of shared memory, expected whole warps of %d up to %d threads",
                 name, run->threads, run->shared_bytes, WARP, most_threads);
        return 1;
    }
    u64 blocks = (u64)run->grid[0] * run->grid[1] * run->grid[2];
    std::atomic<u64> next{0};
    std::atomic<bool> stop{false};
    std::vector<Touched> touched;
    for (u32 i = 0; run->count && i < run->n_ranges; i++) touched.emplace_back(run->ranges[i]);
    std::mutex done;
    auto work = [&] {
        static thread_local Worker worker;
        Block& b = worker.b;
        worker.prepare((int)run->threads);
        block = &b;
        self = nullptr;
        b.run = run, b.body = body, b.params = params, b.name = name;
        b.threads = (int)run->threads;
        b.arena_used = run->shared_bytes;
        b.touched = run->count ? &touched : nullptr;
        b.statics.clear();
        b.warp_syncs.assign((size_t)b.threads / WARP, 0);
        b.failed = false;
        b.counters = Counters{};
        for (u64 i; !stop && (i = next.fetch_add(1)) < blocks;) {
            u64 at = run->order == 1 ? blocks - 1 - i : i;
            b.random = run->seed ^ (at * 0xd1342543de82ef95ull);
            b.id[0] = (u32)(at % run->grid[0]);
            b.id[1] = (u32)(at / run->grid[0] % run->grid[1]);
            b.id[2] = (u32)(at / ((u64)run->grid[0] * run->grid[1]));
            run_block();
            if (b.failed) {
                std::lock_guard<std::mutex> lock(done);
                if (!stop.exchange(true)) snprintf(run->error, run->error_bytes, "%s", b.error);
            }
        }
        std::lock_guard<std::mutex> lock(done);
        add(*run->counters, b.counters);
        self = nullptr;
    };
    u64 workers = std::min<u64>(std::max(run->workers, 1u), blocks);
    std::vector<std::thread> others;
    for (u64 i = 1; i < workers; i++) others.emplace_back(work);
    work();
    for (auto& t : others) t.join();
    for (auto& t : touched)
        for (auto& bits : t.bits) {
            run->counters->distinct_reads += bits & 1;
            run->counters->distinct_writes += bits >> 1 & 1;
        }
    return stop ? 1 : 0;
}

}  // namespace emu
