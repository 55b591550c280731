// What does an access to memory do, and was it allowed? Device memory: it must lie in an operand that the launch declared, and
// a write in one it may write. Shared memory: it must lie in the block's own, and no two threads may touch the same bytes, one of
// them writing, without a barrier between (or a warp_sync, within a warp): that is a race, whatever this run's order made of it.
//
// Counters need to know which accesses of a warp's lanes belong to one instruction: those from the same place in the code, the
// n-th time. They are kept per lane and matched when the warp waits next. Banks: 32 of 4 bytes; an instruction takes 8 lanes of
// 16 bytes, 16 lanes of 8, or 32 lanes of less at a time, and as many cycles as one bank has different words to give.
#pragma once

namespace emu {

inline __attribute__((noinline)) void bad_address(uintptr_t at, size_t bytes, bool write) {
    const Run& run = *block->run;
    const char* verb = write ? "writes" : "reads";
    for (u32 i = 0; i < run.n_ranges; i++) {
        const Range& r = run.ranges[i];
        if (at >= r.begin && at + bytes <= r.end) fail_fiber("%s operand %d, which is read-only", verb, (int)i);
    }
    const Range* near = nullptr;
    for (u32 i = 0; i < run.n_ranges; i++) {
        if (run.ranges[i].begin <= at && (!near || run.ranges[i].begin > near->begin)) near = &run.ranges[i];
    }
    if (!near) fail_fiber("%s %d bytes at %p, which is before all operands", verb, (int)bytes, (void*)at);
    fail_fiber("%s %d bytes at byte %lld of operand %d, which has %lld", verb, (int)bytes, (long long)(at - near->begin), (int)(near - run.ranges),
               (long long)(near->end - near->begin));
}

// The range that holds these bytes; null: none does.
inline const Range* find_range(const Run& run, uintptr_t at, size_t bytes, bool write) {
    const Range *first = run.ranges, *end = run.ranges + run.n_ranges;
    if (run.sorted) {
        first = std::upper_bound(first, end, (u64)at, [](u64 at, const Range& r) { return at < r.begin; });
        if (first == run.ranges) return nullptr;
        end = first--;
    }
    for (; first < end; first++)
        if (at >= first->begin && at + bytes <= first->end && (!write || first->writable)) return first;
    return nullptr;
}

inline void check_device(uintptr_t at, size_t bytes, bool write) {
    // The last range of some pages each, for kernels that go through several operands in turn.
    static thread_local const Range* recent[16] __attribute__((tls_model("initial-exec")));
    const Run& run = *block->run;
    const Range*& last = recent[at >> 12 & 15];
    // Only a guess, checked like the rest: it may be of an older launch, so its address is compared first.
    if (last >= run.ranges && last < run.ranges + run.n_ranges && at >= last->begin && at + bytes <= last->end && (!write || last->writable)) return;
    if (const Range* found = find_range(run, at, bytes, write))
        last = found;
    else
        bad_address(at, bytes, write);
}

inline void check_shared(uintptr_t at, size_t bytes, bool write) {
    size_t offset = at - (uintptr_t)block->arena;
    if (at < (uintptr_t)block->arena || offset + bytes > block->arena_used)
        fail_fiber("%s %d bytes at byte %lld of the block's %d of shared memory", write ? "writes" : "reads", (int)bytes,
                   (long long)((intptr_t)at - (intptr_t)block->arena), (int)block->arena_used);
    int tid = self->tid, warp = tid / WARP;
    u32 syncs = block->warp_syncs[(size_t)warp];
    for (size_t i = offset / 2; i < (offset + bytes + 1) / 2; i++) {
        Shadow& s = block->shadow[i];
        if (s.write_epoch == block->epoch && s.writer != tid && !(s.writer / WARP == warp && s.write_sync < syncs))
            fail_fiber("race: %s byte %d of shared memory, which thread %d wrote with no barrier between", write ? "writes" : "reads", (int)offset, s.writer);
        if (write) {
            if (s.read_epoch == block->epoch && s.reader != tid && !(s.read_warp == warp && s.read_sync < syncs))
                fail_fiber("race: writes byte %d of shared memory, which thread %d read with no barrier between", (int)offset, s.reader);
            s.write_epoch = block->epoch, s.write_sync = syncs, s.writer = tid;
        } else if (s.read_epoch != block->epoch) {
            s.read_epoch = block->epoch, s.read_sync = syncs, s.reader = tid, s.read_warp = warp;
        } else {
            if (s.read_warp != warp) s.read_warp = -1;
            if (s.reader != tid) s.reader = -1;
            s.read_sync = syncs;
        }
    }
}

inline void record(const void* site, uintptr_t at, size_t bytes, bool shared, bool write) {
    self->accesses.push_back({site, at, (u16)bytes, shared, write});
    if (shared) return;
    const Run& run = *block->run;
    for (u32 i = 0; i < run.n_ranges; i++) {
        if (at < run.ranges[i].begin || at + bytes > run.ranges[i].end) continue;
        Touched& t = (*block->touched)[i];
        auto& bits = t.bits[at / 32 - t.first];
        // What the launch wrote itself is read from a cache.
        if (write || !(bits.load(std::memory_order_relaxed) & 2)) bits.fetch_or(write ? 2 : 1, std::memory_order_relaxed);
        return;
    }
}

// Not inlined: its return address is the place of the access, and kernels compile several times faster.
template <bool SHARED_MEMORY> __attribute__((noinline)) void touch(uintptr_t at, size_t bytes, bool write) {
    if (at % bytes) fail_fiber("%s %d bytes at %p, which is not aligned to them", write ? "writes" : "reads", (int)bytes, (void*)at);
    if (++self->steps > MOST_STEPS) fail_fiber("does not end: %lld accesses to memory by one thread", (long long)self->steps);
    if (SHARED_MEMORY)
        check_shared(at, bytes, write);
    else
        check_device(at, bytes, write);
    if (block->run->count) record(__builtin_return_address(0), at, bytes, SHARED_MEMORY, write);
}

template <class V, bool S> DEVICE V load_bytes(const void* p) {
    touch<S>((uintptr_t)p, sizeof(V), false);
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}
template <class V, bool S> DEVICE void store_bytes(const void* p, V v) {
    touch<S>((uintptr_t)p, sizeof(V), true);
    memcpy((void*)p, &v, sizeof v);
}

// Static shared memory lies behind the dynamic one, at the same place in every block.
inline u8* static_shared(const void* key, size_t bytes) {
    for (auto& s : block->statics)
        if (s.first == key) return block->arena + s.second;
    size_t at = (block->arena_used + 15) & ~(size_t)15;
    if (at + bytes > ARENA_BYTES) fail_fiber("%d bytes of shared memory do not fit", (int)bytes);
    block->statics.push_back({key, at});
    block->arena_used = at + bytes;
    memset(block->arena + at, 0xff, bytes);
    return block->arena + at;
}

// The device's `T*`. Eight bytes, like it.
template <class T, bool SHARED_MEMORY> struct Pointer {
    T* raw;
    struct Element {
        T* at;
        using V = std::remove_const_t<T>;
        operator V() const { return load_bytes<V, SHARED_MEMORY>(at); }
        const Element& operator=(V v) const {
            store_bytes<V, SHARED_MEMORY>(at, v);
            return *this;
        }
        const Element& operator=(const Element& from) const { return *this = (V)from; }
        const Element& operator+=(V v) const { return *this = (V)*this + v; }
        const Element& operator*=(V v) const { return *this = (V)*this * v; }
    };
    template <class I> Element operator[](I i) const { return Element{raw + i}; }
    template <class I> Pointer operator+(I i) const { return Pointer{raw + i}; }
    explicit operator bool() const { return raw != nullptr; }
    bool operator==(const Pointer& other) const { return raw == other.raw; }
    bool operator!=(const Pointer& other) const { return raw != other.raw; }
    operator Pointer<const T, SHARED_MEMORY>() const { return {raw}; }
};

// Counts one instruction's accesses: `lanes` entries, some of them empty (bytes 0).
inline void count_group(const Access* group, const int* lane_of, int n) {
    Counters& c = block->counters;
    const Access& first = group[0];
    size_t bytes = first.bytes;
    if (!first.shared) {
        u64 sectors[2 * 64];
        int m = 0;
        for (int i = 0; i < n; i++)
            for (u64 s = group[i].at / 32; s <= (group[i].at + bytes - 1) / 32; s++) sectors[m++] = s;
        std::sort(sectors, sectors + m);
        u64 distinct = (u64)(std::unique(sectors, sectors + m) - sectors);
        (first.write ? c.write_bytes : c.read_bytes) += bytes * (u64)n;
        (first.write ? c.write_sectors : c.read_sectors) += distinct;
        return;
    }
    int phase_lanes = bytes == 16 ? 8 : bytes == 8 ? 16 : 32;
    c.shared_accesses++;
    for (int phase = 0; phase < WARP / phase_lanes; phase++) {
        u64 words[4 * 32];
        int m = 0;
        for (int i = 0; i < n; i++) {
            if (lane_of[i] / phase_lanes != phase) continue;
            for (u64 w = group[i].at / 4; w <= (group[i].at + bytes - 1) / 4; w++) words[m++] = w;
        }
        std::sort(words, words + m);
        m = (int)(std::unique(words, words + m) - words);
        u64 of_bank[32] = {}, ways = 0;
        for (int i = 0; i < m; i++) ways = std::max(ways, ++of_bank[words[i] % 32]);
        c.shared_cycles += ways;
        c.worst_ways = std::max(c.worst_ways, ways);
    }
}

inline void flush_accesses(Fiber* warp, int lanes) {
    Access group[64];
    int lane_of[64];
    std::vector<size_t> next((size_t)lanes, 0);
    bool alike = true;
    size_t n = warp[0].accesses.size();
    for (int l = 1; l < lanes && alike; l++) {
        alike = warp[l].accesses.size() == n;
        for (size_t i = 0; i < n && alike; i++) alike = warp[l].accesses[i].site == warp[0].accesses[i].site;
    }
    if (alike) {
        for (size_t i = 0; i < n; i++) {
            for (int l = 0; l < lanes; l++) group[l] = warp[l].accesses[i], lane_of[l] = l;
            count_group(group, lane_of, lanes);
        }
    } else {
        struct Keyed {
            const void* site;
            u32 nth;
            int lane;
            Access access;
        };
        std::vector<Keyed> all;
        for (int l = 0; l < lanes; l++) {
            std::vector<std::pair<const void*, u32>> seen;
            for (auto& a : warp[l].accesses) {
                auto it = std::find_if(seen.begin(), seen.end(), [&](auto& s) { return s.first == a.site; });
                if (it == seen.end()) it = seen.insert(seen.end(), {a.site, 0});
                all.push_back({a.site, it->second++, l, a});
            }
        }
        std::stable_sort(all.begin(), all.end(), [](auto& a, auto& b) { return std::pair(a.site, a.nth) < std::pair(b.site, b.nth); });
        for (size_t i = 0; i < all.size();) {
            int m = 0;
            size_t j = i;
            for (; j < all.size() && all[j].site == all[i].site && all[j].nth == all[i].nth; j++) group[m] = all[j].access, lane_of[m++] = all[j].lane;
            count_group(group, lane_of, m);
            i = j;
        }
    }
    for (int l = 0; l < lanes; l++) warp[l].accesses.clear();
}

}  // namespace emu
