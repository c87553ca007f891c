// States (o, m, l) over disjoint keys become one, always by the same sums: teams of a CTA, pieces of a unit, and the sink.
//
//     m = max(m_a, m_b)     w_x = 2^(m_x - m), 0 where m_x = -inf, 1 where m_x = m     o = o_a w_a + o_b w_b     l = l_a w_a + l_b w_b
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

// Of a state with maximum `m` beside one with `top`. Two infinities are equal: their difference is no number, their weight is 1.
DEVICE float weight(float m, float top) { return m == MINUS_INFINITY ? 0.0f : m == top ? 1.0f : ptx::exp2(m - top); }

DEVICE Partial fold(const Partial& a, const Partial& b) {
    const float m = ptx::larger(a.m, b.m), w_a = weight(a.m, m), w_b = weight(b.m, m);
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
    DEVICE_MEMBER void load(u32 row, u32 column, Partial (&four)[4]) const {  // of columns from `column` on, a multiple of 4
        const Words4 o = ptx::read_cached_nowhere(reinterpret_cast<const Words4*>(at + row * DV + column));
        const float m = ptx::read_cached_nowhere(at + ROWS * DV + row), l = ptx::read_cached_nowhere(at + ROWS * DV + ROWS + row);
        const u32 bits[4] = {o.x, o.y, o.z, o.w};
#pragma unroll
        for (int c = 0; c < 4; ++c) four[c] = {ptx::as_float(bits[c]), m, l};
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

// All pieces of a shared unit, in the order of keys. Nobody else works on the unit any more, so latency counts: a thread has four columns,
// and the loads of several pieces are under way before the first is folded.
DEVICE void merge_unit(const AttentionParams& p, const Plan<ROWS, STEP_TOKENS>& plan, float v_scale, u32 thread) {
    constexpr i32 QUADS = DV / 4, AT_ONCE = 4;
    const Unit& unit = plan.unit;
    const i32 pieces = plan.num_partials(), left = unit.queries * plan.group - unit.tile * ROWS, num_rows = left < ROWS ? left : ROWS;
    const i64 first = plan.first_slot();
    for (i32 quad = static_cast<i32>(thread); quad < num_rows * QUADS; quad += THREADS) {
        const i32 row = quad / QUADS, column = quad % QUADS * 4, x = unit.tile * ROWS + row;
        Partial all[4] = {};
        for (i32 done = 0; done < pieces; done += AT_ONCE) {
            Partial next[AT_ONCE][4];
#pragma unroll
            for (i32 i = 0; i < AT_ONCE; ++i) {
                Slot(p, plan.slot(first, done + i < pieces ? done + i : pieces - 1)).load(row, column, next[i]);
            }
#pragma unroll
            for (i32 i = 0; i < AT_ONCE; ++i) {
                if (done + i >= pieces) break;
#pragma unroll
                for (i32 c = 0; c < 4; ++c) all[c] = done + i ? fold(all[c], next[i][c]) : next[i][c];
            }
        }
        const i64 token = static_cast<i64>(unit.first_query) + x / plan.group;
#pragma unroll
        for (i32 c = 0; c < 4; ++c) write_result(p, token, unit.head * plan.group + x % plan.group, column + c, all[c], v_scale);
    }
}
