// The path of keys and values from the page table to shared memory: look up the frame of each key, copy a tile of keys
// and values into a stage.
//
// A lane looks up the frames of the keys `lane` and `lane + 32` of the tile after the next, so the latency of the page
// table is hidden behind the tiles before it. The lane turns frames into byte offsets, and shuffles pass each offset to
// the lanes that copy the row. A key past the end, or of a punched page (-1), is not read: zeros land instead, and a
// bit marks the key as absent.
//
// BULK: one lane per key copies its row of K and its row of V, with one instruction each. A thread that waits at the
// stage's mbarrier sees the rows that landed. The copying lane issues a fence after the team's barrier: it orders
// earlier reads and writes of the stage (zeros, sums) before the copies. Tiles past the last are not fetched, so every
// phase of an mbarrier is waited for exactly once, and its parity is a bit that flips.
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

template <int ROW_BYTES> DEVICE void clear_row(u32 at) {
#pragma unroll 4
    for (int byte = 0; byte < ROW_BYTES; byte += 16) ptx::shared_write(at + byte, Words4{0, 0, 0, 0});
}

// Copy the rows of a tile, each by one bulk copy; the warps of the team take turns. Rows of absent keys are set to
// zero; the team's next barrier makes these zeros visible.
DEVICE void copy_rows_bulk(const Pages& pages, const i64 (&k_offset)[ENTRIES], const i64 (&v_offset)[ENTRIES],
                           u32 stage, u32 barrier, u32 team_thread) {
    const u32 lane = team_thread % 32;
    const bool mine = lane % TEAM_WARPS == team_thread / 32;
    u32 rows = 0;
#pragma unroll
    for (int e = 0; e < ENTRIES; ++e) rows += ptx::count_bits(ptx::ballot(mine && k_offset[e] >= 0));
    if (lane == 0) ptx::barrier_arrive_expecting(barrier, rows * (K_ROW + (V_IN_K ? 0 : V_ROW)));
    ptx::fence_async();
    ptx::sync_warp();
#pragma unroll
    for (int e = 0; e < ENTRIES; ++e) {
        const u32 row = 32 * e + lane;
        const u32 k_at = stage + row * K_STRIDE, v_at = stage + V_IN_STAGE + row * V_STRIDE;
        if (!mine || row >= TILE) continue;
        if (k_offset[e] >= 0) {
            ptx::copy_bulk(k_at, pages.k + k_offset[e], K_ROW, barrier);
            if constexpr (!V_IN_K) ptx::copy_bulk(v_at, pages.v + v_offset[e], V_ROW, barrier);
        } else {
            clear_row<K_ROW>(k_at);
            if constexpr (!V_IN_K) clear_row<V_ROW>(v_at);
        }
    }
}

// Start the copies of a tile into a stage. All copies that are not bulk copies form one commit group, which may be
// empty.
DEVICE void fetch(const Tile& tile, const AttentionParams& p, const Pages& pages, u32 stage, u32 barrier,
                  u32 team_thread) {
    const u32 lane = team_thread % 32;
    if (BULK && tile.first_key >= tile.end_key) {
        if constexpr (TOKEN_SCALES) ptx::copy_commit();
        return;
    }
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
    if constexpr (BULK) {
        copy_rows_bulk(pages, k_offset, v_offset, stage, barrier, team_thread);
    } else {
        copy_rows<K_ROW, K_STRIDE>(stage, pages.k, k_offset, team_thread);
        if constexpr (!V_IN_K) copy_rows<V_ROW, V_STRIDE>(stage + V_IN_STAGE, pages.v, v_offset, team_thread);
    }
    if constexpr (!BULK || TOKEN_SCALES) ptx::copy_commit();
}

// Wait until the oldest tile in flight has landed for this thread; the team's barrier after it makes the tile visible
// to the team. `phases` has a bit for each stage.
DEVICE void wait_for_tile(u32 barriers, u32& phases, u32 stage) {
    if constexpr (!BULK || TOKEN_SCALES) ptx::copy_wait<STAGES - 2>();
    if constexpr (BULK) {
        ptx::barrier_wait(barriers + 8 * stage, phases >> stage & 1);
        phases ^= 1u << stage;
    }
}

// Initialise one mbarrier for each stage of each team. A phase takes one arrival of each of the team's warps. A block
// barrier stands between this and the first copy.
DEVICE void init_barriers(u32 base, u32 thread) {
    if constexpr (BULK) {
        if (static_cast<int>(thread) < NUM_BARRIERS) {
            ptx::barrier_init(base + BARRIERS_AT + 8 * thread, TEAM_WARPS);
            ptx::fence_barrier_init();
        }
    }
}

// Wait for the other warps that share a stage. A team of one warp needs no block barrier.
DEVICE void sync_team(u32 team) {
    if constexpr (TEAM_THREADS == 32) {
        ptx::sync_warp();
    } else {
        ptx::sync_team(1 + team, TEAM_THREADS);
    }
}
