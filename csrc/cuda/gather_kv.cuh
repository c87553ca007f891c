// gather_kv: copy tokens of sequences out of their pages into rows of results, and dequantise them.
//
//     row j of sequence b = the vector of the token at position first[b] + j, times its scale, rounded once
//                           0 where there is no token: before 0, from seq_lens[b] on, in a punched page
//
// Specialised   KV_KIND, OUT_KIND: elements.cuh     HEAD_DIM, HEAD_DIM_V
//               K_SCALE, V_SCALE: 0 none, 1 one for all, 2 per (token, head)
// Grid          two runs of ceil(rows * K / vectors of a CTA) CTAs: first the CTAs of K, then those of V.
// A vector      is one row of one kv head. 8, 16 or 32 lanes of a warp copy it, four elements at a time. The lanes look
//               up its sequence by a binary search in `starts` (packed results), and its frame in the page table.
// Bytes         (D + Dv) * (size of a stored element + size of a result) per row and kv head; tables come from caches.
// Tuned         nowhere.
#include "params.h"
#include "rows.cuh"

constexpr u32 LANES = LANES_OF<(HEAD_DIM > HEAD_DIM_V ? HEAD_DIM : HEAD_DIM_V)>;
constexpr u32 VECTORS = 32 / LANES * ROW_WARPS;  // of a CTA

// Read four neighbouring stored elements as floats; columns from `dim` on may hold anything.
template <int KIND> DEVICE Quad4 stored_quad(const u8* row, i32 column, i32 dim, bool vectors) {
    if constexpr (KIND < E4M3) {
        return read_quad<KIND>(row, column, dim, vectors);
    } else {
        constexpr int BYTES = KIND == INT4 ? 2 : 4, ELEMENTS = 4 / BYTES;
        const u8* at = row + column / ELEMENTS;
        u32 x = 0;
        if (vectors && column + 4 <= dim) {
            if constexpr (KIND == INT4) {
                x = ptx::read(reinterpret_cast<const u16*>(at));
            } else {
                x = ptx::read(reinterpret_cast<const u32*>(at));
            }
        } else {
#pragma unroll
            for (int i = 0; i < BYTES; ++i) {
                if (column + i * ELEMENTS < dim) x |= static_cast<u32>(ptx::read(at + i)) << 8 * i;
            }
        }
        Quad4 y;
#pragma unroll
        for (int i = 0; i < 2; ++i) {  // every quantised element is exactly a bfloat16
            u32 pair[1];
            pair_along<KIND, false>(pair, Quad<KIND>{x}, i);
            y.at[2 * i] = ptx::as_float(pair[0] << 16);
            y.at[2 * i + 1] = ptx::as_float(pair[0] & 0xffff0000u);
        }
        return y;
    }
}

struct Source {  // one token's vector of one kv head
    const u8* from;
    const float* scale;
    bool there;  // false: zeros
};

template <int DIM, int SCALE> DEVICE void copy_vector(const Source& v, u8* to, bool reads, bool stores, u32 lane) {
    const float scale = SCALE && v.there ? ptx::read(v.scale) : 1.0f;
    for (i32 column = 4 * static_cast<i32>(lane); column < DIM; column += 4 * LANES) {
        Quad4 x{};
        if (v.there) x = stored_quad<KV_KIND>(v.from, column, DIM, reads);
        if constexpr (SCALE != 0) {
#pragma unroll
            for (int i = 0; i < 4; ++i) x.at[i] = v.there ? ptx::times(x.at[i], scale) : 0.0f;
        }
        write_quad<OUT_KIND>(to, column, DIM, stores, x);
    }
}

KERNEL(32 * ROW_WARPS, 1) gather_kv(const __grid_constant__ GatherParams p) {
    const u32 thread = ptx::thread_index(), run = ptx::num_blocks() / 2, lane = thread % LANES;
    const bool is_v = ptx::block_index() >= run;
    const i64 number = static_cast<i64>(ptx::block_index() % run) * VECTORS + thread / LANES;
    const i64 row = number / p.num_kv_heads, head = number % p.num_kv_heads;
    if (row >= p.num_rows) return;
    i64 sequence = 0, in_sequence = row;
    if (p.starts) {
        if (row >= ptx::read(p.starts + p.num_sequences)) return;  // results have more rows than there are tokens
        for (i64 beyond = p.num_sequences; sequence + 1 < beyond;) {  // the last that starts at or before the row
            const i64 middle = (sequence + beyond) / 2;
            if (ptx::read(p.starts + middle) <= row) {
                sequence = middle;
            } else {
                beyond = middle;
            }
        }
        in_sequence = row - ptx::read(p.starts + sequence);
    } else {
        sequence = row / p.padded_rows;
        in_sequence = row % p.padded_rows;
    }
    const i64 position = ptx::read(p.first + sequence) + in_sequence;
    Source v{};
    if (position >= 0 && position < ptx::read(p.seq_lens + sequence)) {
        const i64 table_row = p.rows ? ptx::read(p.rows + sequence * p.rows_step) : sequence;
        const i64 frame = ptx::read(p.block_table + table_row * p.table_row + position / p.block_size);
        const i64 at = position % p.block_size;
        v.there = frame >= 0;
        v.from = is_v ? static_cast<const u8*>(p.v) + frame * p.v_frame + at * p.v_slot + head * p.v_head
                      : static_cast<const u8*>(p.k) + frame * p.k_frame + at * p.k_slot + head * p.k_head;
        v.scale = is_v ? p.v_scale + frame * p.v_scale_frame + at * p.v_scale_slot + head * p.v_scale_head
                       : p.k_scale + frame * p.k_scale_frame + at * p.k_scale_slot + head * p.k_scale_head;
    }
    const i64 out_row = p.starts ? row : in_sequence;
    if (is_v) {  // the same for all threads of the CTA
        u8* to = static_cast<u8*>(p.v_out) + sequence * p.v_out_sequence + out_row * p.v_out_row + head * p.v_out_head;
        copy_vector<HEAD_DIM_V, V_SCALE>(v, to, p.v_vectors, p.v_out_vectors, lane);
    } else {
        u8* to = static_cast<u8*>(p.k_out) + sequence * p.k_out_sequence + out_row * p.k_out_row + head * p.k_out_head;
        copy_vector<HEAD_DIM, K_SCALE>(v, to, p.k_vectors, p.k_out_vectors, lane);
    }
}
