// One tile of keys against 16 query rows: scores, masks, the running softmax, and the values.
//
//     s = scale * q.k        soft cap, ALiBi, masks        m' = max(m, s)     p = 2^(s - m')     l' = l 2^(m - m') + sum p
//                                                          o' = o 2^(m - m') + p v               all s in units of log2(e)
//
// Lane 4 g + t of a warp holds rows g and g + 8, and of each 8 keys numbers 2 t and 2 t + 1: accumulators of S are operands of P V as they are.
#pragma once

#include "params.h"
#include "plan.cuh"
#include "shape.cuh"

struct Row {  // what one query row may see
    i32 position, begin, end;  // keys in [begin, end)
    i32 first_new;  // keys from here on are asked of the tree
    const u8* tree;
    float slope;
};

struct State {  // of this lane's two rows
    float m[2], l[2];
    float o[VALUE_TILES][4];
};

struct Queries {
    u32 at;  // of the warp's 16 rows in shared memory
    float scale;  // of scores
    u32 kept[KEEP_QUERIES ? D / 16 : 1][4];
};

DEVICE void load_query(u32 (&a)[4], u32 rows, int k, u32 lane) {
    if constexpr (Elements::LDMATRIX) {
        ptx::load_matrices(a, rows + (lane & 15) * Q_STRIDE + 2 * (16 * k + (lane >> 4) * 8));
    } else {  // columns in the order of quads
        const u32 at = rows + (lane >> 2) * Q_STRIDE + 2 * (16 * k + 4 * (lane & 3));
        const u64 upper = ptx::shared_read<u64>(at), lower = ptx::shared_read<u64>(at + 8 * Q_STRIDE);
        a[0] = static_cast<u32>(upper);
        a[1] = static_cast<u32>(lower);
        a[2] = static_cast<u32>(upper >> 32);
        a[3] = static_cast<u32>(lower >> 32);
    }
}

DEVICE void keep_queries(Queries& queries, u32 lane) {
    if constexpr (KEEP_QUERIES) {
#pragma unroll
        for (int k = 0; k < D / 16; ++k) load_query(queries.kept[k], queries.at, k, lane);
    }
}

// s += q.k for the keys of a tile.
DEVICE void multiply_keys(float (&s)[TILE / 8][4], const Queries& queries, u32 keys, u32 lane) {
#pragma unroll KEYS_AHEAD
    for (int k = 0; k < D / 16; ++k) {
        u32 a[Elements::Q_PIECES][4];
#pragma unroll
        for (int i = 0; i < Elements::Q_PIECES; ++i) {
            if constexpr (KEEP_QUERIES) {
#pragma unroll
                for (int word = 0; word < 4; ++word) a[i][word] = queries.kept[k][word];
            } else {
                load_query(a[i], queries.at + i * Q_PIECE, k, lane);
            }
        }
        if constexpr (Elements::LDMATRIX) {
#pragma unroll
            for (int j = 0; j < TILE / 16; ++j) {
                u32 b[4];
                ptx::load_matrices(b, keys + (16 * j + (lane & 7) + (lane >> 4) * 8) * K_STRIDE + 2 * (16 * k + (lane >> 3 & 1) * 8));
                ptx::multiply_add<Elements::QK_HALF>(s[2 * j], a[0], b[0], b[1]);
                ptx::multiply_add<Elements::QK_HALF>(s[2 * j + 1], a[0], b[2], b[3]);
            }
        } else {
#pragma unroll
            for (int j = 0; j < TILE / 8; ++j) {
                u32 b0[Elements::KV_PIECES], b1[Elements::KV_PIECES];
                const auto quad = load_quad<KV_KIND>(keys + (8 * j + (lane >> 2)) * K_STRIDE, 16 * k + 4 * (lane & 3));
                pair_along<KV_KIND, Elements::QK_HALF>(b0, quad, 0);
                pair_along<KV_KIND, Elements::QK_HALF>(b1, quad, 1);
#pragma unroll
                for (int i = 0; i < Elements::Q_PIECES; ++i) {
#pragma unroll
                    for (int n = 0; n < Elements::KV_PIECES; ++n) {
                        if (i + n < 3) ptx::multiply_add<Elements::QK_HALF>(s[j], a[i], b0[n], b1[n]);
                    }
                }
            }
        }
    }
}

DEVICE bool sees(const Row& row, i32 key) {
    return key >= row.begin && key < row.end && (!row.tree || key < row.first_new || ptx::read(row.tree + (key - row.first_new)));
}

// Scale, soft cap, ALiBi and masks, in this order.
DEVICE void shape_scores(float (&s)[TILE / 8][4], const AttentionParams& p, float scale, const Row (&rows)[2], i32 first_key, u32 stage, u32 lane) {
    const float factor = p.softcap != 0.0f ? scale / p.softcap : scale * LOG2_E;
    u32 present[ENTRIES];
    bool all = true;
#pragma unroll
    for (int e = 0; e < ENTRIES; ++e) {
        present[e] = ptx::shared_read<u32>(stage + PRESENT_IN_STAGE + 4 * e);
        all = all && present[e] == (TILE - 32 * e >= 32 ? ~0u : (1u << (TILE & 31)) - 1);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        all = all && first_key >= rows[r].begin && first_key + TILE <= rows[r].end && (!rows[r].tree || first_key + TILE <= rows[r].first_new);
    }
#pragma unroll
    for (int j = 0; j < TILE / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const i32 in_tile = 8 * j + 2 * static_cast<i32>(lane & 3) + (c & 1), key = first_key + in_tile;
            const Row& row = rows[c >> 1];
            float x = s[j][c] * factor;
            if constexpr (TOKEN_SCALES) x *= ptx::shared_read<float>(stage + SCALES_IN_STAGE + 4 * in_tile);
            if (p.softcap != 0.0f) x = p.softcap * LOG2_E * ptx::tanh(x);
            if (p.slopes) x += row.slope * static_cast<float>(key - row.position);
            if (!all && !(present[j / 4] >> (in_tile & 31) & 1 && sees(row, key))) x = MINUS_INFINITY;
            s[j][c] = x;
        }
    }
}

// Scores become weights; what was summed before is scaled to the new maximum.
DEVICE void soften(State& state, float (&s)[TILE / 8][4]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float m = state.m[r];
#pragma unroll
        for (int j = 0; j < TILE / 8; ++j) m = ptx::larger(m, ptx::larger(s[j][2 * r], s[j][2 * r + 1]));
        m = ptx::larger(m, ptx::shuffle_xor(m, 1));
        m = ptx::larger(m, ptx::shuffle_xor(m, 2));
        const float origin = m == MINUS_INFINITY ? 0.0f : m;  // nothing seen yet: 2^(-inf - 0) = 0
        const float shrink = ptx::exp2(state.m[r] - origin);
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < TILE / 8; ++j) {
            s[j][2 * r] = ptx::exp2(s[j][2 * r] - origin);
            s[j][2 * r + 1] = ptx::exp2(s[j][2 * r + 1] - origin);
            sum += s[j][2 * r] + s[j][2 * r + 1];
        }
        state.m[r] = m;
        state.l[r] = state.l[r] * shrink + sum;
#pragma unroll
        for (int n = 0; n < VALUE_TILES; ++n) {
            state.o[n][2 * r] *= shrink;
            state.o[n][2 * r + 1] *= shrink;
        }
    }
}

// o += p v for 16 keys, whose weights are s[0] and s[1].
DEVICE void multiply_values(State& state, const float (&low)[4], const float (&high)[4], u32 values, u32 lane) {
    constexpr int N = Elements::P_PIECES;
    u32 a[N][4], pair[N];
    const auto put = [&](int word, float x, float y) {
        split_pair<N, Elements::PV_HALF>(pair, x, y);
#pragma unroll
        for (int i = 0; i < N; ++i) a[i][word] = pair[i];
    };
    put(0, low[0], low[1]);
    put(1, low[2], low[3]);
    put(2, high[0], high[1]);
    put(3, high[2], high[3]);
    if constexpr (Elements::LDMATRIX) {
#pragma unroll
        for (int n = 0; n < DV / 16; ++n) {
            u32 b[4];
            ptx::load_matrices_transposed(b, values + (lane & 15) * V_STRIDE + 2 * (16 * n + (lane >> 4) * 8));
            ptx::multiply_add<Elements::PV_HALF>(state.o[2 * n], a[0], b[0], b[1]);
            ptx::multiply_add<Elements::PV_HALF>(state.o[2 * n + 1], a[0], b[2], b[3]);
        }
    } else {
        const u32 first = values + 2 * (lane & 3) * V_STRIDE;
#pragma unroll
        for (int n = 0; n < VALUE_TILES / 4; ++n) {
            const u32 column = 32 * n + 4 * (lane >> 2), safe = column < DV ? column : 0;  // what lies past DV is computed and not kept
            const auto v0 = load_quad<KV_KIND>(first, safe), v1 = load_quad<KV_KIND>(first + V_STRIDE, safe);
            const auto v8 = load_quad<KV_KIND>(first + 8 * V_STRIDE, safe), v9 = load_quad<KV_KIND>(first + 9 * V_STRIDE, safe);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                u32 b0[Elements::KV_PIECES], b1[Elements::KV_PIECES];
                pair_across<KV_KIND, false>(b0, v0, v1, i);
                pair_across<KV_KIND, false>(b1, v8, v9, i);
#pragma unroll
                for (int x = 0; x < N; ++x) {
#pragma unroll
                    for (int y = 0; y < Elements::KV_PIECES; ++y) {
                        if (x + y < 3) ptx::multiply_add<false>(state.o[4 * n + i], a[x], b0[y], b1[y]);
                    }
                }
            }
        }
    }
}

// The column of the result that is element c of tile n.
DEVICE u32 column_of(int n, int c, u32 lane) {
    if constexpr (Elements::LDMATRIX) return 8 * n + 2 * (lane & 3) + (c & 1);
    return 32 * (n / 4) + 4 * (2 * (lane & 3) + (c & 1)) + n % 4;
}

DEVICE void attend_tile(State& state, const AttentionParams& p, const Queries& queries, const Row (&rows)[2], i32 first_key, u32 stage, u32 lane) {
    float s[TILE / 8][4] = {};
    multiply_keys(s, queries, stage, lane);
    shape_scores(s, p, queries.scale, rows, first_key, stage, lane);
    soften(state, s);
    if constexpr (TOKEN_SCALES) {
#pragma unroll
        for (int j = 0; j < TILE / 8; ++j) {
#pragma unroll
            for (int c = 0; c < 4; ++c) s[j][c] *= ptx::shared_read<float>(stage + SCALES_IN_STAGE + 4 * (TILE + 8 * j + 2 * (lane & 3) + (c & 1)));
        }
    }
#pragma unroll
    for (int j = 0; j < TILE / 16; ++j) multiply_values(state, s[2 * j], s[2 * j + 1], stage + V_IN_STAGE + 16 * j * V_STRIDE, lane);
}
