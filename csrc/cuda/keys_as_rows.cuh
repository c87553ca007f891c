// Keys as the rows of both products, for up to 8 query rows: S^T = K Q^T, O^T = V^T P^T (fragments.cuh).
#pragma once

static_assert(WARPS_M == 1 && WARPS_D == 1 && Q_KIND != F32 && K_KIND != F32, "other kernels have queries as rows");

constexpr u32 KEY_LANES = 28;  // bits of a lane's number that choose its keys

// The query row of a lane's state r, and the key of element i of score tile j.
DEVICE u32 row_of_lane(u32 lane, u32 r) { return 2 * (lane & 3) + r; }
DEVICE u32 key_of_lane(u32 lane, u32 j, u32 i) { return 16 * j + (lane >> 2) + 8 * i; }
// The place of element i of the lane's row r in an accumulator.
DEVICE constexpr int element_of(int r, int i) { return r + 2 * i; }

DEVICE void load_query(u32 (&b)[QUERY_WORDS], u32 rows, int k, u32 lane) {
    const u32 row = rows + (lane >> 2) * Q_STRIDE + 2 * (16 * k);
    if constexpr (Elements::LDMATRIX) {
        b[0] = ptx::shared_read<u32>(row + 4 * (lane & 3));
        b[1] = ptx::shared_read<u32>(row + 4 * (lane & 3) + 16);
    } else {  // columns in the order of quads, see elements.cuh
        const u64 quad = ptx::shared_read<u64>(row + 8 * (lane & 3));
        b[0] = static_cast<u32>(quad);
        b[1] = static_cast<u32>(quad >> 32);
    }
}

// Add q.k to the scores of a tile: s^T += k q^T.
DEVICE void multiply_keys(float (&s)[SCORE_TILES][4], const Queries& queries, u32 keys, u32 lane) {
    Key narrow[SCORE_TILES][2];
    if constexpr (!Elements::LDMATRIX) {
#pragma unroll
        for (int x = 0; x < 2 * SCORE_TILES; ++x) {
            narrow[x / 2][x % 2] = load_key(keys, key_of_lane(lane, x / 2, x % 2), lane);
        }
    }
#pragma unroll KEYS_AHEAD
    for (int k = 0; k < Q_STEPS; ++k) {
        u32 b[QUERY_WORDS];
        if constexpr (KEEP_QUERIES) {
            b[0] = queries.kept[k][0];
            b[1] = queries.kept[k][1];
        } else {
            load_query(b, queries.at, k, lane);
        }
#pragma unroll
        for (int j = 0; j < SCORE_TILES; ++j) {
            u32 a[4];
            if constexpr (Elements::LDMATRIX) {
                ptx::load_matrices(a, keys + (16 * j + (lane & 15)) * K_STRIDE + 2 * (16 * k + (lane >> 4) * 8));
            } else {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    u32 low[1], high[1];
                    key_operands(low, high, narrow[j][i], k, lane);
                    a[i] = low[0], a[2 + i] = high[0];
                }
            }
            ptx::multiply_add<Elements::QK_HALF>(s[j], a, b[0], b[1]);
        }
    }
}

// Add the values of 16 keys times their weights, those of score tile j, to the result: o^T += v^T p^T.
DEVICE void multiply_values(float (&o)[VALUE_TILES][4], const float (&p)[SCORE_TILES][4], int j, u32 values, u32 lane) {
    const u32 b0 = ptx::transposed(ptx::pack<Elements::PV_HALF>(p[j][0], p[j][1]));
    const u32 b1 = ptx::transposed(ptx::pack<Elements::PV_HALF>(p[j][2], p[j][3]));
    if constexpr (Elements::LDMATRIX) {
        const u32 row = values + ((lane & 7) + (lane >> 4) * 8) * V_STRIDE + 2 * ((lane >> 3 & 1) * 8);
#pragma unroll
        for (int n = 0; n < VALUE_TILES; ++n) {
            u32 a[4];
            ptx::load_matrices_transposed(a, row + 2 * (16 * n));
            ptx::multiply_add<Elements::PV_HALF>(o[n], a, b0, b1);
        }
    } else {
        const Values narrow = load_values(values, lane);
#pragma unroll
        for (int n = 0; n < VALUE_TILES; n += 2) {
            u32 low[4][1], high[4][1];
            value_operands(low, high, narrow, n / 2, lane);
#pragma unroll
            for (int i = 0; i < 2; ++i) {  // rows g and g + 8 of tile n + i are columns 2 i and 2 i + 1 of the four
                const u32 a[4] = {low[2 * i][0], low[2 * i + 1][0], high[2 * i][0], high[2 * i + 1][0]};
                ptx::multiply_add<Elements::PV_HALF>(o[n + i], a, b0, b1);
            }
        }
    }
}

// Call `use(column, x)` for the neighbouring columns x of the lane's row r of the result.
template <class Use> DEVICE void for_columns(const float (&o)[VALUE_TILES][4], int r, u32 lane, Use use) {
    constexpr int STEP = Elements::LDMATRIX ? 1 : 2;
#pragma unroll
    for (int n = 0; n < VALUE_TILES; n += STEP) {
        if constexpr (Elements::LDMATRIX) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float one[1] = {o[n][element_of(r, i)]};
                use(16 * n + (lane >> 2) + 8 * i, one);
            }
        } else {
            const float four[4] = {o[n][element_of(r, 0)], o[n][element_of(r, 1)], o[n + 1][element_of(r, 0)],
                                   o[n + 1][element_of(r, 1)]};
            use(16 * n + 4 * (lane >> 2), four);
        }
    }
}
