// Stored elements, and how they become operands of the tensor cores. It knows bits, not attention.
//
//     kind          in shared memory     QK operand              PV operand            pieces of an operand
//     bf16, f16     as stored            as stored (ldmatrix)    as stored             1
//     f32           as stored            3 x bf16                3 x bf16              x = hi + mid + lo, 24 bits in all
//     fp8, int8     1 byte               q's 16-bit kind         bf16                  1: every value is one exactly
//     int4          half a byte          q's 16-bit kind         bf16                  1
//
// An f32 product of pieces keeps the terms above 2^-24: six of nine. Queries and probabilities have as many pieces as they need.
// On sm_80 and later alike, 8-bit floats are widened with two masks, a shift and one multiplication for two elements: their bits, moved to
// the place of the wider exponent, are the value times a power of two, subnormals included. (NaN codes become large numbers: nobody stores
// them, and slots that nobody wrote are never read.)
#pragma once

#include "ptx.cuh"

enum Kind { BF16 = 0, F16 = 1, F32 = 2, E4M3 = 3, E5M2 = 4, INT8 = 5, INT4 = 6 };

template <int KIND> constexpr int BITS_OF = KIND == F32 ? 32 : KIND == INT4 ? 4 : KIND >= E4M3 ? 8 : 16;

template <int QUERY, int CACHED> struct Operands {
    static constexpr bool LDMATRIX = CACHED == BF16 || CACHED == F16;
    static constexpr bool QK_HALF = QUERY == F16;
    static constexpr bool PV_HALF = CACHED == F16;
    static constexpr int Q_PIECES = QUERY == F32 ? 3 : 1;
    static constexpr int KV_PIECES = CACHED == F32 ? 3 : 1;
    static constexpr int P_PIECES = LDMATRIX || QUERY == BF16 ? 1 : QUERY == F16 ? 2 : 3;
};

// `x` as `N` numbers of 16 bits that add up to it.
template <int N, bool HALF> DEVICE void split_pair(u32 (&pieces)[N], float low, float high) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        pieces[i] = ptx::pack<HALF>(low, high);
        if constexpr (N > 1) {  // bf16 only
            low -= ptx::as_float(pieces[i] << 16);
            high -= ptx::as_float(pieces[i] & 0xffff0000u);
        }
    }
}

// Two elements, in bits 0-7 and 16-23 of `w` (the others may hold anything; int4: in bits 0-3 and 16-19), as two of 16 bits.
template <int KIND, bool HALF> DEVICE u32 widen(u32 w) {
    constexpr u32 MINUS_ZERO = 0x80008000u;
    if constexpr (KIND == E4M3) {
        const u32 x = (w & 0x00800080u) << 8 | (w & 0x007f007fu) << (HALF ? 7 : 4);
        return ptx::fused2<HALF>(x, HALF ? 0x5c005c00u : 0x7b807b80u, MINUS_ZERO);  // * 2^8, * 2^120
    } else if constexpr (KIND == E5M2 && HALF) {
        return (w & 0x00ff00ffu) << 8;  // float16 cut short
    } else if constexpr (KIND == E5M2) {
        return ptx::fused2<false>((w & 0x00800080u) << 8 | (w & 0x007f007fu) << 5, 0x77807780u, MINUS_ZERO);  // * 2^112
    } else if constexpr (KIND == INT8 && HALF) {
        return ptx::fused2<true>((w & 0x00ff00ffu) ^ 0x64806480u, 0x3c003c00u, 0xe480e480u);  // 1024 + (x + 128) - 1152
    } else if constexpr (KIND == INT8) {  // 8 bits do not fit below a bf16's point: by way of float
        const float low = ptx::as_float(0x4b000000u | ((w & 0xffu) ^ 0x80u)), high = ptx::as_float(0x4b000000u | ((w >> 16 & 0xffu) ^ 0x80u));
        return ptx::pack<false>(low - 8388736.0f, high - 8388736.0f);  // 2^23 + 128
    } else if constexpr (HALF) {
        return ptx::fused2<true>((w & 0x000f000fu) | 0x64006400u, 0x3c003c00u, 0xe408e408u);  // 1024 + (x + 8) - 1032
    } else {
        return ptx::fused2<false>((w & 0x000f000fu) | 0x43004300u, 0x3f803f80u, 0xc308c308u);  // 128 + (x + 8) - 136
    }
}

// Four neighbouring elements of a row: a quad. The tensor cores sum over k in any order, so a lane takes four neighbours where the manual
// has two pairs, and one load of shared memory serves where ldmatrix, made for 16 bits, cannot.
template <int KIND> struct Quad {
    u32 bytes;  // one element each
};
template <> struct Quad<F32> {
    Words4 words;
};

template <int KIND> DEVICE Quad<KIND> load_quad(u32 row, u32 first) {
    if constexpr (KIND == F32) {
        return {ptx::shared_read<Words4>(row + 4 * first)};
    } else if constexpr (KIND == INT4) {
        u32 x = ptx::shared_read<u16>(row + first / 2);
        x = (x | x << 8) & 0x00ff00ffu;
        return {(x | x << 4) & 0x0f0f0f0fu};
    } else {
        return {ptx::shared_read<u32>(row + first)};
    }
}

DEVICE float element(const Quad<F32>& quad, int i) { return ptx::as_float(i == 0 ? quad.words.x : i == 1 ? quad.words.y : i == 2 ? quad.words.z : quad.words.w); }

// Elements 2i and 2i + 1 of a quad, in pieces.
template <int KIND, bool HALF, int N> DEVICE void pair_along(u32 (&pieces)[N], const Quad<KIND>& quad, int i) {
    if constexpr (KIND == F32) {
        split_pair<N, HALF>(pieces, element(quad, 2 * i), element(quad, 2 * i + 1));
    } else {
        pieces[0] = widen<KIND, HALF>(ptx::permute(quad.bytes, 0, i ? 0x4342 : 0x4140));
    }
}

// Element i of two quads: of two rows, that is.
template <int KIND, bool HALF, int N> DEVICE void pair_across(u32 (&pieces)[N], const Quad<KIND>& low, const Quad<KIND>& high, int i) {
    if constexpr (KIND == F32) {
        split_pair<N, HALF>(pieces, element(low, i), element(high, i));
    } else {
        pieces[0] = widen<KIND, HALF>(ptx::permute(low.bytes, high.bytes, 0x4400u + 0x1111u * static_cast<u32>(i)));
    }
}
