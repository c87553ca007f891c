// Queries as the rows of both products, 16 of them for each warp: S = Q K^T, O = P V (fragments.cuh).
#pragma once

constexpr u32 KEY_LANES = 3;  // bits of a lane's number that choose its keys

// The query row of a lane's state r, and the key of element i of score tile j.
DEVICE u32 row_of_lane(u32 lane, u32 r) { return (lane >> 2) + 8 * r; }
DEVICE u32 key_of_lane(u32 lane, u32 j, u32 i) { return 8 * j + 2 * (lane & 3) + i; }
// The place of element i of the lane's row r in an accumulator.
DEVICE constexpr int element_of(int r, int i) { return 2 * r + i; }

DEVICE void load_query(u32 (&a)[QUERY_WORDS], u32 rows, int k, u32 lane) {
    if constexpr (Elements::LDMATRIX) {
        ptx::load_matrices(a, rows + (lane & 15) * Q_STRIDE + 2 * (16 * k + (lane >> 4) * 8));
    } else {  // columns in the order of quads, see elements.cuh
        const u32 at = rows + (lane >> 2) * Q_STRIDE + 2 * (16 * k + 4 * (lane & 3));
        const u64 upper = ptx::shared_read<u64>(at), lower = ptx::shared_read<u64>(at + 8 * Q_STRIDE);
        a[0] = static_cast<u32>(upper);
        a[1] = static_cast<u32>(lower);
        a[2] = static_cast<u32>(upper >> 32);
        a[3] = static_cast<u32>(lower >> 32);
    }
}

// Add q.k to the scores of a tile: s += q.k.
DEVICE void multiply_keys(float (&s)[SCORE_TILES][4], const Queries& queries, u32 keys, u32 lane) {
    Key narrow[SCORE_TILES];
    if constexpr (!Elements::LDMATRIX) {
#pragma unroll
        for (int j = 0; j < SCORE_TILES; ++j) narrow[j] = load_key(keys, 8 * j + (lane >> 2), lane);
    }
#pragma unroll KEYS_AHEAD
    for (int k = 0; k < Q_STEPS; ++k) {
        u32 a[Elements::Q_TERMS][4];
#pragma unroll
        for (int i = 0; i < Elements::Q_TERMS; ++i) {
            if constexpr (KEEP_QUERIES) {
#pragma unroll
                for (int word = 0; word < 4; ++word) a[i][word] = queries.kept[k][word];
            } else {
                load_query(a[i], queries.at + i * Q_TERM_BYTES, k, lane);
            }
        }
        if constexpr (Elements::LDMATRIX) {
#pragma unroll
            for (int j = 0; j < TILE / 16; ++j) {
                u32 b[4];
                const u32 row = 16 * j + (lane & 7) + (lane >> 4) * 8;
                ptx::load_matrices(b, keys + row * K_STRIDE + 2 * (16 * k + (lane >> 3 & 1) * 8));
                ptx::multiply_add<Elements::QK_HALF>(s[2 * j], a[0], b[0], b[1]);
                ptx::multiply_add<Elements::QK_HALF>(s[2 * j + 1], a[0], b[2], b[3]);
            }
        } else {
#pragma unroll
            for (int j = 0; j < SCORE_TILES; ++j) {
                u32 b0[Elements::KV_TERMS], b1[Elements::KV_TERMS];
                key_operands(b0, b1, narrow[j], k, lane);
#pragma unroll
                for (int i = 0; i < Elements::Q_TERMS; ++i) {
#pragma unroll
                    for (int n = 0; n < Elements::KV_TERMS; ++n) {
                        if (i + n < 3) ptx::multiply_add<Elements::QK_HALF>(s[j], a[i], b0[n], b1[n]);
                    }
                }
            }
        }
    }
}

// Add the values of 16 keys times their weights, those of score tiles 2 j and 2 j + 1, to the result: o += p v.
DEVICE void multiply_values(float (&o)[VALUE_TILES][4], const float (&p)[SCORE_TILES][4], int j, u32 values, u32 lane) {
    constexpr int N = Elements::P_TERMS;
    const float (&low)[4] = p[2 * j], (&high)[4] = p[2 * j + 1];  // the weights of the first 8 keys, and of the others
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
        for (int n = 0; n < DV_PART / 16; ++n) {
            u32 b[4];
            ptx::load_matrices_transposed(b, values + (lane & 15) * V_STRIDE + 2 * (16 * n + (lane >> 4) * 8));
            ptx::multiply_add<Elements::PV_HALF>(o[2 * n], a[0], b[0], b[1]);
            ptx::multiply_add<Elements::PV_HALF>(o[2 * n + 1], a[0], b[2], b[3]);
        }
    } else {
        const Values narrow = load_values(values, lane);
#pragma unroll
        for (int n = 0; n < VALUE_TILES / 4; ++n) {
            u32 b0[4][Elements::KV_TERMS], b1[4][Elements::KV_TERMS];
            value_operands(b0, b1, narrow, n, lane);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int x = 0; x < N; ++x) {
#pragma unroll
                    for (int y = 0; y < Elements::KV_TERMS; ++y) {
                        if (x + y < 3) ptx::multiply_add<Elements::PV_HALF>(o[4 * n + i], a[x], b0[i][y], b1[i][y]);
                    }
                }
            }
        }
    }
}

// Call `use(column, x)` for the neighbouring columns x of the lane's row r of the result.
template <class Use> DEVICE void for_columns(const float (&o)[VALUE_TILES][4], int r, u32 lane, Use use) {
    constexpr int STEP = Elements::LDMATRIX ? 1 : 4;
#pragma unroll
    for (int n = 0; n < VALUE_TILES; n += STEP) {
        if constexpr (Elements::LDMATRIX) {
            const float two[2] = {o[n][element_of(r, 0)], o[n][element_of(r, 1)]};
            use(8 * n + 2 * (lane & 3), two);
        } else {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int c = element_of(r, i);
                const float four[4] = {o[n][c], o[n + 1][c], o[n + 2][c], o[n + 3][c]};
                use(8 * n + 4 * (2 * (lane & 3) + i), four);
            }
        }
    }
}
