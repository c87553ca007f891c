// The partition of a launch's work among its CTAs. The host makes none: a CTA finds its share from the lengths on the
// device, so a decode is one launch, and a graph that is replayed for other lengths is right.
//
// The layers of a step have the same partition. Each CTA keeps its share in a `Record`, with a fingerprint of all
// numbers that the partition follows from. In the next launch it reads lengths and record at once, and computes a share
// only if the fingerprint is another one. So the first layer of a step computes the partition, and the others read it.
// Two steps that differ have equal fingerprints with a probability of 2^-64. All threads of a CTA read lengths for the
// fingerprint. The first entries of the page table are looked up for the share of the record, while it is compared.
//
// Work is laid out on a line: sequences, in each the tiles of ROWS query rows, in each the kv heads. Such a (sequence,
// tile, head) is a unit, and OVERHEAD + steps is its width on the line. An item of a unit is one step of STEP_TOKENS
// keys; with split_tokens, an item is a chunk of so many keys, which counts as several steps. The line is cut into
// equal shares, one for each CTA:
//
//     |  unit 0      |  unit 1   |   unit 2                                         |  unit 3 ...
//     |   CTA 0          |   CTA 1           |   CTA 2           |   CTA 3
//
// If a unit is longer than a share, the cut may be even: each unit begins at the border of a share and is cut into
// equal pieces. A CTA then has one piece of one unit, and a few CTAs may have none. The border is moved for this only
// if all units fit and shares become at most a sixteenth wider, as with units of about equal length. 8 sequences of
// 4,096 tokens take an H200 42 us instead of 47.
//
// Else a CTA has at most two units that it shares with others: the one its share begins in, and the one its share ends
// in. Each CTA of a shared unit leaves a partial state, and the unit's last CTA merges them. A `place` is a position on
// the line. The index of a partial state, and of a unit's ticket, follows from places, with no counting. "Free cut"
// means that there is no split_tokens, so a share may end after any step:
//     free cut      the unit's first CTA c: partial state 2 c + 1; each later CTA c: 2 c       max_partials = 2 CTAs
//     split_tokens  place of the chunk / width of a chunk                                      chunks do not overlap
// Cost: one pass of all threads over the sequences' lengths. To compute a share, one warp makes two more, or three if a
// unit is longer than a share, each with a pass over the row tiles of the lane's sequences.
#pragma once

#include "params.h"
#include "ptx.cuh"

constexpr int OVERHEAD = 2;  // the cost of loading a unit's queries and storing its result, in steps

struct Unit {
    i32 sequence, tile, head;
    i32 first_query, queries, length, right, row;  // of the sequence
    i32 begin_key, end_key;  // no row of the tile sees a key outside
    i64 place;  // where the unit begins on the line
    i32 first_item, num_items;  // steps, or chunks (the first chunk has number first_item)
    i32 weight;  // steps of an item
};

struct Pieces {  // of a unit: its partial states
    i64 first;  // the index of the first one
    i32 count, mine;  // mine: of a free cut, the number of this CTA's piece
    i32 step;  // of indices from the second on; from the first to the second it is 1
    DEVICE_MEMBER i64 index(i32 piece) const {
        return piece ? first + 1 + static_cast<i64>(step) * (piece - 1) : first;
    }
};

struct UnitRow {  // a row of a unit; a query that the unit does not have has some head
    i32 query, head;
};

// Row x is head x % G of query x / G. A decode has one query, and takes no division.
DEVICE UnitRow unit_row(const Unit& unit, i32 group, i32 x) {
    if (unit.queries == 1) return {x >= group, x >= group ? 0 : x};
    const i32 query = x / group;
    return {query, x - query * group};
}

struct Sequence {
    i32 first_query, queries, length, num_tiles;  // num_tiles 0: another launch serves it
    i32 right;  // positions after its own that a query may see; a tree mask may hide more
    i32 row;  // of the page table
};

struct alignas(128) Record {  // what a CTA keeps from launch to launch, zeros at first
    u64 fingerprint;  // 0: nothing is kept
    u64 launches;  // so far, which is the number of the present launch
    i64 share, begin, end;
    Unit unit;  // in which the share begins
    i32 num_tiles;  // of its sequence
    i32 even, first_owner, last_owner;
};
static_assert(sizeof(Record) == 8 * RECORD_WORDS, "Python allocates records");

// The number of the present launch, and whether the record of a CTA had the present share.
struct Recalled {
    u64 launch;
    bool is_known;
};

// LEAN: from unit to unit the share is read again from the record, so that no registers hold it while a CTA attends.
template <int ROWS, int STEP_TOKENS, int THREADS, bool LEAN> struct Partition {
    const AttentionParams& p;
    i32 group;  // G
    i64 share;  // width of each CTA's share
    i64 begin, end;  // this CTA's share of the line
    i32 even;  // 1: an even cut
    bool is_first;  // the current unit is the one in which the share begins
    i32 first_owner, last_owner;  // the CTAs that have the first and last item of that unit
    Unit unit;
    Sequence sequence;

    DEVICE_MEMBER explicit Partition(const AttentionParams& params) : p(params) {
        group = p.num_heads / p.num_kv_heads;
        is_first = true;
    }

    // Read this CTA's share from its record, or compute it and keep it there. All threads of the CTA call this.
    // sums: the address of 8 bytes of shared memory for each warp, which no thread may write before the next barrier.
    // look_up: called with the share of the record, whether it is the present one or not.
    template <class LookUp> DEVICE_MEMBER Recalled recall(Record* record, u32 sums, LookUp look_up) {
        const u64 first_query = static_cast<u32>(ptx::read(p.cu_seqlens_q));
        const u64 kept = ptx::read(&record->fingerprint), launch = ptx::read(&record->launches);
        read_record(record);
        u64 sum = hash_of_sequences();
        look_up();
#pragma unroll
        for (int bits = 16; bits; bits /= 2) sum += ptx::shuffle_xor(sum, bits);
        const u32 thread = ptx::thread_index();
        if (thread % 32 == 0) ptx::shared_write(sums + thread / 4, sum);
        ptx::sync_block();  // the sums are there, and every thread has read the record
        u64 now = mixed(static_cast<u64>(p.partition_key) + first_query);
#pragma unroll
        for (u32 warp = 0; warp < THREADS / 32; ++warp) now += ptx::shared_read<u64>(sums + 8 * warp);
        now = now ? now : 1;
        if (thread == 0) ptx::write(&record->launches, launch + 1);
        if (now != kept) {
            if (thread < 32) renew(p, record, now);
            ptx::sync_block();
            read_record(record);
        }
        return {launch, now == kept};
    }

    // Compute this CTA's share and keep it in its record. One warp calls this. The code is apart: most launches do not
    // run it, and each line of instructions before the first key is a miss of the cache.
    NOINLINE void renew(const AttentionParams& params, Record* record, u64 fingerprint) {
        Partition mine(params);
        mine.compute();
        if (ptx::thread_index() == 0) mine.write_record(record, fingerprint);
    }

    // Compute this CTA's share from the lengths.
    DEVICE_MEMBER void compute() {
        const i32 lane = static_cast<i32>(ptx::thread_index() % 32);
        i64 longest = 0, unused = 0;
        even = 0;
        i64 total = width_of_all(lane, longest);
        share = (total + ptx::num_blocks() - 1) / ptx::num_blocks();
        share = share ? share : 1;
        if (!p.split_tokens && longest > share) {
            const i64 line = total, cut = share, pieces = longest / cut;
            even = 1;
            share = (longest - OVERHEAD + pieces - 1) / pieces;
            share = share ? share : 1;  // no unit has keys
            total = width_of_all(lane, unused);
            if (total > share * ptx::num_blocks() || 16 * share > 17 * cut) {
                even = 0;
                share = cut;
                total = line;
            }
        }
        begin = share * ptx::block_index();
        end = begin + share < total ? begin + share : total;
        unit = Unit{};
        unit.weight = 1;  // item_at divides by it, even for a CTA without a share
        sequence = Sequence{};
        first_owner = last_owner = 0;
        if (begin >= end) return;
        find(lane);
        first_owner = static_cast<i32>(owner(0));
        last_owner = static_cast<i32>(owner(unit.num_items - 1));
    }

    // Return whether the current unit touches this CTA's share.
    DEVICE_MEMBER bool more() const { return begin < end && unit.place < end; }

    DEVICE_MEMBER void advance() {
        is_first = false;
        if constexpr (LEAN) read_share(reinterpret_cast<Record*>(p.kept) + ptx::block_index());
        const i64 place = even ? end : end_place();  // of an even cut, a share has one unit
        if (unit.head + 1 < p.num_kv_heads) {
            ++unit.head;
            unit.place = place;
            return;
        }
        if (unit.tile + 1 < sequence.num_tiles) {
            fill(unit.sequence, unit.tile + 1, place);
            return;
        }
        i32 b = unit.sequence;
        unit.place = place;
        if (place >= end) return;
        do sequence = load(++b);
        while (!sequence.num_tiles);  // the share goes on, so there is a next unit
        fill(b, 0, place);
    }

    // This CTA computes the items [first_mine(), end_mine()) of the current unit.
    DEVICE_MEMBER i32 first_mine() const {
        return whole_units() ? (starts_here() ? 0 : unit.num_items) : item_at(begin);
    }
    DEVICE_MEMBER i32 end_mine() const {
        return whole_units() ? (starts_here() ? unit.num_items : 0) : item_at(end_of_share());
    }

    // Return whether the current unit begins in this CTA's share. A unit that sees no key has no items: the CTA in
    // whose share it begins writes its result.
    DEVICE_MEMBER bool starts_here() const { return unit.place >= begin; }

    // Return the pieces of the current unit, on which this CTA works. Only a shared unit takes divisions, and the first
    // one of the share takes none.
    DEVICE_MEMBER Pieces pieces() const {
        if (unit.num_items <= 1 || whole_units()) return {0, 1, 0, 1};
        if (p.split_tokens) return {place_of(0) / unit.weight, unit.num_items, 0, 1};
        if (place_of(0) >= begin && place_of(unit.num_items - 1) < end_of_share()) return {0, 1, 0, 1};
        const i32 first = is_first ? first_owner : static_cast<i32>(owner(0));
        const i32 last = is_first ? last_owner : static_cast<i32>(owner(unit.num_items - 1));
        return {2 * static_cast<i64>(first) + 1, last - first + 1, static_cast<i32>(ptx::block_index()) - first, 2};
    }

    // Items [i, last) are the keys [from_key(i), to_key(last)).
    DEVICE_MEMBER i32 from_key(i32 i) const {
        if (!p.split_tokens) return unit.begin_key + i * STEP_TOKENS;
        const i32 cut = (unit.first_item + i) * p.split_tokens;
        return cut > unit.begin_key ? cut : unit.begin_key;
    }
    DEVICE_MEMBER i32 to_key(i32 last) const {
        const i32 cut =
            p.split_tokens ? (unit.first_item + last) * p.split_tokens : unit.begin_key + last * STEP_TOKENS;
        return last == unit.num_items || cut > unit.end_key ? unit.end_key : cut;
    }

private:
    // Return the sum of hashes of lengths, offsets and rows, over the sequences that this thread reads. It reads four
    // sequences at once where it has as many, and no load waits for another.
    DEVICE_MEMBER u64 hash_of_sequences() const {
        u64 sum = 0;
#pragma unroll 4
        for (i32 b = static_cast<i32>(ptx::thread_index()); b < p.num_sequences; b += THREADS) {
            const u64 end_query = static_cast<u32>(ptx::read(p.cu_seqlens_q + b + 1));
            const u64 length = static_cast<u32>(ptx::read(p.seq_lens + b));
            const u64 row = static_cast<u32>(p.rows ? ptx::read(p.rows + b) : b);
            const u64 causal = p.causal_of ? ptx::read(p.causal_of + b * p.causal_step) : 0;
            const u64 place = mixed(static_cast<u64>(p.partition_key) + 2 * static_cast<u64>(b) + causal);
            sum += mixed((end_query << 32 | length) ^ place) + mixed(row + place);
        }
        return sum;
    }
    DEVICE_MEMBER static u64 mixed(u64 x) {  // the finaliser of splitmix64
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
        x = (x ^ x >> 27) * 0x94d049bb133111ebull;
        return x ^ x >> 31;
    }

    // Call move(mine, kept) for each number of the share, or for each number that a record holds.
    template <class Move> DEVICE_MEMBER void for_share(Record* record, Move move) {
        move(share, &record->share);
        move(begin, &record->begin);
        move(end, &record->end);
        move(even, &record->even);
        move(first_owner, &record->first_owner);
        move(last_owner, &record->last_owner);
    }
    template <class Move> DEVICE_MEMBER void for_record(Record* record, Move move) {
        for_share(record, move);
        Unit* kept = &record->unit;
        move(unit.sequence, &kept->sequence);
        move(unit.tile, &kept->tile);
        move(unit.head, &kept->head);
        move(unit.first_query, &kept->first_query);
        move(unit.queries, &kept->queries);
        move(unit.length, &kept->length);
        move(unit.right, &kept->right);
        move(unit.row, &kept->row);
        move(unit.begin_key, &kept->begin_key);
        move(unit.end_key, &kept->end_key);
        move(unit.place, &kept->place);
        move(unit.first_item, &kept->first_item);
        move(unit.num_items, &kept->num_items);
        move(unit.weight, &kept->weight);
        move(sequence.num_tiles, &record->num_tiles);
    }
    DEVICE_MEMBER void read_share(Record* record) {
        for_share(record, [](auto& mine, auto* kept) { mine = ptx::read(kept); });
    }
    DEVICE_MEMBER void read_record(Record* record) {
        for_record(record, [](auto& mine, auto* kept) { mine = ptx::read(kept); });
        sequence.first_query = unit.first_query;
        sequence.queries = unit.queries;
        sequence.length = unit.length;
        sequence.right = unit.right;
        sequence.row = unit.row;
    }
    DEVICE_MEMBER void write_record(Record* record, u64 fingerprint) {
        ptx::write(&record->fingerprint, fingerprint);
        for_record(record, [](auto& mine, auto* kept) { ptx::write(kept, mine); });
    }

    DEVICE_MEMBER bool whole_units() const { return p.split_tokens && !p.spread; }
    DEVICE_MEMBER i64 end_of_share() const { return begin + share; }
    DEVICE_MEMBER i64 owner(i32 item) const { return place_of(item) / share; }
    DEVICE_MEMBER i64 place_of(i32 item) const {
        return unit.place + (even ? 0 : OVERHEAD) + static_cast<i64>(item) * unit.weight;
    }
    DEVICE_MEMBER i64 end_place() const { return unit.place + width_of(unit); }

    // Return the width of a unit on the line.
    DEVICE_MEMBER i64 width_of(const Unit& u) const {
        const i64 items = static_cast<i64>(u.num_items) * u.weight;
        if (!even) return OVERHEAD + items;
        return items ? (items + share - 1) / share * share : share;
    }
    DEVICE_MEMBER i32 item_at(i64 place) const {  // the first item that begins at `place` or later
        const i64 past = place - place_of(0);
        if (past <= 0) return 0;
        const i64 item = p.split_tokens ? (past + unit.weight - 1) / unit.weight : past;  // else the weight is 1
        return item < unit.num_items ? static_cast<i32>(item) : unit.num_items;
    }

    DEVICE_MEMBER Sequence load(i32 b) const {
        Sequence s;
        s.first_query = ptx::read(p.cu_seqlens_q + b);
        s.queries = ptx::read(p.cu_seqlens_q + b + 1) - s.first_query;
        s.length = s.queries ? ptx::read(p.seq_lens + b) : 0;
        const bool causal = p.causal_of ? ptx::read(p.causal_of + b * p.causal_step) : p.causal;
        s.right = causal && !p.tree_mask ? 0 : p.right;
        const i64 rows = static_cast<i64>(s.queries) * group;
        s.row = p.rows ? ptx::read(p.rows + b) : b;
        s.num_tiles = rows < p.min_rows || rows > p.max_rows ? 0 : static_cast<i32>((rows + ROWS - 1) / ROWS);
        return s;
    }

    // Set the keys that the rows of a tile may see, and the items that these keys are cut into.
    DEVICE_MEMBER void set_keys(Unit& u, const Sequence& s, i32 tile) const {
        const i32 old = s.length - s.queries;
        const i32 first = tile * ROWS / group, last_row = tile * ROWS + ROWS - 1;
        const i32 last = last_row / group < s.queries ? last_row / group : s.queries - 1;
        u.end_key = old + last + 1 + s.right < s.length ? old + last + 1 + s.right : s.length;
        u.begin_key = p.window && old + first + 1 > p.window ? old + first + 1 - p.window : 0;
        if (u.end_key <= u.begin_key) {
            u.begin_key = u.end_key = u.first_item = u.num_items = 0;
            u.weight = 1;
            return;
        }
        u.begin_key = u.begin_key / 16 * 16;  // tiles do not straddle pages; keys left of the window are masked
        if (p.split_tokens) {
            u.first_item = u.begin_key / p.split_tokens;
            u.num_items = (u.end_key - 1) / p.split_tokens + 1 - u.first_item;
            u.weight = (p.split_tokens + STEP_TOKENS - 1) / STEP_TOKENS;
        } else {
            u.first_item = 0;
            u.num_items = (u.end_key - u.begin_key + STEP_TOKENS - 1) / STEP_TOKENS;
            u.weight = 1;
        }
    }

    // Return the width of a sequence's units on the line. Modifies: longest, to at least the width of the widest unit.
    DEVICE_MEMBER i64 width_of(i32 b, i64& longest) const {
        const Sequence s = load(b);
        i64 width = 0;
#pragma unroll 1
        for (i32 tile = 0; tile < s.num_tiles; ++tile) {
            Unit u;
            set_keys(u, s, tile);
            const i64 one = width_of(u);
            width += one;
            longest = one > longest ? one : longest;
        }
        return width * p.num_kv_heads;
    }

    // Return the width of the line, and set `longest` to the width of the widest unit, in all lanes.
    DEVICE_MEMBER i64 width_of_all(i32 lane, i64& longest) const {
        i64 total = 0;
#pragma unroll 1
        for (i32 b = lane; b < p.num_sequences; b += 32) total += width_of(b, longest);
#pragma unroll
        for (int bits = 16; bits; bits /= 2) {
            total += ptx::shuffle_xor(total, bits);
            const i64 other = ptx::shuffle_xor(longest, bits);
            longest = other > longest ? other : longest;
        }
        return total;
    }

    DEVICE_MEMBER void fill(i32 b, i32 tile, i64 place) {
        unit.sequence = b;
        unit.tile = tile;
        unit.head = 0;
        unit.first_query = sequence.first_query;
        unit.queries = sequence.queries;
        unit.length = sequence.length;
        unit.right = sequence.right;
        unit.row = sequence.row;
        unit.place = place;
        set_keys(unit, sequence, tile);
    }

    // Set `unit` to the unit in which this CTA's share begins.
    DEVICE_MEMBER void find(i32 lane) {
        i64 before = 0, longest = 0;
        for (i32 base = 0;; base += 32) {  // begin < total, so the loop ends
            const i64 width = base + lane < p.num_sequences ? width_of(base + lane, longest) : 0;
            i64 upto = width;
#pragma unroll
            for (int by = 1; by < 32; by *= 2) {
                const i64 left = ptx::shuffle_up(upto, by);
                upto += lane >= by ? left : 0;
            }
            const u32 found = ptx::ballot(before + upto > begin);
            if (!found) {
                before += ptx::shuffle(upto, 31);
                continue;
            }
            i32 hit = 0;
            while (!(found >> hit & 1)) ++hit;
            before += ptx::shuffle(upto - width, hit);
            sequence = load(base + hit);
            fill(base + hit, 0, before);
            break;
        }
        while (unit.place + width_of(unit) * p.num_kv_heads <= begin) {
            fill(unit.sequence, unit.tile + 1, unit.place + width_of(unit) * p.num_kv_heads);
        }
        const i64 width = width_of(unit);
        unit.head = static_cast<i32>((begin - unit.place) / width);
        unit.place += unit.head * width;
    }
};
