// paged_attention: the new tokens of a batch attend to the cached tokens of their sequences. The same kernel serves
// decode, verification of drafts, chunked prefill and prefill.
//
//     out[i,h,:] = sum_t softmax_t(scale * q[i,h,:] . K(b,t,h/G)) * V(b,t,h/G)        t seen by query i of sequence b
//     K(b,t,k)   = k_pool[block_table[row(b), t / S], k, t % S, :]                     V(b,t,k) is read in the same way
//
// Grid      as many CTAs as fit on the GPU. Each takes an equal share of the keys and finds it by itself
//           (partition.cuh).
// A unit    ROWS rows, which are (query, head of the group) pairs of one sequence and one kv head: all heads of a group
//           use each byte of KV that is read.
// A CTA     WARPS_N teams of WARPS_M (x WARPS_D, for wide heads) warps. A team takes every WARPS_N-th tile of keys, a
//           warp 8 or 16 rows. Teams do not wait for one another until the unit ends. A decode has four teams of one
//           warp, so no barrier of the block stands between two tiles of keys.
// Stages    buffers in shared memory, each team's own: STAGES - 1 tiles are in flight while one is computed. With D =
//           128, bf16, 2 stages and 2 CTAs, an SM has 70 KB in flight; latency x bandwidth of an H200 needs about 30.
// Bytes     (D + Dv) * sizeof(kv) per token and kv head, 4 per token of page table (from cache), the queries and
//           results. Partial states of shared units: 4 * (Dv + 2) per row, at most two per CTA.
// Merging   several CTAs may work on one unit. Each stores its partial state and draws a ticket: it counts itself in
//           with an atomic add. The CTA that arrives last merges the partial states, so there is no second launch.
// Code      size counts: a CTA that works for 5 us runs most of its instructions once, each of them a miss of the
//           instruction cache. So loops that run once per unit are not unrolled, and work for no key is skipped.
// Tuned     on an H200: tiles of narrow keys, what a CTA does before its first and after its last key, even cuts,
//           stages, and which bytes the L2 cache drops first.
//           docs/explanation/h200.md has the figures.
//
// Never read: slots >= seq_lens[b], table entries after the last page, holes. They may hold NaN and frame
// numbers outside the pool.
#include "merge.cuh"
#include "params.h"
#include "partition.cuh"
#include "scores.cuh"
#include "specialisation.cuh"
#include "stages.cuh"

struct ThreadRole {  // what this thread works on
    u32 base, thread, lane, team, team_thread, first_row;
    u32 part;  // which of the WARPS_D parts of the head dim
};

// Set the marked rows to NaN.
DEVICE void spoil(State& state, u32 marks, u32 lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (!ptx::shared_read<u32>(marks + 4 * row_of_lane(lane, r))) continue;
#pragma unroll
        for (int n = 0; n < VALUE_TILES; ++n) {
            state.o[n][element_of(r, 0)] = state.o[n][element_of(r, 1)] = ptx::as_float(0x7fc00000u);
        }
    }
}

// Return what a row may see. Row `x` of a unit is head x % G of query x / G. A row past the unit's last query holds
// zeros and may see every key; its result is not stored.
DEVICE Row row_of(const AttentionParams& p, const Unit& unit, i32 group, i32 in_tile) {
    const auto [query, head] = unit_row(unit, group, unit.tile * ROWS + in_tile);
    const i32 old = unit.length - unit.queries;
    Row row{old + query, 0, 0x7fffffff, old, nullptr, 0.0f};
    if (query >= unit.queries) return row;
    row.end = row.position + 1 + unit.right < unit.length ? row.position + 1 + unit.right : unit.length;
    row.begin = p.window && row.position + 1 > p.window ? row.position + 1 - p.window : 0;
    if (p.tree_mask) row.tree = p.tree_mask + (unit.first_query + query) * p.tree_row;
    if (p.slopes) row.slope = ptx::read(p.slopes + unit.head * group + head) * LOG2_E;
    return row;
}

// Return the address of a query row in global memory, and whether the unit has it.
DEVICE const u8* query_at(const AttentionParams& p, const Unit& unit, i32 group, i32 in_tile, bool& there) {
    const auto [query, head] = unit_row(unit, group, unit.tile * ROWS + in_tile);
    there = query < unit.queries;
    return static_cast<const u8*>(p.q) + (unit.first_query + query) * p.q_token +
           (unit.head * group + head) * p.q_head;
}

// Read four elements of a query row; zeros if it is not `there`.
DEVICE Quad4 read_query(const AttentionParams& p, const u8* row, i32 column, bool there) {
    return there ? read_quad<Q_KIND>(row, column, D, p.q_vectors) : Quad4{};
}

// The elements of a query row that a lane reads for load_rows, four at a time.
struct LaneQueries {
    static constexpr i32 QUADS = (D / 4 + 31) / 32;
    Quad4 x[QUADS];
};

constexpr bool BY_ROWS = Elements::SCALED_QUERIES || ROTATED;
// Whether a lane has registers for them while it fetches the first keys.
constexpr bool READS_EARLY = BY_ROWS && LaneQueries::QUADS == 1;

DEVICE LaneQueries read_queries(const AttentionParams& p, const Unit& unit, i32 group, i32 row, u32 lane) {
    LaneQueries mine;
    bool there;
    const u8* from = query_at(p, unit, group, row, there);
    there = there && row < ROWS;
#pragma unroll
    for (i32 quad = 0; quad < LaneQueries::QUADS; ++quad) {
        const i32 column = 4 * (32 * quad + static_cast<i32>(lane));
        mine.x[quad] = read_query(p, from, column, there && column < D);
    }
    return mine;
}

// Rotate a query. Return what the centre of the keys adds to each of its scores, in their units.
DEVICE float rotate_query(LaneQueries& mine, const AttentionParams& p, i32 head, u32 lane) {
    float bias = 0.0f;
    if (p.calibration) {
        const float* centre = p.calibration + head * (2 * D);
#pragma unroll
        for (u32 e = 0; e < 4 * LaneQueries::QUADS; ++e) {
            const u32 column = 4 * (e / 4 * 32 + lane) + e % 4;
            if (column >= D) continue;
            float& x = mine.x[e / 4].at[e % 4];
            bias = ptx::fused(x, ptx::read(centre + column), bias);
            x = ptx::times(x, ptx::read(centre + D + column));
        }
        bias = over_row<32>(bias, ptx::plus) * p.scale;
    }
    rotate<D, 32, false>(mine.x, lane);
    return bias;
}

// Copy four columns of a query into shared memory, where operands of int5 are in the order of key_operands. Return what
// these columns add to the offset of the scores.
DEVICE float store_query(u32 row, i32 column, const Quad4& x, float power) {
    constexpr int N = Elements::Q_TERMS;
    constexpr bool HALF = Elements::QK_HALF;
    u32 low[N], high[N];
    split_pair<N, HALF>(low, x.at[0] * power, x.at[1] * power);
    split_pair<N, HALF>(high, x.at[2] * power, x.at[3] * power);
    float offset = 0.0f;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const u32 to = row + n * Q_TERM_BYTES;
        if constexpr (K_KIND == INT5) {
            const i32 lane = column / 8 / WORDS, word = column / 8 % WORDS;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const u16 bits = static_cast<u16>((i < 2 ? low[n] : high[n]) >> 16 * (i % 2));
                ptx::shared_write(to + 2 * (32 * word + 4 * lane + 16 * (i / 2) + 2 * (i % 2) + column / 4 % 2), bits);
                offset = ptx::fused(to_float<HALF ? F16 : BF16>(bits), offset_of(i), offset);
            }
        } else {
            ptx::shared_write(to + 2 * column, static_cast<u64>(high[n]) << 32 | low[n]);
        }
    }
    return offset;
}

// Copy the unit's queries into shared memory, rotated, or as f16, or both. A row of f16 is multiplied by the power of
// two that brings its largest finite element to [2^14, 2^15). A warp takes a row, whose elements are `mine`, and reads
// its next row meanwhile. It stores what changes the row's scores: the inverse of the power, the bias, and the sum that
// they begin at. Rows past the unit's last query become zeros, while others are read.
DEVICE void load_rows(LaneQueries mine, const AttentionParams& p, const Unit& unit, i32 group, const ThreadRole& me) {
    constexpr i32 QUADS = LaneQueries::QUADS, WARPS = THREADS / 32;
    const i32 num_rows = rows_of(unit, group);
#pragma unroll 1
    for (u32 quad = static_cast<u32>(num_rows) * (Q_D / 4) + me.thread; quad < ROWS * Q_D / 4; quad += THREADS) {
#pragma unroll
        for (int n = 0; n < Elements::Q_TERMS; ++n) {
            ptx::shared_write(me.base + n * Q_TERM_BYTES + quad / (Q_D / 4) * Q_STRIDE + quad % (Q_D / 4) * 8, u64{0});
        }
    }
    const auto store_facts = [&](u32 row, float inverse, float bias, float start) {
        ptx::shared_write(me.base + Q_INVERSES_AT + 4 * row, inverse);
        if constexpr (ROTATED) {
            ptx::shared_write(me.base + BIASES_AT + 4 * row, bias);
            ptx::shared_write(me.base + STARTS_AT + 4 * row, start);
        }
    };
    if (me.thread >= static_cast<u32>(num_rows) && me.thread < ROWS) store_facts(me.thread, 1.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (i32 row = static_cast<i32>(me.thread / 32); row < num_rows; row += WARPS) {
        const LaneQueries next = read_queries(p, unit, group, row + WARPS, me.lane);
        float bias = 0.0f;
        if constexpr (ROTATED) bias = rotate_query(mine, p, unit.head, me.lane);
        u32 top = 15 << 23;  // so that the power is finite
#pragma unroll
        for (i32 e = 0; e < 4 * QUADS; ++e) {
            const u32 magnitude = ptx::as_bits(mine.x[e / 4].at[e % 4]) & 0x7fffffffu;
            top = magnitude < 0x7f800000u ? largest(magnitude, top) : top;
        }
        top = over_row<32>(top, largest);
        const u32 exponent = Elements::SCALED_QUERIES ? top >> 23 : 141;  // 127 + e for a power 2^(14 - e)
        float offset = 0.0f;
#pragma unroll
        for (i32 quad = 0; quad < QUADS; ++quad) {
            const i32 column = 4 * (32 * quad + static_cast<i32>(me.lane));
            const float power = ptx::as_float((268 - exponent) << 23);
            if (column < Q_D) offset += store_query(me.base + row * Q_STRIDE, column, mine.x[quad], power);
        }
        if constexpr (K_KIND == INT5) offset = over_row<32>(offset, ptx::plus);
        if (me.lane == 0) store_facts(row, ptx::as_float((exponent - 14) << 23), bias, -offset);
        mine = next;
    }
}

// Copy the unit's queries into shared memory, four elements at a time, as Q_TERMS 16-bit terms each. One term is an
// asynchronous copy where addresses allow it.
DEVICE void load_queries(const AttentionParams& p, const Unit& unit, i32 group, const ThreadRole& me) {
    constexpr int N = Elements::Q_TERMS;
#pragma unroll QUERIES_AHEAD
    for (u32 quad = me.thread; quad < ROWS * D / 4; quad += THREADS) {
        const i32 in_tile = static_cast<i32>(quad / (D / 4)), column = static_cast<i32>(quad % (D / 4)) * 4;
        const u32 to = me.base + in_tile * Q_STRIDE;
        bool there;
        const u8* from = query_at(p, unit, group, in_tile, there);
        if (N == 1 && p.q_vectors) {
            ptx::copy_async<8>(to + 2 * column, there ? from + 2 * column : static_cast<const u8*>(p.q), there);
        } else {
            store_query(to, column, read_query(p, from, column, there), 1.0f);
        }
    }
    ptx::copy_commit();
}

// The words that mark the rows of a warp. They lie where m of these rows will be stored.
DEVICE u32 marks_at(u32 team, u32 first_row) { return TEAM_STATS_AT + 4 * (team * ROWS + first_row); }

// A team's way through its tiles of the keys [from, to), as a pipeline: while one tile is computed, the next STAGES - 1
// are in flight.
struct Walk {
    Tile next;  // to fetch
    Step step;
    i32 first_key, steps;
    u32 filling;  // the stage that the next tile goes to
    u32 filled;  // address of the stage of the last tile, in which its scales are not yet
};

// Begin at the first tile of the keys [from, to): look up its frames. EARLY: see stages.cuh.
template <bool EARLY = false>
DEVICE void begin(Walk& walk, const AttentionParams& p, const Pages& pages, i32 from, i32 to, const ThreadRole& me) {
    walk.first_key = from + static_cast<i32>(me.team) * TILE;
    walk.steps = walk.first_key < to ? (to - walk.first_key + STEP_TOKENS - 1) / STEP_TOKENS : 0;
    walk.step = step_of(p);
    walk.next = first_tile<EARLY>(p, pages, walk.first_key, to);
}

// Fetch the first STAGES - 1 tiles.
DEVICE void fetch_first(Walk& walk, const AttentionParams& p, const Pages& pages, const ThreadRole& me) {
    const u32 stages = me.base + STAGES_AT + me.team * STAGES_BYTES;
#pragma unroll 1
    for (walk.filling = 0; walk.filling < STAGES - 1; ++walk.filling) {
        const Tile last = walk.next;
        fetch(walk.next, p, pages, stages + walk.filling * STAGE_BYTES, me.team_thread);
        if (walk.filling) store_scales(walk.filled, last, me.team_thread);
        walk.filled = stages + walk.filling * STAGE_BYTES;
        advance(walk.next, p, pages, walk.step);
    }
}

// Attend to the tiles. `apart`: see set_apart in scores.cuh.
DEVICE void attend(State& state, const AttentionParams& p, const Pages& pages, const Queries& queries,
                   const Row (&rows)[2], Walk& walk, const ThreadRole& me, bool apart) {
    const u32 stages = me.base + STAGES_AT + me.team * STAGES_BYTES;
    const u32 warp_scores = me.first_row / WARP_ROWS * (SCORES_BYTES / WARPS_M);
    const u32 scores = me.base + SCORES_AT + me.team * SCORES_BYTES + warp_scores;
    const Sharing sharing{me.team, me.part, scores, me.base + marks_at(me.team, me.first_row)};
    u32 reading = 0;
    i32 key = walk.first_key;
    for (i32 step = 0; step < walk.steps; ++step, key += STEP_TOKENS) {
        store_scales(walk.filled, walk.next, me.team_thread);
        ptx::copy_wait<STAGES - 2>();
        sync_team(me.team);  // the tile has landed for all threads; no thread reads the stage that is filled next
        walk.filled = stages + walk.filling * STAGE_BYTES;
        fetch(walk.next, p, pages, walk.filled, me.team_thread);
        walk.filling = walk.filling + 1 == STAGES ? 0 : walk.filling + 1;
        advance(walk.next, p, pages, walk.step);
        attend_tile(state, p, queries, rows, key, stages + reading * STAGE_BYTES, sharing, apart);
        reading = reading + 1 == STAGES ? 0 : reading + 1;
    }
    ptx::copy_wait<0>();
}

// The bits of a ticket that count the pieces of a unit. The other 43 bits hold the number of the launch: they last for
// 27 years at 10,000 launches of a kind a second.
constexpr int PIECE_BITS = 21;
static_assert((i64{1} << 30) / (4 * PartialState::SIZE) < i64{1} << PIECE_BITS, "Python allows 2^30 bytes of pieces");

// Draw a ticket of the unit whose first partial state is `first`: count this CTA in. Return true for the last of
// `expected` CTAs; that CTA then sees what all the others stored. A launch counts from its number * 2^PIECE_BITS, so it
// does not matter what an earlier launch left, even one whose lengths changed while it ran.
DEVICE bool arrive(const AttentionParams& p, i64 first, i32 expected, const ThreadRole& me) {
    ptx::sync_block();
    if (me.thread == 0) {
        u64* tickets = p.kept + RECORD_WORDS * ptx::num_blocks();
        const u64 none = ptx::shared_read<u64>(me.base + LAUNCH_AT) << PIECE_BITS;
        ptx::fence();  // cumulative: it orders what the block's other threads stored before the barrier, too
        const bool last = ptx::count_up(tickets + first, none) == none + static_cast<u32>(expected);
        ptx::fence();
        ptx::shared_write(me.base + LAST_AT, static_cast<u32>(last));
    }
    ptx::sync_block();
    return ptx::shared_read<u32>(me.base + LAST_AT) != 0;
}

// Attend to the keys of a walk that has begun, for all rows of the unit. When it returns, the teams' states are in
// shared memory. mixed: any_nan is asked.
DEVICE void attend_all(const AttentionParams& p, const Pages& pages, const Queries& queries, const Row (&rows)[2],
                       Walk& walk, const ThreadRole& me, bool mixed, bool apart, i32 num_rows) {
    State state{{MINUS_INFINITY, MINUS_INFINITY}, {0.0f, 0.0f}, {}, FIRST_UNIT};
    const u32 marks = me.base + marks_at(me.team, me.first_row);
    if (apart && me.part == 0 && me.lane < WARP_ROWS) ptx::shared_write(marks + 4 * me.lane, 0u);
    attend(state, p, pages, queries, rows, walk, me, apart);
    ptx::sync_block();  // the sums will overwrite the stages
    if (apart) {
        spoil(state, marks, me.lane);
        ptx::sync_block();  // m and l will overwrite the marks
    }
    if (mixed) {
        const u32 votes = ptx::ballot(has_nan(state));
        if (me.lane == 0) ptx::shared_write(me.base + VOTES_AT + me.thread / 8, votes);
    }
    store_team(me.base, state, me.team, me.first_row, me.part);
    ptx::sync_block();
    if constexpr (ROTATED) rotate_rows(p, me.base, num_rows, me.thread);
}

// Return whether the result of attend_all holds a NaN, if it was `mixed`.
DEVICE bool any_nan(const ThreadRole& me) {
    u32 any = 0;
#pragma unroll
    for (u32 warp = 0; warp < THREADS / 32; ++warp) any |= ptx::shared_read<u32>(me.base + VOTES_AT + 4 * warp);
    return any != 0;
}

// Fold one more chunk into the result of a unit that this CTA computes alone, from the left. The last chunk writes the
// result; before that, the sum of o is in the CTA's partial state, m and l in shared memory.
DEVICE void fold_chunk(const AttentionParams& p, const Unit& unit, i32 group, bool first, bool last, float v_scale,
                       const ThreadRole& me) {
    float* total = PartialState(p, ptx::block_index()).at;
    const auto folded = [&](u32 row, u32 column, const float* o) {
        const Partial chunk = load_teams(me.base, row, column);
        if (first) return chunk;
        const float m = ptx::shared_read<float>(me.base + TOTALS_AT + 4 * row);
        const float l = ptx::shared_read<float>(me.base + TOTALS_AT + 4 * (ROWS + row));
        return fold(partial_of(o ? ptx::read(reinterpret_cast<const Words4*>(o)) : Words4{}, m, l), chunk);
    };
    for_quads(unit, group, me.thread, [&](u32 quad, u32 row, u32 column, i64 token, i32 head) {
        const Partial x = folded(row, column, total + 4 * quad);
        if (last) {
            write_result(p, token, head, column, x, v_scale);
        } else {
            ptx::write(reinterpret_cast<Words4*>(total + 4 * quad), words_of(x.o));
        }
    });
    if (first && last) {
        ptx::sync_block();  // the next stages will overwrite the sums
        return;
    }
    Partial of_row{};
    if (!last && me.thread < ROWS) of_row = folded(me.thread, 0, nullptr);
    ptx::sync_block();  // the next stages will overwrite the sums
    if (!last && me.thread < ROWS) {
        ptx::shared_write(me.base + TOTALS_AT + 4 * me.thread, of_row.m);
        ptx::shared_write(me.base + TOTALS_AT + 4 * (ROWS + me.thread), of_row.l);
    }
}

// Store piece `number` of a shared unit. The last CTA that does so merges all pieces.
DEVICE void share_piece(const AttentionParams& p, const Unit& unit, i32 group, const Pieces& pieces, i32 number,
                        float v_scale, const ThreadRole& me) {
    const PartialState mine(p, pieces.index(number));
    for_quads(unit, group, me.thread, [&](u32, u32 row, u32 column, i64, i32) {
        mine.store(row, column, load_teams(me.base, row, column));
    });
    if (!arrive(p, pieces.first, pieces.count, me)) return;
    merge_unit(p, unit, group, pieces, v_scale, me.base, me.thread);
}

// Wait for the unit's queries, and set what this lane's two rows may see. The keys under way are not waited for.
DEVICE void prepare(Queries& queries, Row (&rows)[2], const AttentionParams& p, const Unit& unit, i32 group,
                    float factor, const ThreadRole& me) {
    if constexpr (!BY_ROWS) ptx::copy_wait<STAGES - 1>();
    ptx::sync_block();
    keep_queries(queries, me.lane);
    queries.factor[0] = queries.factor[1] = factor;
    if constexpr (BY_ROWS) {
#pragma unroll
        for (u32 r = 0; r < 2; ++r) {
            const u32 at = me.base + Q_INVERSES_AT + 4 * (me.first_row + row_of_lane(me.lane, r));
            queries.factor[r] = factor * ptx::shared_read<float>(at);
            if constexpr (K_KIND == INT5) queries.start[r] = ptx::shared_read<float>(at + STARTS_AT - Q_INVERSES_AT);
        }
    }
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
        rows[r] = row_of(p, unit, group, static_cast<i32>(me.first_row + row_of_lane(me.lane, r)));
    }
}

// Whether a CTA has registers to look up its first frames while its share is compared, and for its share while it
// attends. Kernels with queries as rows have none left.
constexpr bool HAS_REGISTERS = KEYS_AS_ROWS;

KERNEL(THREADS, BLOCKS) paged_attention(const __grid_constant__ AttentionParams p) {
    ThreadRole me;
    me.base = ptx::shared_base();
    me.thread = ptx::thread_index();
    me.lane = me.thread % 32;
    me.team = me.thread / TEAM_THREADS;
    me.team_thread = me.thread % TEAM_THREADS;
    me.first_row = me.team_thread / 32 % WARPS_M * WARP_ROWS;
    me.part = me.team_thread / 32 / WARPS_M;
    Queries queries;
    queries.at = me.base + me.first_row * Q_STRIDE + me.part * (2 * D_PART);
    queries.biases = me.base + BIASES_AT + 4 * me.first_row;
    Partition<ROWS, STEP_TOKENS, THREADS, !HAS_REGISTERS> partition(p);
    const Unit& unit = partition.unit;
    // Items [item, next_of(item)) are attended to at once: with split_tokens one chunk, else all.
    const auto next_of = [&](i32 item, i32 end) { return p.split_tokens && item < end ? item + 1 : end; };
    if constexpr (PADS) {
        for (u32 at = STAGES_AT + 4 * me.thread; at < SHARED_BYTES; at += 4 * THREADS) {
            ptx::shared_write(me.base + at, 0u);
        }
    }
    Walk walk;
    walk.steps = 0;
    const auto begin_early = [&] {
        if constexpr (HAS_REGISTERS) {
            const i32 mine = partition.first_mine(), from = partition.from_key(mine);
            const i32 to = partition.more() ? partition.to_key(next_of(mine, partition.end_mine())) : from;
            begin<true>(walk, p, pages_of(p, unit.row, unit.head), from, to, me);
        }
    };
    static_assert(8 * WARPS_N * ROWS >= THREADS / 4, "the statistics of teams have room for a sum of each warp");
    const Recalled recalled = partition.recall(reinterpret_cast<Record*>(p.kept) + ptx::block_index(),
                                               me.base + TEAM_STATS_AT, begin_early);
    bool has_begun = recalled.is_known && walk.steps;  // the walk over the first keys of the first unit
    if (me.thread == 0) ptx::shared_write(me.base + LAUNCH_AT, recalled.launch);  // this thread alone reads it
    const auto factor_at = [](const float* at) { return !ROTATED && at ? ptx::read(at) : 1.0f; };
    const float k_scale = factor_at(p.k_factor), v_scale = factor_at(p.v_factor);
    for (; partition.more(); partition.advance()) {
        const i32 mine = partition.first_mine(), end = partition.end_mine();
        if (mine >= end && !(unit.num_items == 0 && partition.starts_here())) continue;
        const Pages pages = pages_of(p, unit.row, unit.head);
        const Pieces pieces = partition.pieces();
        const bool mixed = unit.queries > 1 || p.window || p.tree_mask;  // a row may not see all values that are read
        Row rows[2];
        bool apart = false, is_ready = false;
        i32 item = mine;
        LaneQueries lane_queries;
        do {
            const i32 next = next_of(item, end);
            if (!has_begun) begin(walk, p, pages, partition.from_key(item), partition.to_key(next), me);
            has_begun = false;
            const i32 warp = static_cast<i32>(me.thread / 32);
            if (!is_ready) {  // ask for the queries while the page table is looked up
                if constexpr (!BY_ROWS) load_queries(p, unit, partition.group, me);
                if constexpr (READS_EARLY) lane_queries = read_queries(p, unit, partition.group, warp, me.lane);
            }
            fetch_first(walk, p, pages, me);
            if (!is_ready) {
                is_ready = true;
                if constexpr (BY_ROWS) {
                    if (!READS_EARLY) lane_queries = read_queries(p, unit, partition.group, warp, me.lane);
                    load_rows(lane_queries, p, unit, partition.group, me);
                }
                prepare(queries, rows, p, unit, partition.group, p.scale * k_scale, me);
            }
            attend_all(p, pages, queries, rows, walk, me, mixed, apart, rows_of(unit, partition.group));
            if (mixed && !apart && any_nan(me)) {
                apart = true;  // once more, see set_apart
                continue;
            }
            apart = false;
            if (pieces.count == 1) {
                fold_chunk(p, unit, partition.group, item == mine, next == end, v_scale, me);
            } else {
                share_piece(p, unit, partition.group, pieces, p.split_tokens ? item : pieces.mine, v_scale, me);
            }
            item = next;
        } while (apart || item < end);
    }
}
