// The path of keys and values from the page table to shared memory: look up the frame of each key, copy a tile of keys
// and values into a stage.
//
// A lane looks up the frames of the keys `lane` and `lane + 32` of the tile after the next, so the latency of the page
// table is hidden behind the tiles before it. The lane turns frames into byte offsets, and shuffles pass each offset to
// the lanes that copy the row. A key past the end, or of a punched page (-1), is not read: zeros land instead, and a
// bit marks the key as absent.
#pragma once

#include "params.h"
#include "specialisation.cuh"

struct Tile {  // the next tile to fetch
    i32 first_key, end_key;
    i32 frame[ENTRIES];  // of this lane's keys; -1: no such key
};

struct Pages {  // of one sequence and one kv head
    const i32* table;  // the sequence's row of the page table
    const u8* k;
    const u8* v;
    const float* k_scale;
    const float* v_scale;
};

DEVICE Pages pages_of(const AttentionParams& p, i32 sequence, i32 head) {
    const i32 row = p.rows ? ptx::read(p.rows + sequence) : sequence;
    Pages pages;
    pages.table = p.block_table + row * p.table_row;
    pages.k = static_cast<const u8*>(p.k) + head * p.k_head;
    pages.v = static_cast<const u8*>(p.v) + head * p.v_head;
    pages.k_scale = p.k_scale + head * p.k_scale_head;
    pages.v_scale = p.v_scale + head * p.v_scale_head;
    return pages;
}

DEVICE void look_up(Tile& tile, const AttentionParams& p, const Pages& pages, i32 first_key, i32 end_key) {
    tile.first_key = first_key;
    tile.end_key = end_key;
#pragma unroll
    for (int e = 0; e < ENTRIES; ++e) {
        const i32 in_tile = 32 * e + static_cast<i32>(ptx::thread_index() % 32), key = first_key + in_tile;
        tile.frame[e] = in_tile < TILE && key < end_key ? ptx::read(pages.table + key / p.block_size) : -1;
    }
}

// Copy one tensor's rows of a tile, ROW_BYTES each, to rows that lie STRIDE apart.
template <int ROW_BYTES, int STRIDE>
DEVICE void copy_rows(u32 to, const u8* pool, const i64 (&offset)[ENTRIES], u32 team_thread) {
    constexpr int COPIES_OF_ROW = ROW_BYTES / COPY, ALL = TILE * COPIES_OF_ROW;
#pragma unroll COPIES_AHEAD
    for (int first = 0; first < ALL; first += TEAM_THREADS) {
        const u32 copy = static_cast<u32>(first) + team_thread;
        const bool mine = ALL % TEAM_THREADS == 0 || copy < ALL;
        const u32 row = mine ? copy / COPIES_OF_ROW : 0, within = copy % COPIES_OF_ROW * COPY;
        i64 from = ptx::shuffle(offset[0], row % 32);
        if constexpr (ENTRIES > 1) {
            const i64 second = ptx::shuffle(offset[ENTRIES - 1], row % 32);
            from = row < 32 ? from : second;
        }
        const bool present = from >= 0;
        if (mine) ptx::copy_async<COPY>(to + row * STRIDE + within, pool + (present ? from + within : 0), present);
    }
}

// Start the copies of a tile into a stage. They form one commit group, which may be empty.
DEVICE void fetch(const Tile& tile, const AttentionParams& p, const Pages& pages, u32 stage, u32 team_thread) {
    const u32 lane = team_thread % 32;
    i64 k_offset[ENTRIES], v_offset[ENTRIES];
#pragma unroll
    for (int e = 0; e < ENTRIES; ++e) {
        const i32 key = tile.first_key + 32 * e + static_cast<i32>(lane);
        const i64 frame = tile.frame[e], slot = key % p.block_size;
        const bool present = frame >= 0;
        k_offset[e] = present ? frame * p.k_frame + slot * p.k_slot : -1;
        v_offset[e] = present ? frame * p.v_frame + slot * p.v_slot : -1;
        const u32 present_bits = ptx::ballot(present);
        if (team_thread == 0) ptx::shared_write(stage + PRESENT_IN_STAGE + 4 * e, present_bits);
        if constexpr (TOKEN_SCALES) {
            const u32 row = 32 * e + lane, to = stage + SCALES_IN_STAGE + 4 * row;
            const float* k_scale = pages.k_scale + (present ? frame * p.k_scale_frame + slot * p.k_scale_slot : 0);
            const float* v_scale = pages.v_scale + (present ? frame * p.v_scale_frame + slot * p.v_scale_slot : 0);
            if (team_thread < 32 && row < TILE) {
                ptx::copy_async<4>(to, k_scale, present);
                ptx::copy_async<4>(to + 4 * TILE, v_scale, present);
            }
        }
    }
    copy_rows<K_ROW, K_STRIDE>(stage, pages.k, k_offset, team_thread);
    if constexpr (!V_IN_K) copy_rows<V_ROW, V_STRIDE>(stage + V_IN_STAGE, pages.v, v_offset, team_thread);
    ptx::copy_commit();
}

// Wait for the other warps that share a stage. A team of one warp needs no block barrier.
DEVICE void sync_team(u32 team) {
    if constexpr (TEAM_THREADS == 32) {
        ptx::sync_warp();
    } else {
        ptx::sync_team(1 + team, TEAM_THREADS);
    }
}
