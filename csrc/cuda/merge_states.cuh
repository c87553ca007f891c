// merge_states: attention over two sets of keys becomes attention over both.
//
//     lse = ln(e^a + e^b)        out = out_a e^(a - lse) + out_b e^(b - lse)        a state that saw nothing (-inf) is not looked at
//
// Specialised   Q_KIND: of out, elements.cuh       HEAD_DIM_V
// Grid          ceil(T * H / rows of a CTA); a row belongs to 8, 16 or 32 lanes of a warp.
// Bytes         3 * Dv elements and 12 of LSEs per row.
// Tuned         nowhere: no GPU has run this yet.
#include "params.h"
#include "rows.cuh"

constexpr u32 LANES = LANES_OF<HEAD_DIM_V>;
constexpr float LOG2_E = 1.44269504088896341f, LN_2 = 0.69314718055994531f;

KERNEL(32 * ROW_WARPS, 1) merge_states(const __grid_constant__ MergeParams p) {
    const u32 thread = ptx::thread_index();
    const i64 row = static_cast<i64>(ptx::block_index()) * (32 / LANES * ROW_WARPS) + thread / LANES;
    if (row >= p.num_rows) return;
    const u32 token = static_cast<u32>(row) / p.num_heads, head = static_cast<u32>(row) % p.num_heads, lane = thread % LANES;
    const float a = ptx::read(p.lse_a + token * p.lse_a_token + head * p.lse_a_head);
    const float b = ptx::read(p.lse_b + token * p.lse_b_token + head * p.lse_b_head);
    const bool has_a = a != MINUS_INFINITY, has_b = b != MINUS_INFINITY;
    const float top = has_a && has_b ? ptx::larger(a, b) : has_a ? a : b;
    const float e_a = has_a ? ptx::exp2((a - top) * LOG2_E) : 0.0f, e_b = has_b ? ptx::exp2((b - top) * LOG2_E) : 0.0f, sum = e_a + e_b;
    const float w_a = has_a ? e_a / sum : 0.0f, w_b = has_b ? e_b / sum : 0.0f;
    const u8* from_a = static_cast<const u8*>(p.out_a) + token * p.a_token + head * p.a_head;
    const u8* from_b = static_cast<const u8*>(p.out_b) + token * p.b_token + head * p.b_head;
    u8* to = static_cast<u8*>(p.out) + row * (HEAD_DIM_V * BITS_OF<Q_KIND> / 8);
    for (i32 column = 4 * static_cast<i32>(lane); column < HEAD_DIM_V; column += 4 * LANES) {
        Quad4 x{}, y{}, z;
        if (w_a != 0.0f) x = read_quad<Q_KIND>(from_a, column, HEAD_DIM_V, p.vectors);
        if (w_b != 0.0f) y = read_quad<Q_KIND>(from_b, column, HEAD_DIM_V, p.vectors);
#pragma unroll
        for (int i = 0; i < 4; ++i) z.at[i] = ptx::fused(x.at[i], w_a, ptx::times(y.at[i], w_b));
        write_quad<Q_KIND>(to, column, HEAD_DIM_V, p.vectors, z);
    }
    if (lane == 0) ptx::write(p.lse + row, has_a || has_b ? top + ptx::log2(sum) * LN_2 : MINUS_INFINITY);
}
