// What a launch is given: every pointer with its shape. The mirror of `AttentionParams` in pagedkv/kernels/cuda_launch.py, field by field.
//
// Letters: F frames, S block_size, B sequences, A rows of the page table, P pages, T new tokens, H query heads, K kv heads, G = H / K,
// D head_dim, Dv head_dim of the values. Strides are in bytes; the last dim of q, k, v and out is contiguous.
#pragma once

#include "ptx.cuh"

struct AttentionParams {
    const void* q;            // [T, H, D]
    const void* k;            // [F, S, K, D]; two elements to a byte for int4
    const void* v;            // [F, S, K, Dv]
    const float* k_scale;     // [F, S, K], or one for all with strides of 0
    const float* v_scale;
    const i32* block_table;   // [A, P]
    const i32* rows;          // [B], or null: row b is sequence b
    const i32* seq_lens;      // [B]
    const i32* cu_seqlens_q;  // [B + 1]
    const float* sinks;       // [H], or null
    const float* slopes;      // [H], or null: ALiBi
    const u8* tree_mask;      // [T, >= most queries of a sequence], or null
    void* out;                // [T, H, Dv]
    float* lse;               // [T, H], contiguous
    float* partials;          // [num_slots][ROWS * Dv + 2 * ROWS]: o not normalised, then m and l of each row
    u32* tickets;             // [num_slots], all 0 before and after a launch

    i64 q_token, q_head, k_frame, k_slot, k_head, v_frame, v_slot, v_head;
    i64 k_scale_frame, k_scale_slot, k_scale_head, v_scale_frame, v_scale_slot, v_scale_head;
    i64 table_row, tree_row, out_token, out_head;
    i64 num_slots;

    i32 num_sequences, num_heads, num_kv_heads, block_size;
    i32 causal;        // bottom-right aligned
    i32 window;        // 0: none
    i32 split_tokens;  // keys are cut at multiples of it; 0: where the plan likes
    i32 spread;        // with split_tokens: 1, the pieces of a row tile go to several CTAs; 0, one CTA folds them
    i32 min_rows, max_rows;  // sequences with fewer or more rows (queries x G) than that belong to another launch
    i32 q_vectors;     // q may be read four elements at a time
    float scale, softcap;  // softcap 0: none
};
