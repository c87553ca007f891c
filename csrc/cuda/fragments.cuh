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
    float factor[2];  // of the scores of this lane's rows: in units of log2(e), or of the soft cap if there is one
    u32 kept[KEEP_QUERIES ? D_PART / 16 : 1][QUERY_WORDS];
};

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
        for (int k = 0; k < D_PART / 16; ++k) load_query(queries.kept[k], queries.at, k, lane);
    }
}
