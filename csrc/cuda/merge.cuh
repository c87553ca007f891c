// Merge attention states (o, m, l) over disjoint sets of keys into one. Teams of a CTA, pieces of a unit and the sink
// are all merged by the same operations.
//
//     m = max(m_a, m_b)              w_x = 2^(m_x - m), 0 where m_x = -inf, 1 where m_x = m
//     o = o_a w_a + o_b w_b          l = l_a w_a + l_b w_b
//
// Each operation is spelled out (fused, times), so that no compiler rounds one copy of this code differently from
// another: a merge inside one CTA and a merge by the last of several CTAs give equal bits. Thread q % THREADS
// works on quad q of a tile: four columns of row q / (DV / 4), from column q % (DV / 4) * 4 on.
#pragma once

#include "params.h"
#include "partition.cuh"
#include "rows.cuh"
#include "scores.cuh"
#include "specialisation.cuh"

struct Partial {  // four neighbouring columns of a row
    float o[4], m, l;
};

// Return the weight of a state with maximum `m` when it is merged into a state with maximum `top`. The difference of
// equal infinities would be NaN. A state that saw no key has weight 1 beside another such state; both are zeros.
DEVICE float weight(float m, float top) { return ptx::exp2(m == top ? 0.0f : m - top); }

DEVICE Partial fold(const Partial& a, const Partial& b) {
    Partial all;
    all.m = ptx::larger(a.m, b.m);
    const float w_a = weight(a.m, all.m), w_b = weight(b.m, all.m);
    all.l = ptx::fused(a.l, w_a, ptx::times(b.l, w_b));
#pragma unroll
    for (int c = 0; c < 4; ++c) all.o[c] = ptx::fused(a.o[c], w_a, ptx::times(b.o[c], w_b));
    return all;
}

DEVICE Partial partial_of(const Words4& o, float m, float l) {
    return {{ptx::as_float(o.x), ptx::as_float(o.y), ptx::as_float(o.z), ptx::as_float(o.w)}, m, l};
}

// Store the state of a team in shared memory.
DEVICE void store_team(u32 base, const State& state, u32 team, u32 first_row, u32 part) {
    const u32 lane = ptx::thread_index() % 32;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const u32 row = first_row + row_of_lane(lane, r);
        const float l = over_keys(state.l[r], [](float x, float y) { return x + y; });
        if ((lane & KEY_LANES) == 0 && part == 0) {
            ptx::shared_write(base + TEAM_STATS_AT + 4 * (team * ROWS + row), state.m[r]);
            ptx::shared_write(base + TEAM_STATS_AT + 4 * ((WARPS_N + team) * ROWS + row), l);
        }
        constexpr float OF_CODES = ROTATED && Elements::PV_HALF ? 16777216.0f : 1.0f;  // see widen_codes
        const float inverse = OF_CODES * ptx::as_float((254u << 23) - ptx::as_bits(state.unit));
        const auto bits = [&](float x) { return ptx::as_bits(x * (FIRST_UNIT == 1.0f ? 1.0f : inverse)); };
        const u32 at = base + STAGES_AT + team * SUM_BYTES + row * SUM_STRIDE + 4 * part * DV_PART;
        for_columns(state.o, r, lane, [&](u32 column, const auto& x) {
            constexpr int N = sizeof x / sizeof x[0];
            if (VALUE_TILES * TILE_KEYS > DV_PART && column >= DV_PART) return;
            if constexpr (N == 1) {
                ptx::shared_write(at + 4 * column, bits(x[0]));
            } else if constexpr (N == 2) {
                ptx::shared_write(at + 4 * column, static_cast<u64>(bits(x[1])) << 32 | bits(x[0]));
            } else {
                ptx::shared_write(at + 4 * column, Words4{bits(x[0]), bits(x[1]), bits(x[2]), bits(x[3])});
            }
        });
    }
}

// Return four columns of all teams' states, merged. `column` is a multiple of 4. Rotated rows are merged in the first
// team's memory (rotate_rows).
template <u32 TEAMS = ROTATED ? 1 : WARPS_N> DEVICE Partial load_teams(u32 base, u32 row, u32 column) {
    Partial all;
#pragma unroll
    for (u32 team = 0; team < TEAMS; ++team) {
        const u32 at = base + STAGES_AT + team * SUM_BYTES + row * SUM_STRIDE + 4 * column;
        const float m = ptx::shared_read<float>(base + TEAM_STATS_AT + 4 * (team * ROWS + row));
        const float l = ptx::shared_read<float>(base + TEAM_STATS_AT + 4 * ((WARPS_N + team) * ROWS + row));
        const Partial one = partial_of(ptx::shared_read<Words4>(at), m, l);
        all = team ? fold(all, one) : one;
    }
    return all;
}

// Merge the teams' states of rows, rotate the results back, and add the rows' biases, unless a soft cap had them. Both
// are linear, so it does not matter that these are states of a part of the keys.
DEVICE void rotate_rows(const AttentionParams& p, u32 base, i32 num_rows, u32 thread) {
    constexpr u32 QUADS = (DV + 127) / 128;
#pragma unroll 1
    for (u32 row = thread / 32; row < static_cast<u32>(num_rows); row += THREADS / 32) {
        Quad4 x[QUADS] = {};
        Partial part{};
#pragma unroll
        for (u32 column = thread % 32 * 4; column < DV; column += 128) {
            part = load_teams<WARPS_N>(base, row, column);
#pragma unroll
            for (int c = 0; c < 4; ++c) x[column / 128].at[c] = part.o[c];
        }
        rotate<DV, 32, true>(x, thread % 32);
        ptx::sync_warp();  // m and l are read
#pragma unroll
        for (u32 q = 0; q < QUADS; ++q) {
            const u32 column = 128 * q + thread % 32 * 4;
            if (column < DV) ptx::shared_write(base + STAGES_AT + row * SUM_STRIDE + 4 * column, words_of(x[q].at));
        }
        if (thread % 32) continue;
        const float bias = p.softcap == 0.0f ? ptx::shared_read<float>(base + BIASES_AT + 4 * row) : 0.0f;
        ptx::shared_write(base + TEAM_STATS_AT + 4 * row, part.m == MINUS_INFINITY ? part.m : part.m + bias);
        ptx::shared_write(base + TEAM_STATS_AT + 4 * (WARPS_N * ROWS + row), part.l);
    }
    ptx::sync_block();
}

struct PartialState {  // of ROWS rows, in global memory: o, then m and l of each row
    static constexpr i64 SIZE = ROWS * DV + 2 * ROWS;
    float* at;
    DEVICE_MEMBER PartialState(const AttentionParams& p, i64 index) : at(p.partials + index * SIZE) {}
    DEVICE_MEMBER void store(u32 row, u32 column, const Partial& x) const {
        ptx::write(reinterpret_cast<Words4*>(at + row * DV + column), words_of(x.o));
        if (column == 0) {
            ptx::write(at + ROWS * DV + row, x.m);
            ptx::write(at + ROWS * DV + ROWS + row, x.l);
        }
    }
};

// Add the sink, divide by the sum, and write four columns of the result. `scale` is the scale of all values, or 1.
DEVICE void write_result(const AttentionParams& p, i64 token, i32 head, u32 column, const Partial& x, float scale) {
    Partial all = x;
    if (p.sinks) all = fold(x, {{}, ptx::read(p.sinks + head) * LOG2_E, 1.0f});
    const bool blind = all.l == 0.0f;  // a NaN sum stays NaN
    const float factor = scale / all.l;  // a sum that is not 0 is at least 1: the largest weight is 1
    Quad4 o;
#pragma unroll
    for (int c = 0; c < 4; ++c) o.at[c] = blind ? 0.0f : all.o[c] * factor;
    u8* row = static_cast<u8*>(p.out) + token * p.out_token + head * p.out_head;
    const bool vectors = reinterpret_cast<u64>(row) % (BITS_OF<Q_KIND> / 2) == 0;
    write_quad<Q_KIND>(row, static_cast<i32>(column), static_cast<i32>(column) + 4, vectors, o);
    if (column == 0) {
        const float lse = blind ? MINUS_INFINITY : (all.m + ptx::log2(all.l)) * LN_2;
        ptx::write(p.lse + token * p.num_heads + head, lse);
    }
}

// Return how many rows of a tile the unit has.
DEVICE i32 rows_of(const Unit& unit, i32 group) {
    const i32 left = unit.queries * group - unit.tile * ROWS;
    return left < ROWS ? left : ROWS;
}

// Call `use(quad, row, column, token, head)` for each four columns of this thread. Rows past the unit's last query are
// left out.
template <class Use> DEVICE void for_quads(const Unit& unit, i32 group, u32 thread, Use use) {
    const u32 num_quads = static_cast<u32>(rows_of(unit, group)) * (DV / 4);
#pragma unroll 1
    for (u32 quad = thread; quad < num_quads; quad += THREADS) {
        const u32 row = quad / (DV / 4), column = quad % (DV / 4) * 4;
        const UnitRow at = unit_row(unit, group, unit.tile * ROWS + static_cast<i32>(row));
        use(quad, row, column, static_cast<i64>(unit.first_query) + at.query, unit.head * group + at.head);
    }
}

// Merge all pieces of a shared unit, in the order of keys, and write the result. No other CTA works on the unit any
// more, so latency counts: many pieces are copied into the memory of the stages before the first is folded. A thread
// takes four columns of a row, which only it copies and reads; the rows' m and l are copied once for all threads. The
// loops are short, because code that runs once comes from memory, too.
DEVICE void merge_unit(const AttentionParams& p, const Unit& unit, i32 group, const Pieces& pieces, float v_scale,
                       u32 base, u32 thread) {
    constexpr u32 STATS = 8 * ROWS, STATS_COPIES = STATS / 16;
    constexpr i32 AT_ONCE = (SHARED_BYTES - STAGES_AT) / (16 * THREADS + STATS);
    static_assert(AT_ONCE >= 2, "the stages hold two pieces or more");
    const u32 o_at = base + STAGES_AT + 16 * thread, stats_at = base + STAGES_AT + 16 * THREADS * AT_ONCE;
    const u32 num_quads = static_cast<u32>(rows_of(unit, group)) * (DV / 4);
    const i64 step = pieces.step * PartialState::SIZE;
#pragma unroll 1
    for (u32 first = 0; first < num_quads; first += THREADS) {
        const u32 quad = first + thread, row = quad / (DV / 4), column = quad % (DV / 4) * 4;
        const bool is_mine = quad < num_quads;
        Partial all;
#pragma unroll 1
        for (i32 done = 0; done < pieces.count; done += AT_ONCE) {
            const i32 now = pieces.count - done < AT_ONCE ? pieces.count - done : AT_ONCE;
            const float* from = PartialState(p, pieces.index(done)).at + 4 * quad;
            if (is_mine) {
                ptx::copy_async<16>(o_at, from);
                from += done ? step : PartialState::SIZE;
#pragma unroll 4
                for (i32 i = 1; i < now; ++i, from += step) ptx::copy_async<16>(o_at + 16 * THREADS * i, from);
            }
#pragma unroll 1
            for (u32 copy = thread; copy < now * STATS_COPIES; copy += THREADS) {
                const i64 piece = pieces.index(done + static_cast<i32>(copy / STATS_COPIES));
                const float* stats = PartialState(p, piece).at + ROWS * DV;
                ptx::copy_async<16>(stats_at + 16 * copy, stats + copy % STATS_COPIES * 4);
            }
            ptx::copy_commit();
            ptx::copy_wait<0>();
            ptx::sync_block();
            if (is_mine) {
                const auto piece = [&](i32 i) {
                    const float m = ptx::shared_read<float>(stats_at + STATS * i + 4 * row);
                    const float l = ptx::shared_read<float>(stats_at + STATS * i + 4 * (ROWS + row));
                    return partial_of(ptx::shared_read<Words4>(o_at + 16 * THREADS * i), m, l);
                };
                if (!done) all = piece(0);
#pragma unroll 4
                for (i32 i = done ? 0 : 1; i < now; ++i) all = fold(all, piece(i));
            }
            ptx::sync_block();  // the next pieces or stages will overwrite these
        }
        if (is_mine) {
            const UnitRow at = unit_row(unit, group, unit.tile * ROWS + static_cast<i32>(row));
            const i64 token = static_cast<i64>(unit.first_query) + at.query;
            write_result(p, token, unit.head * group + at.head, column, all, v_scale);
        }
    }
}
