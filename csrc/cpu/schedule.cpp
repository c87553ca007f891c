// From a call to units of work, and from units to threads.
//
//     sequence -> tiles of queries (up to 256 rows of one kv head) -> groups of kv heads (up to 128 rows)
//              -> runs of chunks of keys
//
// A decode step's tile is one query with all kv heads, so that a unit walks whole frames. Keys are cut only where there
// are too few units to keep every thread busy to the end: then a unit leaves partial states, and the unit of its group
// that finishes last folds them, in the order of their keys. If many threads would wait for a long chain of states, the
// team folds them in a second run, kv head by kv head. Heads are cut only where there are fewer chunks of keys than
// threads. With split_tokens the chunks are given, and a unit folds its own: the same sums in the same order on every
// thread, so neither the rest of the batch nor the number of threads changes a bit. Threads take units from a common
// counter, the most expensive first where costs differ much (causal tiles: the last tile sees most keys), or each its
// own, if there is one for each. Before a unit, a thread may copy pages of a tier (moves/spread.hpp).
#include "schedule.hpp"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <unordered_set>
#include <vector>

#include "moves/spread.hpp"
#include "team.hpp"

namespace pagedkv {
namespace {

constexpr int64_t ROWS_PER_UNIT = 128;
constexpr int64_t MOST_ROWS = 256, MANY_DIMS = 320;  // so that q, o and scores of a tile's rows stay in L2
constexpr int64_t UNITS_PER_THREAD = 4,
                  LEAST_CHUNK = 256;  // keys; each unit begins a stream, and leaves a state that is folded
constexpr int MANY_THREADS = 16;  // then each has one unit, where units of that size load all threads evenly
constexpr int64_t LONG_CHAIN = 8;  // states; to fold fewer takes no longer than to have a team of many threads meet
constexpr int FEW_THREADS = 8, FEW_TOKENS = 4;  // each of few threads norms x for itself; each thread, few tokens
constexpr int64_t RUNS_PER_THREAD = 8;  // of a bare read
constexpr int64_t RUNS_OF_ROWS = 32;  // of a linear operation, for each thread: the last ones end together
constexpr int64_t HEADS_PER_THREAD = 48;  // a head takes 0.2 us, to wake a team 3 us
constexpr int64_t BYTES_PER_THREAD = 128 << 10;  // less work than this is not worth another thread

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// In a cache line of its own.
struct alignas(64) Counter {
    std::atomic<int64_t> value{0};
};

// Parts 0 .. count - 1 of a team's work, `step` at a time. A thread takes from its own range, so that it meets the same
// memory in each call, and then helps with the others. To add to a counter in another core's cache takes ten times as
// long as in its own: so a thread looks before it adds.
class Parts {
    const int64_t count, step, ranges, range;
    Counter first;  // of the ranges; the small calls of one thread allocate nothing
    std::vector<Counter> others;

public:
    Parts(int64_t count, int64_t step, int64_t ranges)
        : count(count),
          step(step),
          ranges(ranges),
          range(round_up((count + ranges - 1) / ranges, step)),
          others(static_cast<size_t>(ranges - 1)) {}
    // Call work(first part, end, parts that are left in the range) until all are taken.
    template <class F>
    void each(int thread, const F& work) {
        for (int64_t i = 0; i < ranges; i++) {
            int64_t owner = (thread + i) % ranges, begin = owner * range, end = std::min(begin + range, count), at;
            std::atomic<int64_t>& taken = (owner ? others[static_cast<size_t>(owner - 1)] : first).value;
            while (begin + taken.load(std::memory_order_relaxed) < end && (at = begin + taken.fetch_add(step)) < end)
                work(at, std::min(at + step, end), std::max<int64_t>(0, end - at - step));
        }
    }
};

Scratch scratch_of(const Attention& a, const Unit& u) {
    Scratch scratch{};
    scratch.rows = (u.k1 - u.k0) * (u.i1 - u.i0) * (a.H / a.K);
    scratch.Dp = round_up(a.D, PADDING), scratch.Dvp = round_up(a.Dv, PADDING);
    scratch.state_floats = round_up(scratch.rows * (scratch.Dvp + 2), 16);
    scratch.decoded = std::max(AT_ONCE * scratch.Dp, TILE * scratch.Dvp),
    scratch.packed = AT_ONCE * std::max(scratch.Dp, TILE);
    int64_t padded = (u.k1 - u.k0) * round_up((u.i1 - u.i0) * (a.H / a.K), 4),
            vectors = scratch.decoded + scratch.packed + scratch.Dp;
    scratch.bytes = 4 *
        round_up(2 * scratch.state_floats + padded * (4 * MAX_LANES + TILE + scratch.Dp + scratch.Dvp) + vectors, 16);
    return scratch;
}

// Scratch memory that grows and never shrinks: the next step needs as much, and fresh pages cost more than the work.
struct Memory {
    std::unique_ptr<char, decltype(&std::free)> held{nullptr, std::free};
    int64_t size = 0;
    char* of(int64_t bytes) {
        if (bytes > size) {
            size = round_up(bytes + bytes / 2, 4096);
            held.reset(static_cast<char*>(std::aligned_alloc(4096, static_cast<size_t>(size))));
            if (!held) size = 0, throw std::bad_alloc();
        }
        return held.get();
    }
};

struct Group {
    int64_t first_unit, units, states;
};

struct Partition {
    std::vector<Unit> units;
    std::vector<Group> groups;
    int64_t partial_floats = 0, scratch_bytes = 0, cost = 0;
    bool is_one_wave = false;  // each thread has one unit at most
};

struct Span {  // the keys that some queries can see
    int64_t low, high;
};

int64_t right_of(const Attention& a, int64_t b) {
    bool causal = a.causal_of.data ? a.causal_of.data[b * a.causal_of.stride[0]] : a.causal;
    return causal && !a.tree.data ? 0 : a.right;
}

Span span_of(const Attention& a, int64_t b, int64_t i0, int64_t i1, int64_t right) {
    int64_t n = a.seq_lens[b], position = n - (a.cu_seqlens_q[b + 1] - a.cu_seqlens_q[b]) + i0;
    int64_t low = a.window ? std::max<int64_t>(0, position - a.window + 1) : 0;
    int64_t high = std::min(n, position + i1 - i0 + right);
    return {std::min(low, std::max<int64_t>(high, 0)), std::max<int64_t>(high, 0)};
}

int64_t cost_of(const Unit& u, const Span& span) { return (span.high - span.low) * (u.k1 - u.k0) * (u.i1 - u.i0); }

// Make the units that hold whole rows; keys are not cut yet.
void whole_units(const Attention& a, Partition& partition) {
    int64_t G = a.H / a.K, per_tile = std::max<int64_t>(1, (a.D + a.Dv > MANY_DIMS ? MOST_ROWS / 2 : MOST_ROWS) / G);
    for (int64_t b = 0; b < a.B; b++) {
        int64_t m = a.cu_seqlens_q[b + 1] - a.cu_seqlens_q[b], tiles = (m + per_tile - 1) / per_tile;
        int64_t right = right_of(a, b);
        for (int64_t tile = tiles - 1; tile >= 0; tile--) {
            int64_t i0 = tile * per_tile, i1 = std::min(m, i0 + per_tile);
            int64_t heads = std::clamp<int64_t>(ROWS_PER_UNIT / ((i1 - i0) * G), 1, a.K);
            Span span = span_of(a, b, i0, i1, right);
            for (int64_t k0 = 0; k0 < a.K; k0 += heads) {
                int64_t k1 = std::min(a.K, k0 + heads), chunk = std::max<int64_t>(1, span.high);
                Unit u{b, i0, i1, k0, k1, 0, 1, chunk, right, nullptr, -1};
                partition.units.push_back(u);
                partition.cost += cost_of(u, span);
                partition.scratch_bytes = std::max(partition.scratch_bytes, scratch_of(a, u).bytes);
            }
        }
    }
}

// Cut kv heads where the keys make fewer units than `wanted` for all sequences.
void cut_heads(const Attention& a, Partition& partition, int threads, int64_t wanted) {
    std::vector<Unit> whole;
    whole.swap(partition.units);
    int64_t all_parts = 0;
    bool is_even = true;
    for (Unit u : whole) {
        Span span = span_of(a, u.b, u.i0, u.i1, u.right);
        int64_t units = (cost_of(u, span) * wanted + partition.cost - 1) / partition.cost, k1 = u.k1;
        int64_t chunks = std::max<int64_t>(1, (span.high - span.low) / std::max(LEAST_CHUNK, a.split_tokens));
        int64_t heads = std::max<int64_t>(1, (k1 - u.k0) / std::max<int64_t>(1, (units + chunks - 1) / chunks));
        for (; u.k0 < k1; u.k0 += heads) {
            u.k1 = std::min(k1, u.k0 + heads);
            partition.units.push_back(u);
            int64_t cost = cost_of(u, span) * threads, parts = std::max<int64_t>(1, cost / partition.cost);
            all_parts += parts, is_even &= 4 * cost <= 5 * partition.cost * parts;
        }
    }
    partition.is_one_wave = threads >= MANY_THREADS && is_even && all_parts <= threads;
}

// The number of units into which the keys of `u` are cut.
int64_t parts_of(const Unit& u, const Span& span, const Partition& partition, int threads) {
    if (threads == 1) return 1;
    int64_t most = threads * UNITS_PER_THREAD,
            target = std::max<int64_t>(1, (partition.cost + most - 1) / most);  // rounded up: no superfluous part
    int64_t cost = cost_of(u, span), parts = (cost + target - 1) / target;
    if (partition.is_one_wave) parts = cost * threads / partition.cost;
    return std::clamp<int64_t>(parts, 1, std::max<int64_t>(1, (span.high - span.low) / LEAST_CHUNK));
}

void cut_keys(const Attention& a, Partition& partition, int threads) {
    std::vector<Unit> whole;
    whole.swap(partition.units);
    for (Unit u : whole) {
        Span span = span_of(a, u.b, u.i0, u.i1, u.right);
        int64_t parts = parts_of(u, span, partition, threads);
        if (whole.size() == 1 && parts > threads)
            parts -= parts % threads;  // the last part would be computed by one thread alone
        if (a.split_tokens) u.chunk = a.split_tokens;
        else if (parts > 1)
            u.chunk = round_up((span.high - span.low + parts - 1) / parts, a.S <= LEAST_CHUNK ? a.S : 1);
        u.c0 = span.low / u.chunk, u.c1 = std::max(u.c0 + 1, (span.high + u.chunk - 1) / u.chunk);
        int64_t chunks = u.c1 - u.c0, first = u.c0, end = u.c1, per_unit = (chunks + parts - 1) / parts;
        if (parts == 1 || chunks == 1) {
            partition.units.push_back(u);
            continue;
        }
        u.group = static_cast<int64_t>(partition.groups.size());
        partition.groups.push_back(
            {static_cast<int64_t>(partition.units.size()), (chunks + per_unit - 1) / per_unit, chunks});
        for (int64_t c = first; c < end; c += per_unit) {
            u.c0 = c, u.c1 = std::min(end, c + per_unit);
            partition.units.push_back(u);
        }
        partition.partial_floats += chunks * scratch_of(a, u).state_floats;
    }
}

void place_partials(const Attention& a, Partition& partition, float* memory) {
    for (const Group& group : partition.groups) {
        for (int64_t i = group.first_unit; i < group.first_unit + group.units; i++) {
            Unit& u = partition.units[static_cast<size_t>(i)];
            u.partial = memory;
            memory += (u.c1 - u.c0) * scratch_of(a, u).state_floats;
        }
    }
}

int64_t bits_of(Dtype type) {
    if (type == Dtype::i4) return 4;
    return type == Dtype::f32 ? 32 : type == Dtype::i8 ? 8 : 16;
}

}  // namespace

void run_attention(const Isa& isa, const Attention& a, int threads) {
    thread_local Memory scratches, partials;
    Partition partition;
    whole_units(a, partition);
    int64_t bytes = partition.cost * (a.D + a.Dv) * 2;
    threads = static_cast<int>(std::clamp<int64_t>(bytes / BYTES_PER_THREAD, 1, threads));
    if (threads > FEW_THREADS) cut_heads(a, partition, threads, threads);
    if (threads >= MANY_THREADS && !partition.is_one_wave)
        cut_heads(a, partition, threads, threads * UNITS_PER_THREAD);
    cut_keys(a, partition, threads);
    place_partials(a, partition, reinterpret_cast<float*>(partials.of(4 * partition.partial_floats)));
    int64_t scratch_bytes = round_up(partition.scratch_bytes, 4096) + 256,
            count = static_cast<int64_t>(partition.units.size());
    char* memory = scratches.of(scratch_bytes * threads);
    std::vector<Counter> arrived(partition.groups.size());
    const auto is_long = [&](const Group& group) { return threads >= MANY_THREADS && group.states >= LONG_CHAIN; };
    std::vector<Unit> chains;  // of one kv head each
    for (const Group& group : partition.groups) {
        Unit u = partition.units[static_cast<size_t>(group.first_unit)];
        for (int64_t end = u.k1; is_long(group) && u.k0 < end; u.k0++) u.k1 = u.k0 + 1, chains.push_back(u);
    }
    const auto fold = [&](const Unit& u, const Group& group, char* mine) {
        const Unit& first = partition.units[static_cast<size_t>(group.first_unit)];
        isa.merge(a, u, first.k0, group.states, scratch_of(a, first), mine);
    };
    Parts units(count, 1, count <= threads ? std::max<int64_t>(1, count) : 1);
    run_team(threads, [&](int thread) {
        char* mine = memory + thread * scratch_bytes;
        units.each(thread, [&](int64_t i, int64_t, int64_t) {
            help_to_copy(threads, bytes / count * (count - 1 - i));
            const Unit& u = partition.units[static_cast<size_t>(i)];
            isa.attend(a, u, scratch_of(a, u), mine);
            if (u.group < 0) return;
            const Group& group = partition.groups[static_cast<size_t>(u.group)];
            if (!is_long(group) && ++arrived[static_cast<size_t>(u.group)].value == group.units)
                fold(partition.units[static_cast<size_t>(group.first_unit)], group, mine);
        });
    });
    if (chains.empty()) return;
    count = static_cast<int64_t>(chains.size());
    Parts parts(count, 1, std::min<int64_t>(count, threads));
    run_team(static_cast<int>(std::min<int64_t>(count, threads)), [&](int thread) {
        parts.each(thread, [&](int64_t i, int64_t, int64_t) {
            const Unit& u = chains[static_cast<size_t>(i)];
            fold(u, partition.groups[static_cast<size_t>(u.group)], memory + thread * scratch_bytes);
        });
    });
}

// Cut 0 .. count - 1 into one run per thread: for work(first, end, thread) that costs the same everywhere.
template <class F>
static void run_evenly(int64_t count, int threads, const F& work) {
    Parts parts(count, std::max<int64_t>(1, (count + threads - 1) / threads), threads);
    run_team(threads, [&](int thread) {
        parts.each(thread, [&](int64_t first, int64_t end, int64_t) { work(first, end, thread); });
    });
}

void run_write(const Isa& isa, const Write& w, int64_t tokens, int threads) {
    threads = static_cast<int>(std::clamp<int64_t>(tokens * w.K * w.D * 4 / BYTES_PER_THREAD, 1, threads));
    run_evenly(tokens, threads, [&](int64_t first, int64_t end, int) { isa.write(w, first, end); });
}

void run_gather(const Isa& isa, const Gather& g, int64_t rows, int threads) {
    threads = static_cast<int>(std::clamp<int64_t>(rows * g.K * g.D * 4 / BYTES_PER_THREAD, 1, threads));
    run_evenly(rows, threads, [&](int64_t first, int64_t end, int) { isa.gather(g, first, end); });
}

void run_merge(const Isa& isa, const States& s, int threads) {
    int64_t rows = s.T * s.H, bytes = rows * s.Dv * (s.type == Dtype::f32 ? 12 : 6);
    if (!rows) return;
    threads = static_cast<int>(std::clamp<int64_t>(bytes / BYTES_PER_THREAD, 1, threads));
    run_evenly(rows, threads, [&](int64_t first, int64_t end, int) { isa.merge_states(s, first, end); });
}

void run_linear(const Isa& isa, const Linear& l, int threads) {
    thread_local Memory scratches;
    int64_t rows = l.mode >= Linear::SILU ? 2 * l.N : l.N;
    int64_t streamed = rows * l.K * bits_of(l.weight_type) / 8;
    threads = static_cast<int>(std::clamp<int64_t>(streamed / BYTES_PER_THREAD, 1, threads));
    int64_t sums = round_up(l.T, 8) * LINEAR_ROWS * MAX_LANES;
    int64_t tail = std::max(3 * l.K, 3 * ROW_ROOM * (l.T + 1) + sums);
    int64_t x_bytes = 4 * l.T * round_up(l.K, WHOLE), bytes = round_up(x_bytes + 4 * tail, 4096) + 256;
    bool is_shared = l.norm && threads > FEW_THREADS && l.T > FEW_TOKENS;  // x is normed once, for all threads
    char *memory = scratches.of(bytes * (threads + is_shared)), *shared = memory + bytes * threads;
    // A thread reads its range of rows, run by run, so that a stream of memory goes on; then it helps with others.
    int64_t unit = l.N < 4 * LINEAR_ROWS * threads ? MAX_LANES : LINEAR_ROWS;
    int64_t run = round_up(std::max<int64_t>(l.N / (RUNS_OF_ROWS * threads), 1), unit);
    Parts runs(l.N, run, threads), tokens(l.T, 1, std::min<int64_t>(l.T, threads));
    Counter normed;
    run_team(threads, [&](int thread) {
        char* mine = memory + thread * bytes;
        if (!is_shared) isa.linear.take(l, 0, l.T, mine, mine + x_bytes);
        else {
            tokens.each(thread, [&](int64_t first, int64_t end, int64_t) {
                isa.linear.take(l, first, end, shared, mine + x_bytes);
                normed.value++;
            });
            while (normed.value < l.T) std::this_thread::yield();
            std::memcpy(mine, shared, static_cast<size_t>(x_bytes));
        }
        runs.each(thread, [&](int64_t first, int64_t end, int64_t left) {
            help_to_copy(threads, left * (streamed / l.N));
            isa.linear.rows(l, first, end, mine);
        });
    });
}

void run_add_normed(const Isa& isa, const AddNormed& a) {
    thread_local Memory scratches;
    isa.linear.add_normed(a, scratches.of(12 * a.N + 256));
}

void run_norm_rotate(const Isa& isa, const NormRotate& h, int threads) {
    thread_local Memory scratches;
    int64_t rows = h.T * (h.H + h.K), bytes = 16 * h.D + 256;
    threads = static_cast<int>(std::clamp<int64_t>(rows / HEADS_PER_THREAD, 1, threads));
    char* memory = scratches.of(bytes * threads);
    run_evenly(rows, threads, [&](int64_t first, int64_t end, int thread) {
        isa.linear.norm_rotate(h, first, end, memory + thread * bytes);
    });
}

void run_delta(const Isa& isa, const DeltaRule& d, int64_t tokens, int threads) {
    thread_local Memory scratches;
    int64_t items = d.frames.B * d.H, head = 4 * d.K * d.V;
    threads = static_cast<int>(std::clamp<int64_t>((items + tokens * d.H) * head / BYTES_PER_THREAD, 1, threads));
    threads = static_cast<int>(std::min<int64_t>(threads, items));
    int64_t floats = round_up(d.K * d.V + (2 * CHUNK + 2) * d.K + CHUNK * d.V, 1024) + 64;
    float* memory = reinterpret_cast<float*>(scratches.of(4 * floats * threads));
    Parts heads(items, 1, threads);  // rows may have one token or thousands
    run_team(threads, [&](int thread) {
        heads.each(thread, [&](int64_t first, int64_t end, int64_t left) {
            help_to_copy(threads, left * head);
            isa.recurrent.delta(d, first, end, memory + thread * floats);
        });
    });
}

void run_conv(const Isa& isa, const CausalConv& c, int64_t tokens, int threads) {
    threads = static_cast<int>(std::clamp<int64_t>((c.frames.B + tokens) * c.C * c.W / BYTES_PER_THREAD, 1, threads));
    run_evenly((c.C + CONV_CHANNELS - 1) / CONV_CHANNELS, threads, [&](int64_t first, int64_t end, int) {
        isa.recurrent.conv(c, first, end);
    });
}

void run_copies(char* frames, int64_t stride, int64_t bytes, const char* copies, int64_t copies_stride, int64_t count,
    int threads) {
    const auto frame = [&](int64_t i, int side) {
        return reinterpret_cast<const int32_t*>(copies + i * copies_stride)[side];
    };
    std::unordered_set<int32_t> written;
    for (int64_t i = 0; i < count; i++) written.insert(frame(i, 1));
    std::vector<const char*> from(static_cast<size_t>(count));
    std::vector<std::vector<char>> saved;  // sources that are also destinations
    for (int64_t i = 0; i < count; i++) {
        const char* source = frames + frame(i, 0) * stride;
        if (written.count(frame(i, 0))) source = saved.emplace_back(source, source + bytes).data();
        from[static_cast<size_t>(i)] = source;
    }
    threads = static_cast<int>(std::clamp<int64_t>(count * bytes / BYTES_PER_THREAD, 1, threads));
    run_evenly(count, threads, [&](int64_t first, int64_t end, int) {
        for (int64_t i = first; i < end; i++)
            std::memcpy(frames + frame(i, 1) * stride, from[static_cast<size_t>(i)], static_cast<size_t>(bytes));
    });
}

uint64_t run_read(const Isa& isa, const char* base, const int64_t* offsets, int64_t count, int64_t bytes, int threads) {
    std::atomic<uint64_t> sum{0};
    Parts runs(count, std::max<int64_t>(1, count / (threads * RUNS_PER_THREAD)), 1);
    run_team(threads, [&](int thread) {
        runs.each(thread, [&](int64_t first, int64_t end, int64_t) {
            sum ^= isa.read(base, offsets + first, end - first, bytes);
        });
    });
    return sum;
}

}  // namespace pagedkv
