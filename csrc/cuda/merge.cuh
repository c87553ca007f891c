// States (o, m, l) over disjoint keys become one, always by the same sums: teams of a CTA, pieces of a unit, and the sink.
//
//     m = max(m_a, m_b)     w_x = 2^(m_x - m), 0 where m_x = -inf     o = o_a w_a + o_b w_b     l = l_a w_a + l_b w_b
//
// Each operation is spelled out (fused, times), so no compiler rounds one copy of this code differently from another: what one CTA folds
// and what the last of several merges is equal bit by bit. Element e of a tile, row e / DV and column e % DV, is thread e % THREADS's.
#pragma once

#include "params.h"
#include "plan.cuh"
#include "scores.cuh"
#include "shape.cuh"

struct Partial {
    float o, m, l;
};

DEVICE Partial fold(const Partial& a, const Partial& b) {
    const float m = ptx::larger(a.m, b.m);
    const float w_a = a.m == MINUS_INFINITY ? 0.0f : ptx::exp2(a.m - m), w_b = b.m == MINUS_INFINITY ? 0.0f : ptx::exp2(b.m - m);
    return {ptx::fused(a.o, w_a, ptx::times(b.o, w_b)), m, ptx::fused(a.l, w_a, ptx::times(b.l, w_b))};
}

// What the teams have summed, put into shared memory...
DEVICE void store_team(u32 base, const State& state, u32 team, u32 first_row, u32 part) {
    const u32 lane = ptx::thread_index() % 32;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const u32 row = first_row + (lane >> 2) + 8 * r;
        float l = state.l[r];
        l += ptx::shuffle_xor(l, 1);
        l += ptx::shuffle_xor(l, 2);
        if ((lane & 3) == 0 && part == 0) {
            ptx::shared_write(base + TEAM_STATS_AT + 4 * (team * ROWS + row), state.m[r]);
            ptx::shared_write(base + TEAM_STATS_AT + 4 * ((WARPS_N + team) * ROWS + row), l);
        }
#pragma unroll
        for (int n = 0; n < VALUE_TILES; ++n) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const u32 column = column_of(n, c, lane);
                if (VALUE_TILES * 8 == DV_PART || column < DV_PART) {
                    ptx::shared_write(base + STAGES_AT + team * SUM_BYTES + row * SUM_STRIDE + 4 * (part * DV_PART + column), state.o[n][2 * r + c]);
                }
            }
        }
    }
}

// ... and taken from there as one.
DEVICE Partial load_teams(u32 base, u32 row, u32 column) {
    Partial all{0.0f, MINUS_INFINITY, 0.0f};
#pragma unroll
    for (u32 team = 0; team < WARPS_N; ++team) {
        Partial one;
        one.m = ptx::shared_read<float>(base + TEAM_STATS_AT + 4 * (team * ROWS + row));
        one.l = ptx::shared_read<float>(base + TEAM_STATS_AT + 4 * ((WARPS_N + team) * ROWS + row));
        one.o = ptx::shared_read<float>(base + STAGES_AT + team * SUM_BYTES + row * SUM_STRIDE + 4 * column);
        all = team ? fold(all, one) : one;
    }
    return all;
}

struct Slot {  // of a partial state in global memory
    float* at;
    DEVICE_MEMBER Slot(const AttentionParams& p, i64 number) : at(p.partials + number * (ROWS * DV + 2 * ROWS)) {}
    DEVICE_MEMBER void store(u32 row, u32 column, const Partial& x) const {
        ptx::write(at + row * DV + column, x.o);
        if (column == 0) {
            ptx::write(at + ROWS * DV + row, x.m);
            ptx::write(at + ROWS * DV + ROWS + row, x.l);
        }
    }
    DEVICE_MEMBER Partial load(u32 row, u32 column) const {
        return {ptx::read_cached_nowhere(at + row * DV + column), ptx::read_cached_nowhere(at + ROWS * DV + row),
                ptx::read_cached_nowhere(at + ROWS * DV + ROWS + row)};
    }
};

// The sink takes part, the sum is divided by, and the row is written. `scale` is that of the values, if there is one for all.
DEVICE void write_result(const AttentionParams& p, i64 token, i32 head, u32 column, const Partial& x, float scale) {
    Partial all = x;
    if (p.sinks) all = fold(x, {0.0f, ptx::read(p.sinks + head) * LOG2_E, 1.0f});
    const bool blind = all.l == 0.0f;  // a sum that is no number stays none
    const float o = blind ? 0.0f : all.o / all.l * scale;
    u8* at = static_cast<u8*>(p.out) + token * p.out_token + head * p.out_head;
    if constexpr (Q_KIND == F32) {
        ptx::write(reinterpret_cast<float*>(at) + column, o);
    } else {
        ptx::write(reinterpret_cast<u16*>(at) + column, static_cast<u16>(ptx::pack<Q_KIND == F16>(o, o)));
    }
    if (column == 0) ptx::write(p.lse + token * p.num_heads + head, blind ? MINUS_INFINITY : (all.m + ptx::log2(all.l)) * LN_2);
}

// Of all values, if there is one for all.
DEVICE float value_scale(const AttentionParams& p) { return !TOKEN_SCALES && p.v_scale ? ptx::read(p.v_scale) : 1.0f; }

// Does `use(row, column, token, head)` for this thread's elements of the unit's rows that exist.
template <class Use> DEVICE void for_elements(const Unit& unit, i32 group, u32 thread, Use use) {
    const i32 left = unit.queries * group - unit.tile * ROWS, num_rows = left < ROWS ? left : ROWS;
    for (u32 e = thread; e < static_cast<u32>(num_rows) * DV; e += THREADS) {
        const i32 row = static_cast<i32>(e / DV), x = unit.tile * ROWS + row;
        use(static_cast<u32>(row), e % DV, static_cast<i64>(unit.first_query) + x / group, unit.head * group + x % group);
    }
}

// All pieces of a shared unit, in the order of keys.
DEVICE void merge_unit(const AttentionParams& p, const Plan<ROWS, STEP_TOKENS>& plan, float v_scale, u32 thread) {
    const i32 pieces = plan.num_partials();
    for_elements(plan.unit, plan.group, thread, [&](u32 row, u32 column, i64 token, i32 head) {
        Partial all = Slot(p, plan.slot(0)).load(row, column);
        for (i32 piece = 1; piece < pieces; ++piece) all = fold(all, Slot(p, plan.slot(piece)).load(row, column));
        write_result(p, token, head, column, all, v_scale);
    });
}
