// The two products of a tile of keys in fragments of the tensor cores, which multiply 16 rows by 8 columns
// (mma.m16n8k16). A kernel has one of two layouts:
//
//     queries as rows   S = Q K^T, O = P V            a warp has 16 query rows
//     keys as rows      S^T = K Q^T, O^T = V^T P^T    a warp has 8 query rows; the rows are 16 keys, or columns of V
//
// A decode of few heads does not fill 16 query rows. Keys as rows take half their products, exponentials and registers.
// Kernels for more rows, for float32, and for heads that several warps share have queries as rows.
//
// In both layouts lane 4 g + t has two query rows, and two elements of each in every accumulator:
//
//     queries as rows   rows g and g + 8, keys 2 t and 2 t + 1 of each 8. So the accumulators of S serve as operands of
//                       P V, and lanes exchange nothing
//     keys as rows      rows 2 t and 2 t + 1, keys g and g + 8 of each 16. movmatrix turns P into the operand
//
// queries_as_rows.cuh and keys_as_rows.cuh define the same functions. The other files know no layout.
#pragma once

#include "specialisation.cuh"

struct Queries {
    u32 at;  // address of the warp's rows in shared memory
    u32 biases;  // address of the biases of the warp's rows, if they are rotated
    float factor[2];  // of the scores of this lane's rows: in units of log2(e), or of the soft cap if there is one
    float start[2];  // what these scores begin at, if keys are int5
    u32 kept[KEEP_QUERIES ? Q_STEPS : 1][QUERY_WORDS];
};

// A lane has this of a narrow key. Of int5, these are 8 WORDS neighbours: the low bits of eight in a word, and the
// fifth bits of elements i and i + 4 of word c at 4 c + i and 16 + 4 c + i.
struct Key {
    u32 row, low[WORDS], fifth[(WORDS + 3) / 4];
};

DEVICE Key load_key(u32 keys, u32 key, u32 lane) {
    Key x{keys + key * K_STRIDE, {}, {}};
    if constexpr (K_KIND == INT5) {
        const u32 first = (lane & 3) * WORDS, low = keys + key * (D / 2) + 4 * first;
        const u32 fifth = keys + FIFTH_IN_STAGE + key * (D / 8) + first;
#pragma unroll
        for (int i = 0; i < WORDS; i += LOW_BYTES / 4) {  // in loads as wide as rows allow
            if constexpr (LOW_BYTES == 16) {
                const auto four = ptx::shared_read<Words4>(low + 4 * i);
                x.low[i] = four.x, x.low[i + 1] = four.y, x.low[i + 2] = four.z, x.low[i + 3] = four.w;
            } else {
                const auto two = ptx::shared_read<LowUnit>(low + 4 * i);
                x.low[i] = static_cast<u32>(two);
                if (LOW_BYTES == 8) x.low[i + 1] = static_cast<u32>(u64{two} >> 32);
            }
        }
#pragma unroll
        for (int i = 0; i < WORDS; i += FIFTH_BYTES) {
            x.fifth[i / 4] |= static_cast<u32>(ptx::shared_read<FifthUnit>(fifth + i)) << 8 * (i % 4);
        }
#pragma unroll
        for (u32& bits : x.fifth) {  // nibbles 1 and 2, 5 and 6 change places, then bytes 1 and 2
            const u32 differ = (bits ^ bits >> 4) & 0x00f000f0u;
            bits = ptx::permute(bits ^ differ ^ differ << 4, 0, 0x3120);
        }
    }
    return x;
}

// An operand of int5 holds its 5 bits u in the mantissa of a power of two, so it exceeds the integer u - 16 by this.
// The scores begin at the sum of -offset_of times the query's elements.
DEVICE constexpr float offset_of(int i) { return 16.0f + (!Elements::QK_HALF ? 128.0f : i % 2 ? 64.0f : 1024.0f); }

// Return the operands of a key in step k along D, of the columns that a lane has of a query: a quad; of int5, elements
// i, i + 4, i + 1, i + 5 of a word.
template <int N> DEVICE void key_operands(u32 (&low)[N], u32 (&high)[N], const Key& key, int k, u32 lane) {
    if constexpr (K_KIND == INT5) {
        const auto operand = [&](int i) {
            const int word = k / 2, at = Elements::QK_HALF ? i % 2 * 4 : 0;  // a f16 has room for two places of u
            const int shift = 4 * (word % 4) + i - at - 4;
            const u32 power = !Elements::QK_HALF ? 0x43004300u : at ? 0x54005400u : 0x64006400u;
            const u32 fifth = shift < 0 ? key.fifth[word / 4] << -shift : key.fifth[word / 4] >> shift;
            return (key.low[word] >> (4 * i - at) & 0x000f000fu << at) | power | (fifth & 0x00100010u << at);
        };
        low[0] = operand(k % 2 * 2), high[0] = operand(k % 2 * 2 + 1);
    } else {
        const auto quad = load_quad<K_KIND>(key.row, 16 * k + 4 * (lane & 3));
        pair_along<K_KIND, Elements::QK_HALF>(low, quad, 0);
        pair_along<K_KIND, Elements::QK_HALF>(high, quad, 1);
    }
}

// A lane has this of 16 narrow values: the address of its first key; or codes of its four columns in each 32, of keys
// 2 t and 2 t + 1, and of 2 t + 8 and 2 t + 9.
struct Values {
    static constexpr int CHUNKS = (DV_PART + 31) / 32;
    u32 first, codes[CHUNKS][2];
};

DEVICE Values load_values(u32 values, u32 lane) {
    Values x{values + 2 * (lane & 3) * V_STRIDE, {}};
    if constexpr (V_KIND == CODE4) {  // four codes are an element of a matrix of 16 bits
#pragma unroll
        for (int n = 0; n < Values::CHUNKS; n += 2) {
            const int second = n + 1 < Values::CHUNKS ? n + 1 : n;
            u32 m[4];
            ptx::load_matrices_transposed(m, values + (lane & 15) * V_STRIDE + 16 * (lane < 16 ? n : second));
            x.codes[second][0] = m[2], x.codes[second][1] = m[3];
            x.codes[n][0] = m[0], x.codes[n][1] = m[1];
        }
    }
    return x;
}

// Return the operands of columns 32 n + 4 g + i. A column past the part is computed from another one, and its result is
// not stored.
template <int N>
DEVICE void value_operands(u32 (&low)[4][N], u32 (&high)[4][N], const Values& values, int n, u32 lane) {
    if constexpr (V_KIND == CODE4) {
        widen_codes<Elements::PV_HALF>(low, values.codes[n][0]);
        widen_codes<Elements::PV_HALF>(high, values.codes[n][1]);
    } else {
        const u32 column = 32 * n + 4 * (lane >> 2), safe = column < DV_PART ? column : 0;
        const auto quad = [&](u32 key) { return load_quad<V_KIND>(values.first + key * V_STRIDE, safe); };
        const auto v0 = quad(0), v1 = quad(1), v8 = quad(8), v9 = quad(9);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            pair_across<V_KIND, Elements::PV_HALF>(low[i], v0, v1, i);
            pair_across<V_KIND, Elements::PV_HALF>(high[i], v8, v9, i);
        }
    }
}

#if KEYS_AS_ROWS
#include "keys_as_rows.cuh"
#else
#include "queries_as_rows.cuh"
#endif

// Combine a number with those of all lanes that have the same query rows and other keys.
template <class T, class Combine> DEVICE T over_keys(T x, Combine combine) {
#pragma unroll
    for (u32 bits = KEY_LANES & (~KEY_LANES + 1); bits & KEY_LANES; bits *= 2) {
        x = combine(x, ptx::shuffle_xor(x, bits));
    }
    return x;
}

DEVICE void keep_queries(Queries& queries, u32 lane) {
    if constexpr (KEEP_QUERIES) {
#pragma unroll
        for (int k = 0; k < Q_STEPS; ++k) load_query(queries.kept[k], queries.at, k, lane);
    }
}
