// Merge attention states (o, m, l) over disjoint sets of keys into one. Teams of a CTA, pieces of a unit and the sink
// are all merged by the same operations.
//
//     m = max(m_a, m_b)              w_x = 2^(m_x - m), 0 where m_x = -inf, 1 where m_x = m
//     o = o_a w_a + o_b w_b          l = l_a w_a + l_b w_b
//
// Each operation is spelled out (fused, times), so that no compiler rounds one copy of this code differently from
// another: a merge inside one CTA and a merge by the last of several CTAs give equal bits. Thread e % THREADS
// works on element e of a tile, which is row e / DV and column e % DV.
#pragma once

#include "params.h"
#include "partition.cuh"
#include "scores.cuh"
#include "specialisation.cuh"

struct Partial {
    float o, m, l;
};

// Return the weight of a state with maximum `m` when it is merged into a state with maximum `top`. If both are +inf,
// the difference would be NaN, but the weight is 1.
DEVICE float weight(float m, float top) { return m == MINUS_INFINITY ? 0.0f : m == top ? 1.0f : ptx::exp2(m - top); }

DEVICE Partial fold(const Partial& a, const Partial& b) {
    const float m = ptx::larger(a.m, b.m), w_a = weight(a.m, m), w_b = weight(b.m, m);
    return {ptx::fused(a.o, w_a, ptx::times(b.o, w_b)), m, ptx::fused(a.l, w_a, ptx::times(b.l, w_b))};
}

// Store the state of a team in shared memory.
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
        const float inverse = ptx::as_float((254u << 23) - ptx::as_bits(state.unit));
#pragma unroll
        for (int n = 0; n < VALUE_TILES; ++n) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const u32 column = column_of(n, c, lane);
                if (VALUE_TILES * 8 == DV_PART || column < DV_PART) {
                    const u32 at = base + STAGES_AT + team * SUM_BYTES + row * SUM_STRIDE;
                    ptx::shared_write(at + 4 * (part * DV_PART + column), state.o[n][2 * r + c] * inverse);
                }
            }
        }
    }
}

// Return one element of all teams' states, merged.
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

struct PartialState {  // of ROWS rows, in global memory: o, then m and l of each row
    float* at;
    DEVICE_MEMBER PartialState(const AttentionParams& p, i64 index) : at(p.partials + index * (ROWS * DV + 2 * ROWS)) {}
    DEVICE_MEMBER void store(u32 row, u32 column, const Partial& x) const {
        ptx::write(at + row * DV + column, x.o);
        if (column == 0) {
            ptx::write(at + ROWS * DV + row, x.m);
            ptx::write(at + ROWS * DV + ROWS + row, x.l);
        }
    }
    // Load four columns; `column` is a multiple of 4.
    DEVICE_MEMBER void load(u32 row, u32 column, Partial (&four)[4]) const {
        const Words4 o = ptx::read_cached_nowhere(reinterpret_cast<const Words4*>(at + row * DV + column));
        const float m = ptx::read_cached_nowhere(at + ROWS * DV + row);
        const float l = ptx::read_cached_nowhere(at + ROWS * DV + ROWS + row);
        const u32 bits[4] = {o.x, o.y, o.z, o.w};
#pragma unroll
        for (int c = 0; c < 4; ++c) four[c] = {ptx::as_float(bits[c]), m, l};
    }
};

// Add the sink, divide by the sum, and write one element of the result. `scale` is the scale of all values, or 1 if
// values have scales per token.
DEVICE void write_result(const AttentionParams& p, i64 token, i32 head, u32 column, const Partial& x, float scale) {
    Partial all = x;
    if (p.sinks) all = fold(x, {0.0f, ptx::read(p.sinks + head) * LOG2_E, 1.0f});
    const bool blind = all.l == 0.0f;  // a NaN sum stays NaN
    const float o = blind ? 0.0f : all.o / all.l * scale;
    u8* at = static_cast<u8*>(p.out) + token * p.out_token + head * p.out_head;
    if constexpr (Q_KIND == F32) {
        ptx::write(reinterpret_cast<float*>(at) + column, o);
    } else {
        ptx::write(reinterpret_cast<u16*>(at) + column, static_cast<u16>(ptx::pack<Q_KIND == F16>(o, o)));
    }
    if (column == 0) {
        const float lse = blind ? MINUS_INFINITY : (all.m + ptx::log2(all.l)) * LN_2;
        ptx::write(p.lse + token * p.num_heads + head, lse);
    }
}

// Return the scale of all values, or 1 if values have scales per token or none.
DEVICE float value_scale(const AttentionParams& p) { return !TOKEN_SCALES && p.v_scale ? ptx::read(p.v_scale) : 1.0f; }

// Call `use(row, column, token, head)` for each of this thread's elements. Rows past the unit's last query are left
// out.
template <class Use> DEVICE void for_elements(const Unit& unit, i32 group, u32 thread, Use use) {
    const i32 left = unit.queries * group - unit.tile * ROWS, num_rows = left < ROWS ? left : ROWS;
    for (u32 e = thread; e < static_cast<u32>(num_rows) * DV; e += THREADS) {
        const i32 row = static_cast<i32>(e / DV), x = unit.tile * ROWS + row;
        const i64 token = static_cast<i64>(unit.first_query) + x / group;
        use(static_cast<u32>(row), e % DV, token, unit.head * group + x % group);
    }
}

// Merge all pieces of a shared unit, in the order of keys, and write the result. No other CTA works on the unit any
// more, so latency counts: a thread takes four columns, and loads several pieces before it folds the first.
DEVICE void merge_unit(const AttentionParams& p, const Partition<ROWS, STEP_TOKENS>& partition, float v_scale,
                       u32 thread) {
    constexpr i32 QUADS = DV / 4, AT_ONCE = DV <= 128 ? 16 : 4;  // wider heads would spill registers
    const Unit& unit = partition.unit;
    const i32 pieces = partition.num_partials();
    const i32 left = unit.queries * partition.group - unit.tile * ROWS, num_rows = left < ROWS ? left : ROWS;
    const i64 first = partition.first_partial();
    for (i32 quad = static_cast<i32>(thread); quad < num_rows * QUADS; quad += THREADS) {
        const i32 row = quad / QUADS, column = quad % QUADS * 4, x = unit.tile * ROWS + row;
        Partial all[4] = {};
        for (i32 done = 0; done < pieces; done += AT_ONCE) {
            Partial next[AT_ONCE][4];
#pragma unroll
            for (i32 i = 0; i < AT_ONCE; ++i) {
                const i32 piece = done + i < pieces ? done + i : pieces - 1;
                PartialState(p, partition.partial_index(first, piece)).load(row, column, next[i]);
            }
#pragma unroll
            for (i32 i = 0; i < AT_ONCE; ++i) {
                if (done + i >= pieces) break;
#pragma unroll
                for (i32 c = 0; c < 4; ++c) all[c] = done + i ? fold(all[c], next[i][c]) : next[i][c];
            }
        }
        const i64 token = static_cast<i64>(unit.first_query) + x / partition.group;
#pragma unroll
        for (i32 c = 0; c < 4; ++c) {
            write_result(p, token, unit.head * partition.group + x % partition.group, column + c, all[c], v_scale);
        }
    }
}
