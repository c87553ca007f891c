// The path of keys and values from the page table to shared memory: look up the frames of a tile, copy a tile of keys
// and values into a stage. The frames of the tile after the next are looked up, so the latency of the page table is
// hidden behind the tiles before it.
//
// PAGE_RUNS 1, 2   every 16 keys of a tile lie in one page: block_size and split_tokens are multiples of 16, and tiles
//                  begin at such. A run of 16 keys has one frame and one address, to which rows add a step; 2: rows
//                  follow one another without gaps, so the step is a constant. Only a run that is not whole (the last
//                  of a sequence, a hole) asks for each row whether it exists.
// PAGE_RUNS 0      a lane looks up the frames of the keys `lane` and `lane + 32`. It turns frames into byte offsets,
//                  and shuffles pass each offset to the lanes that copy the row.
//
// A key past the end, or of a hole (-1), is not read: zeros land instead, and a bit marks the key as absent. Of int5,
// runs are copied whole.
//
// Scales have 2 bytes, and an asynchronous copy has at least 4. So a lane loads scales into registers, and stores them
// one tile later.
//
// An early look-up is for the share that an earlier launch left, before it is known to be this launch's share
// (partition.cuh). Its entries may lie outside of this launch's page table, and then they are not read.
#pragma once

#include "params.h"
#include "specialisation.cuh"

constexpr i32 RUN = 16;  // keys

struct Tile {  // the next tile to fetch
    i32 first_key, end_key;
    i32 page, slot;  // PAGE_RUNS: of the first key
    i32 frame[ENTRIES];  // of each run, or of this lane's keys; -1: no such key
    // Of the tile before: of the lane's key or value in each run; or of its keys, one of a key and of a value in turns.
    u16 scales[PAGE_RUNS ? ENTRIES : 2 * MASKS];
};

struct Pages {  // of one sequence and one kv head
    const i32* table;  // the sequence's row of the page table
    const u8* k;
    const u8* v;
    const u16* k_scale;
    const u16* v_scale;
};


DEVICE Pages pages_of(const AttentionParams& p, i32 row, i32 head) {
    Pages pages;
    pages.table = p.block_table + row * p.table_row;
    pages.k = static_cast<const u8*>(p.k) + head * p.k_head;
    pages.v = static_cast<const u8*>(p.v) + head * p.v_head;
    pages.k_scale = p.k_scale + head * p.k_scale_head;
    pages.v_scale = p.v_scale + head * p.v_scale_head;
    return pages;
}

template <bool EARLY> DEVICE i32 frame_at(const AttentionParams& p, const Pages& pages, i32 page) {
    const i32* at = pages.table + page;
    const bool is_inside = !EARLY || static_cast<u64>(at - p.block_table) < static_cast<u64>(p.table_entries);
    return is_inside ? ptx::read(at) : -1;
}

// Look up the frames of the tile whose `first_key`, `page` and `slot` are set.
template <bool EARLY = false> DEVICE void look_up(Tile& tile, const AttentionParams& p, const Pages& pages) {
    if constexpr (PAGE_RUNS) {
        i32 page = tile.page, slot = tile.slot;
#pragma unroll
        for (i32 r = 0; r < ENTRIES; ++r) {
            tile.frame[r] = tile.first_key + RUN * r < tile.end_key ? frame_at<EARLY>(p, pages, page) : -1;
            slot += RUN;
            if (slot >= p.block_size) slot = 0, ++page;
        }
    } else {
#pragma unroll
        for (int e = 0; e < ENTRIES; ++e) {
            const i32 in_tile = 32 * e + static_cast<i32>(ptx::thread_index() % 32), key = tile.first_key + in_tile;
            const bool there = in_tile < TILE && key < tile.end_key;
            tile.frame[e] = there ? frame_at<EARLY>(p, pages, key / p.block_size) : -1;
        }
    }
}

template <bool EARLY = false>
DEVICE Tile first_tile(const AttentionParams& p, const Pages& pages, i32 first_key, i32 end_key) {
    Tile tile{};
    tile.first_key = first_key;
    tile.end_key = end_key;
    if constexpr (PAGE_RUNS) {
        tile.page = first_key / p.block_size;
        tile.slot = first_key - tile.page * p.block_size;
    }
    look_up<EARLY>(tile, p, pages);
    return tile;
}

// Go on to the team's next tile. `step` has the pages and slots of STEP_TOKENS keys.
struct Step {
    i32 pages, slots;
};
DEVICE Step step_of(const AttentionParams& p) {
    const i32 pages = STEP_TOKENS / p.block_size;
    return {pages, STEP_TOKENS - pages * p.block_size};
}
DEVICE void advance(Tile& tile, const AttentionParams& p, const Pages& pages, const Step& step) {
    tile.first_key += STEP_TOKENS;
    if constexpr (PAGE_RUNS) {
        tile.page += step.pages;
        tile.slot += step.slots;
        if (tile.slot >= p.block_size) tile.slot -= p.block_size, ++tile.page;
    }
    look_up(tile, p, pages);
}

template <class... Present> DEVICE void copy_piece(u32 to, const u8* from, Present... present) {
    if constexpr (COPY >= 4) {
        ptx::copy_async<COPY, READ_ONCE>(to, from, present...);
    } else {  // two bytes of any address
        const bool there = (... && present);
        ptx::shared_write(to, static_cast<u16>(there ? ptx::read(from) | ptx::read(from + 1) << 8 : 0));
    }
}

// Copy one tensor's rows of a tile, ROW_BYTES each, to rows that lie STRIDE apart.
template <int ROW_BYTES, int STRIDE>
DEVICE void copy_rows(u32 to, const u8* pool, const i64 (&offset)[ENTRIES], u32 team_thread) {
    constexpr int COPIES_OF_ROW = ROW_BYTES < COPY ? 1 : ROW_BYTES / COPY;  // runs alone have narrower rows
    constexpr int ALL = TILE * COPIES_OF_ROW;
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
        if (mine) copy_piece(to + row * STRIDE + within, pool + (present ? from + within : 0), present);
    }
}

// Copy one tensor's rows of a run, which begins at `from`; the first `left` of them exist.
template <int ROW_BYTES, int STRIDE>
DEVICE void copy_run(u32 to, const u8* from, i64 slot_bytes, i32 left, u32 team_thread) {
    constexpr int COPIES_OF_ROW = ROW_BYTES / COPY, ALL = RUN * COPIES_OF_ROW;
    const i64 step = PAGE_RUNS == 2 ? ROW_BYTES : slot_bytes;
    if (left >= RUN) {
        // A copy's place is a sum of this thread's part and a part that is a constant, or the same for all threads.
        constexpr bool IS_SUM = TEAM_THREADS % COPIES_OF_ROW == 0 || COPIES_OF_ROW % TEAM_THREADS == 0;
        const u32 my_row = team_thread / COPIES_OF_ROW, my_bytes = team_thread % COPIES_OF_ROW * COPY;
        const u32 my_to = to + my_row * STRIDE + my_bytes;
        const u8* my_from = from + (PAGE_RUNS == 2 ? team_thread * COPY : my_row * step + my_bytes);
#pragma unroll RUN_COPIES_AHEAD
        for (int first = 0; first < ALL; first += TEAM_THREADS) {
            const u32 copy = static_cast<u32>(first) + team_thread;
            if (ALL % TEAM_THREADS && copy >= ALL) continue;
            if constexpr (IS_SUM) {
                const int row = first / COPIES_OF_ROW, bytes = first % COPIES_OF_ROW * COPY;
                const i64 at = PAGE_RUNS == 2 ? first * COPY : row * step + bytes;
                copy_piece(my_to + row * STRIDE + bytes, my_from + at);
            } else {
                const u32 row = copy / COPIES_OF_ROW, bytes = copy % COPIES_OF_ROW * COPY;
                copy_piece(to + row * STRIDE + bytes, from + row * step + bytes);
            }
        }
    } else {
#pragma unroll 1
        for (u32 copy = team_thread; copy < ALL; copy += TEAM_THREADS) {
            const u32 row = copy / COPIES_OF_ROW, within = copy % COPIES_OF_ROW * COPY;
            const bool present = static_cast<i32>(row) < left;
            copy_piece(to + row * STRIDE + within, present ? from + row * step + within : from, present);
        }
    }
}

// Copy one plane of a run of int5 keys, ROW_BYTES each.
template <int ROW_BYTES> DEVICE void copy_plane(u32 to, const u8* from, bool present, u32 team_thread) {
    constexpr int ALL = RUN * ROW_BYTES / COPY;
#pragma unroll
    for (int first = 0; first < ALL; first += TEAM_THREADS) {
        const u32 copy = static_cast<u32>(first) + team_thread;
        if (ALL % TEAM_THREADS && copy >= ALL) continue;
        copy_piece(to + copy * COPY, present ? from + copy * COPY : from, present);
    }
}

// Return a scale of a run: lanes 0 to 15 have those of the keys, lanes 16 to 31 those of the values.
DEVICE u16 read_scale(const AttentionParams& p, const Pages& pages, i64 frame, i32 slot, i32 left, u32 lane) {
    const i32 in_run = static_cast<i32>(lane % RUN);
    const bool is_value = lane >= RUN;
    const u16* from = is_value ? pages.v_scale : pages.k_scale;
    const i64 frame_step = is_value ? p.v_scale_frame : p.k_scale_frame;
    const i64 slot_step = is_value ? p.v_scale_slot : p.k_scale_slot;
    return in_run < left ? ptx::read(from + frame * frame_step + (slot + in_run) * slot_step) : u16{0};
}

// Store the scales of the tile before `next`, which is fetched into `stage`.
DEVICE void store_scales(u32 stage, const Tile& next, u32 team_thread) {
    if constexpr (TOKEN_SCALES) {
        if (team_thread >= 32) return;
#pragma unroll
        for (u32 i = 0; i < sizeof next.scales / 2; ++i) {
            const u32 key = PAGE_RUNS ? RUN * i + team_thread % RUN : 32 * (i / 2) + team_thread;
            const u32 place = key + ((PAGE_RUNS ? team_thread >= RUN : i % 2) ? TILE : 0);
            if (key < TILE) ptx::shared_write(stage + SCALES_IN_STAGE + 2 * place, next.scales[i]);
        }
    }
}

DEVICE void fetch_runs(Tile& tile, const AttentionParams& p, const Pages& pages, u32 stage, u32 team_thread) {
    i32 slot = tile.slot;
    u32 present_bits = 0;
#pragma unroll
    for (i32 r = 0; r < ENTRIES; ++r) {
        const i32 left = tile.frame[r] >= 0 ? tile.end_key - tile.first_key - RUN * r : 0;
        const i64 frame = left > 0 ? tile.frame[r] : 0, at = left > 0 ? slot : 0;
        present_bits |= (left >= RUN ? 0xffffu : (1u << left) - 1) << RUN * r;
        const u32 to = stage + RUN * r * K_STRIDE, v_to = stage + V_IN_STAGE + RUN * r * V_STRIDE;
        if constexpr (TOKEN_SCALES) {
            if (team_thread < 32) tile.scales[r] = read_scale(p, pages, frame, static_cast<i32>(at), left, team_thread);
        }
        const u8* k = pages.k + frame * p.k_frame;
        if constexpr (K_KIND == INT5) {
            const u8* fifth = k + p.block_size * (D / 2) + at * (D / 8);
            copy_plane<D / 2>(stage + RUN * r * (D / 2), k + at * (D / 2), left > 0, team_thread);
            copy_plane<D / 8>(stage + FIFTH_IN_STAGE + RUN * r * (D / 8), fifth, left > 0, team_thread);
        } else {
            copy_run<K_ROW, K_STRIDE>(to, k + at * (PAGE_RUNS == 2 ? K_ROW : p.k_slot), p.k_slot, left, team_thread);
        }
        if constexpr (!V_IN_K) {
            copy_run<V_ROW, V_STRIDE>(v_to, pages.v + frame * p.v_frame + at * (PAGE_RUNS == 2 ? V_ROW : p.v_slot),
                                      p.v_slot, left, team_thread);
        }
        slot += RUN;
        if (slot >= p.block_size) slot = 0;
    }
    if (team_thread == 0) ptx::shared_write(stage + PRESENT_IN_STAGE, present_bits);
}

DEVICE void fetch_rows(Tile& tile, const AttentionParams& p, const Pages& pages, u32 stage, u32 team_thread) {
    const u32 lane = team_thread % 32;
    i64 k_offset[ENTRIES], v_offset[ENTRIES], fifth_offset[ENTRIES];
#pragma unroll
    for (int e = 0; e < ENTRIES; ++e) {
        const i32 key = tile.first_key + 32 * e + static_cast<i32>(lane);
        const i64 frame = tile.frame[e], slot = key % p.block_size;
        const bool present = frame >= 0;
        k_offset[e] = present ? frame * p.k_frame + slot * (K_KIND == INT5 ? D / 2 : p.k_slot) : -1;
        fifth_offset[e] = present ? frame * p.k_frame + p.block_size * (D / 2) + slot * (D / 8) : -1;
        v_offset[e] = present ? frame * p.v_frame + slot * p.v_slot : -1;
        const u32 present_bits = ptx::ballot(present);
        if (team_thread == 0) ptx::shared_write(stage + PRESENT_IN_STAGE + 4 * e, present_bits);
        if constexpr (TOKEN_SCALES) {
            const u16* k_scale = pages.k_scale + frame * p.k_scale_frame + slot * p.k_scale_slot;
            const u16* v_scale = pages.v_scale + frame * p.v_scale_frame + slot * p.v_scale_slot;
            tile.scales[2 * e] = present ? ptx::read(k_scale) : u16{0};
            tile.scales[2 * e + 1] = present ? ptx::read(v_scale) : u16{0};
        }
    }
    if constexpr (K_KIND == INT5) {
        copy_rows<D / 2, D / 2>(stage, pages.k, k_offset, team_thread);
        copy_rows<D / 8, D / 8>(stage + FIFTH_IN_STAGE, pages.k, fifth_offset, team_thread);
    } else {
        copy_rows<K_ROW, K_STRIDE>(stage, pages.k, k_offset, team_thread);
    }
    if constexpr (!V_IN_K) copy_rows<V_ROW, V_STRIDE>(stage + V_IN_STAGE, pages.v, v_offset, team_thread);
}

// Start the copies of a tile into a stage, and load its scales. The copies form one commit group. It is empty for a
// tile past the last key, which is never computed.
DEVICE void fetch(Tile& tile, const AttentionParams& p, const Pages& pages, u32 stage, u32 team_thread) {
    if (tile.first_key < tile.end_key) {
        if constexpr (PAGE_RUNS) {
            fetch_runs(tile, p, pages, stage, team_thread);
        } else {
            fetch_rows(tile, p, pages, stage, team_thread);
        }
    }
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
