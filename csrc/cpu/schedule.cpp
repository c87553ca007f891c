// From a call to units of work, and from units to threads.
//
//     sequence -> tiles of queries (up to 256 rows of one kv head) -> groups of kv heads (up to 128 rows)
//              -> runs of chunks of keys
//
// A decode step's tile is one query with all kv heads, so that a unit walks whole frames. Keys are cut only where there
// are too few units to keep every thread busy to the end: then a unit leaves partial states, and the unit of its group
// that finishes last folds them, in the order of their keys. With split_tokens the chunks are given, and a unit folds
// its own: the same sums in the same order on every thread, so neither the rest of the batch nor the number of threads
// changes a bit. Threads take units from a common counter, the most expensive first where costs differ much (causal
// tiles: the last tile sees most keys). Before a unit, a thread may copy pages of a tier (moves/spread.hpp).
#include "schedule.hpp"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <unordered_set>
#include <vector>

#include "moves/spread.hpp"
#include "team.hpp"

namespace pagedkv {
namespace {

constexpr int64_t ROWS_PER_UNIT = 128;
constexpr int64_t MOST_ROWS = 256, MANY_DIMS = 320;  // so that q, o and scores of a tile's rows stay in L2
constexpr int64_t UNITS_PER_THREAD = 4,
                  LEAST_CHUNK = 256;  // keys; each unit begins a stream, and leaves a state that one thread folds
constexpr int64_t RUNS_PER_THREAD = 8;  // of a bare read
constexpr int64_t RUNS_OF_ROWS = 32;  // of a linear operation, for each thread: the last ones end together
constexpr int64_t HEADS_PER_THREAD = 48;  // a head takes 0.2 us, to wake a team 3 us
constexpr int64_t BYTES_PER_THREAD = 128 << 10;  // less work than this is not worth another thread

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

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
                partition.cost += (span.high - span.low) * (u.k1 - u.k0) * (i1 - i0);
                partition.scratch_bytes = std::max(partition.scratch_bytes, scratch_of(a, u).bytes);
            }
        }
    }
}

// The number of units into which the keys of `u` are cut.
int64_t parts_of(const Unit& u, const Span& span, const Partition& partition, int threads) {
    if (threads == 1) return 1;
    int64_t cost = (span.high - span.low) * (u.k1 - u.k0) * (u.i1 - u.i0);
    int64_t most = threads * UNITS_PER_THREAD,
            target = std::max<int64_t>(1, (partition.cost + most - 1) / most);  // rounded up: no superfluous part
    return std::clamp<int64_t>(
        (cost + target - 1) / target, 1, std::max<int64_t>(1, (span.high - span.low) / LEAST_CHUNK));
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
    cut_keys(a, partition, threads);
    place_partials(a, partition, reinterpret_cast<float*>(partials.of(4 * partition.partial_floats)));
    int64_t scratch_bytes = round_up(partition.scratch_bytes, 4096) + 256,
            count = static_cast<int64_t>(partition.units.size());
    char* memory = scratches.of(scratch_bytes * threads);
    std::vector<std::atomic<int64_t>> arrived(partition.groups.size());
    for (auto& counter : arrived) counter = 0;
    std::atomic<int64_t> next{0};
    run_team(threads, [&](int thread) {
        char* mine = memory + thread * scratch_bytes;
        for (int64_t i; (i = next++) < count;) {
            help_to_copy(threads, bytes / count * (count - 1 - i));
            const Unit& u = partition.units[static_cast<size_t>(i)];
            Scratch scratch = scratch_of(a, u);
            isa.attend(a, u, scratch, mine);
            if (u.group < 0) continue;
            const Group& group = partition.groups[static_cast<size_t>(u.group)];
            if (++arrived[static_cast<size_t>(u.group)] == group.units)
                isa.merge(a, partition.units[static_cast<size_t>(group.first_unit)], group.states, scratch, mine);
        }
    });
}

// Cut 0 .. count - 1 into one run per thread: for work that costs the same everywhere.
static void run_evenly(int64_t count, int threads, const std::function<void(int64_t, int64_t)>& work) {
    std::atomic<int> next{0};  // not the team's index: it may have fewer threads than runs
    run_team(threads, [&](int) {
        for (int i; (i = next++) < threads;) work(count * i / threads, count * (i + 1) / threads);
    });
}

void run_write(const Isa& isa, const Write& w, int64_t tokens, int threads) {
    threads = static_cast<int>(std::clamp<int64_t>(tokens * w.K * w.D * 4 / BYTES_PER_THREAD, 1, threads));
    run_evenly(tokens, threads, [&](int64_t first, int64_t end) { isa.write(w, first, end); });
}

void run_gather(const Isa& isa, const Gather& g, int64_t rows, int threads) {
    threads = static_cast<int>(std::clamp<int64_t>(rows * g.K * g.D * 4 / BYTES_PER_THREAD, 1, threads));
    run_evenly(rows, threads, [&](int64_t first, int64_t end) { isa.gather(g, first, end); });
}

void run_merge(const Isa& isa, const States& s, int threads) {
    int64_t rows = s.T * s.H, bytes = rows * s.Dv * (s.type == Dtype::f32 ? 12 : 6);
    if (!rows) return;
    threads = static_cast<int>(std::clamp<int64_t>(bytes / BYTES_PER_THREAD, 1, threads));
    run_evenly(rows, threads, [&](int64_t first, int64_t end) { isa.merge_states(s, first, end); });
}

void run_linear(const Isa& isa, const Linear& l, int threads) {
    thread_local Memory scratches;
    int64_t rows = l.mode >= Linear::SILU ? 2 * l.N : l.N;
    int64_t streamed = rows * l.K * bits_of(l.weight_type) / 8;
    threads = static_cast<int>(std::clamp<int64_t>(streamed / BYTES_PER_THREAD, 1, threads));
    int64_t sums = round_up(l.T, 8) * LINEAR_ROWS * MAX_LANES;
    int64_t tail = std::max(3 * l.K, 3 * ROW_ROOM * (l.T + 1) + sums);
    int64_t bytes = round_up(4 * (l.T * round_up(l.K, WHOLE) + tail), 4096) + 256;
    char* memory = scratches.of(bytes * threads);
    // A thread reads its range of rows, run by run, so that a stream of memory goes on; then it helps with others.
    int64_t unit = l.N < 4 * LINEAR_ROWS * threads ? MAX_LANES : LINEAR_ROWS;
    int64_t run = round_up(std::max<int64_t>(l.N / (RUNS_OF_ROWS * threads), 1), unit);
    int64_t range = round_up((l.N + threads - 1) / threads, run);
    std::vector<std::atomic<int64_t>> taken(static_cast<size_t>(threads));
    run_team(threads, [&](int thread) {
        char* mine = memory + thread * bytes;
        isa.linear.take(l, mine);
        for (int i = 0; i < threads; i++) {
            int64_t owner = (thread + i) % threads, first = owner * range, end = std::min(first + range, l.N);
            for (int64_t at; (at = first + taken[owner].fetch_add(run)) < end;) {
                help_to_copy(threads, (end - at - run) * (streamed / l.N));
                isa.linear.rows(l, at, std::min(at + run, end), mine);
            }
        }
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
    std::atomic<int> next{0};
    run_team(threads, [&](int thread) {
        for (int i; (i = next++) < threads;)
            isa.linear.norm_rotate(h, rows * i / threads, rows * (i + 1) / threads, memory + thread * bytes);
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
    run_evenly(count, threads, [&](int64_t first, int64_t end) {
        for (int64_t i = first; i < end; i++)
            std::memcpy(frames + frame(i, 1) * stride, from[static_cast<size_t>(i)], static_cast<size_t>(bytes));
    });
}

uint64_t run_read(const Isa& isa, const char* base, const int64_t* offsets, int64_t count, int64_t bytes, int threads) {
    std::atomic<uint64_t> sum{0};
    std::atomic<int64_t> next{0};
    run_team(threads, [&](int) {
        int64_t runs = std::max<int64_t>(1, count / (threads * RUNS_PER_THREAD));
        for (int64_t i; (i = next.fetch_add(runs)) < count;)
            sum ^= isa.read(base, offsets + i, std::min(runs, count - i), bytes);
    });
    return sum;
}

}  // namespace pagedkv
