// attend: some queries of one sequence over some of its keys, through the page table, for any instruction set.
//
//     s[r,t] = scale * q[r] . K(t)   then soft cap, ALiBi, masks        t in the unit's chunks
//     m[r] = max s[r,t]    l[r] = sum exp(s[r,t] - m[r])    o[r,:] = sum exp(s[r,t] - m[r]) V(t,:)        (online: o and l shrink when m grows)
//     K(t,h) = k[table[row(b), t / S], t % S, h]                                                             likewise V
//
// Unit      one sequence, a few of its queries, some kv heads (a decode step: all of them), a run of keys. One thread owns it.
// Walk      a tile is one page, or several small ones, up to 128 keys. K of all heads of the tile, then V of all heads: in a pool laid out
//           [frame][K, V][head][slot][D] that is the order of addresses, and the hardware's prefetcher streams it; 4 KB hops from frame to
//           frame, which a unit per head would make, cost 1.7 times as much.
// Rows      the G query heads of a kv head, times the unit's queries: r = query * G + g. Each key is loaded once for four rows.
// Memory    o, m, l and scores of all rows stay in L1 / L2 (32 rows of 128: 16 KB + 16 KB); keys and values pass through once.
// Elements  what the arithmetic cannot read (fp16, fp8, int8, int4; head dims that are no multiple of a vector) is decoded 32 keys at
//           a time into L1. Scales are per key: they multiply scores and weights, never elements.
// Bytes     (D + Dv) * sizeof(element) per key and kv head, plus 4 per page of table.
// Tuned     2 cores, Zen 5, AVX-512 bf16: bench/results.
//
// Never read: slots past seq_lens, table entries past the last page, slots of punched pages.

// Keys that make a tile: smaller pages are joined until there are as many. Two pages at once break the stream of addresses (0.78 of the
// ceiling becomes 0.55); but decoding is bound by arithmetic, and larger tiles save some.
constexpr int64_t ENOUGH = 16, ENOUGH_DECODED = 64;
constexpr int64_t MANY = 32;       // rows of several queries that are worth packing keys for; below, memory binds
constexpr int64_t AHEAD = 8192;    // bytes between a load and the line it asks for; 4 and 12 KB are 8 % slower
constexpr int64_t AGAIN = 4096;    // where a stream asks a second time
constexpr int64_t AHEAD_ONCE = 10240;  // where a stream of quantised keys asks, once
constexpr float NOTHING = -__builtin_inff();

struct State {
    float *o, *m, *l;  // [rows, Dvp], [rows], [rows]
};

INLINE State state_at(float* memory, const Room& room) { return {memory, memory + room.rows * room.Dvp, memory + room.rows * (room.Dvp + 1)}; }

INLINE void clear(State s, const Room& room) {
    for (int64_t i = 0; i < room.rows * room.Dvp; i++) s.o[i] = 0.0f;
    for (int64_t i = 0; i < room.rows; i++) s.m[i] = NOTHING, s.l[i] = 0.0f;
}

// `into` becomes the state over the keys of both. A fold from the left, always: results do not depend on who computed which part.
inline void fold(State into, State part, const Room& room) {
    for (int64_t r = 0; r < room.rows; r++) {
        float top = into.m[r] > part.m[r] ? into.m[r] : part.m[r];
        if (top == NOTHING) continue;
        float keep = __builtin_expf(into.m[r] - top), take = __builtin_expf(part.m[r] - top);
        into.m[r] = top;
        into.l[r] = into.l[r] * keep + part.l[r] * take;
        for (int64_t d = 0; d < room.Dvp; d++) into.o[r * room.Dvp + d] = into.o[r * room.Dvp + d] * keep + part.o[r * room.Dvp + d] * take;
    }
}

// A run of keys without a hole: where each one's K and V lie for head 0, and its scales.
struct Tile {
    int64_t first, n, padded;
    const char *k[TILE + 16], *v[TILE + 16], *k_scale[TILE + 16], *v_scale[TILE + 16];
};

template <class M>
struct Walk {
    typedef typename M::Element Element;
    const Attention& a;
    const Unit& u;
    const Room& room;
    int64_t G, rows_per_head, first_new, position;  // `position` of query i0
    int64_t k_bytes, v_bytes;                       // of one key's vector of one head, as stored
    const int32_t* pages;
    State state;
    float *lanes, *scores, *scratch, *packed;       // sums of exp [rows, LANES]; [rows, TILE]; vectors decoded; vectors packed
    Element* q;
    float k_scales[TILE], v_scales[TILE];           // of one head's keys
    bool direct_k, direct_v, plain, many;           // many rows: their products are those of matrices

    Walk(const Attention& a, const Unit& u, const Room& room, char* memory) : a(a), u(u), room(room) {
        G = a.H / a.K;
        rows_per_head = (u.i1 - u.i0) * G;
        int64_t new_tokens = a.cu_seqlens_q[u.b + 1] - a.cu_seqlens_q[u.b];
        first_new = a.seq_lens[u.b] - new_tokens;
        position = first_new + u.i0;
        int64_t row = a.rows.data ? *reinterpret_cast<const int32_t*>(a.rows.data + u.b * a.rows.stride[0]) : u.b;
        pages = reinterpret_cast<const int32_t*>(a.table.data + row * a.table.stride[0]);
        float* at = reinterpret_cast<float*>(memory);
        lanes = at, at += room.rows * MAX_LANES;
        scores = at, at += room.rows * TILE;
        scratch = at, at += room.decoded;
        packed = at, at += room.packed;
        q = reinterpret_cast<Element*>(at);
        many = LANES == 16 && rows_per_head >= MANY;
        direct_k = a.kv_type == M::STORED && a.D == room.Dp;
        direct_v = a.kv_type == M::STORED && a.Dv == room.Dvp;
        k_bytes = stored_bytes(a.D), v_bytes = stored_bytes(a.Dv);
        plain = !a.softcap && !a.slopes.data && !a.tree.data && !a.k_scale.data && !a.v_scale.data;
        for (int64_t h = u.k0; h < u.k1; h++)
            for (int64_t r = 0; r < rows_per_head; r++) M::take_row(a.q_type, q_row(h, r), q + row_of(h, r) * room.Dp, a.D, room.Dp);
    }

    int64_t stored_bytes(int64_t dim) const {
        return a.kv_type == Dtype::f32 ? 4 * dim : a.kv_type == Dtype::i4 ? dim / 2 : a.kv_type < Dtype::e4m3 ? 2 * dim : dim;
    }
    int64_t row_of(int64_t h, int64_t r) const { return (h - u.k0) * rows_per_head + r; }
    int64_t token_of(int64_t r) const { return a.cu_seqlens_q[u.b] + u.i0 + r / G; }
    const char* q_row(int64_t h, int64_t r) const { return a.q.data + token_of(r) * a.q.stride[0] + (h * G + r % G) * a.q.stride[1]; }

    // The state over keys [from, end).
    void attend(int64_t from, int64_t end) {
        clear(state, room);
        for (int64_t i = 0; i < room.rows * LANES; i++) lanes[i] = 0.0f;
        Tile tiles[2];
        int now = 0;
        for (bool more = next_tile(tiles[0], from, end); more; now ^= 1) {
            Tile &tile = tiles[now], &next = tiles[now ^ 1];
            more = next_tile(next, from, end);
            for (int64_t h = u.k0; h < u.k1; h++) {
                keys(tile, next, h);
                take_scales(tile, h);
                for (int64_t r = 0; r < rows_per_head; r++) weights(tile, h, r);
            }
            for (int64_t h = u.k0; h < u.k1; h++) values(tile, next, h);
        }
        for (int64_t r = 0; r < room.rows; r++) {
            state.l[r] = sum_of(load(lanes + r * LANES));
            if (state.l[r] != state.l[r]) state.m[r] = 0.0f;  // a NaN must not look like nothing
            M::put_columns_in_order(state.o + r * room.Dvp, room.Dvp);
        }
    }

    void take_scales(const Tile& tile, int64_t h) {
        const auto take = [&](const char* const* from, const View& scale, float* to) {
            if (!scale.data) return;
            for (int64_t t = 0; t < tile.n; t++) to[t] = *reinterpret_cast<const float*>(from[t] + h * scale.stride[2]);
            for (int64_t t = tile.n; t < tile.padded; t++) to[t] = 0.0f;
        };
        take(tile.k_scale, a.k_scale, k_scales), take(tile.v_scale, a.v_scale, v_scales);
    }

    bool next_tile(Tile& tile, int64_t& from, int64_t end) const {
        int64_t enough = many ? TILE : direct_k ? ENOUGH : ENOUGH_DECODED;
        tile.n = 0;
        while (from < end && tile.n < enough) {
            int64_t page = from / a.S, slot = from % a.S, frame = pages[page], take = a.S - slot;
            if (frame < 0) {
                if (tile.n) break;
                from = (page + 1) * a.S;
                continue;
            }
            if (!tile.n) tile.first = from;
            take = take < end - from ? take : end - from;
            take = take < TILE - tile.n ? take : TILE - tile.n;
            for (int64_t i = tile.n; i < tile.n + take; i++, slot++) {
                tile.k[i] = a.k.data + frame * a.k.stride[0] + slot * a.k.stride[1];
                tile.v[i] = a.v.data + frame * a.v.stride[0] + slot * a.v.stride[1];
                if (a.k_scale.data) tile.k_scale[i] = a.k_scale.data + frame * a.k_scale.stride[0] + slot * a.k_scale.stride[1];
                if (a.v_scale.data) tile.v_scale[i] = a.v_scale.data + frame * a.v_scale.stride[0] + slot * a.v_scale.stride[1];
            }
            tile.n += take, from += take;
        }
        if (!tile.n) return false;
        tile.padded = (tile.n + 15) / 16 * 16;  // whole vectors of scores: what pads them repeats the last key, and is hidden
        for (int64_t i = tile.n; i < tile.padded; i++) tile.k[i] = tile.k[tile.n - 1], tile.v[i] = tile.v[tile.n - 1];
        return true;
    }

    // Where `count` vectors lie, as the arithmetic can read them: in the pool (dim 0), or decoded into `scratch`, while what lies at `later`
    // (if not null) is asked for. `known` are not padding.
    INLINE void readable(const char* const* from, int64_t offset, int64_t count, int64_t known, int64_t dim, int64_t padded, int64_t bytes,
                         const char* const* later, const Element** to) const {
        if (!dim) {
            for (int64_t i = 0; i < count; i++) to[i] = reinterpret_cast<const Element*>(from[i] + offset);
            return;
        }
        Element* decoded = reinterpret_cast<Element*>(scratch);
        with_type(a.kv_type, EACH(type) {
            for (int64_t i = 0; i < known; i++) {
                for (int64_t byte = 0; later && byte < bytes; byte += 64) __builtin_prefetch(later[i] + byte);
                M::template decode<static_cast<Dtype>(type.value)>(from[i] + offset, decoded + i * padded, dim, padded);
            }
        });
        for (int64_t i = 0; i < count; i++) to[i] = decoded + (i < known ? i : known - 1) * padded;
    }

    // For each key of head h (its K or V), what is read AHEAD bytes later: K of all heads, V of all heads, the next tile.
    void look_ahead(const Tile& tile, const Tile& next, bool is_v, int64_t h, const char** later) const {
        int64_t heads = u.k1 - u.k0, block = (is_v ? heads : 0) + h - u.k0, t = 0;
        int64_t every = (is_v ? direct_v : direct_k) ? keys_at_once(ROWS) : 1;  // they look at every so many
        int64_t i = AHEAD / (is_v ? v_bytes : k_bytes) / 4 * 4;
        for (; i >= tile.padded; i -= tile.padded) block++;
        for (; t < tile.padded; i = 0, block++) {
            bool of_next = block >= 2 * heads && next.n, v = block % (2 * heads) >= heads;
            const Tile& there = of_next ? next : tile;
            int64_t offset = (u.k0 + block % heads) * (v ? a.v.stride[2] : a.k.stride[2]);
            const char* const* from = v ? there.v : there.k;
            for (; i < tile.padded && t < tile.padded; i += every, t += every) later[t] = from[i < there.padded ? i : 0] + offset;
        }
    }

    void keys(const Tile& tile, const Tile& next, int64_t h) {
#if defined(PAGEDKV_AVX512)
        if (many) return keys_packed(tile, h);
#endif
        const Element* at[AT_ONCE];
        const char* later[TILE + 16];
        look_ahead(tile, next, false, h, later);
        for (int64_t t = 0; t < tile.padded; t += AT_ONCE) {
            int64_t count = tile.padded - t < AT_ONCE ? tile.padded - t : AT_ONCE, known = tile.n - t < count ? tile.n - t : count;
            readable(tile.k + t, h * a.k.stride[2], count, known, direct_k ? 0 : a.D, room.Dp, k_bytes, later + t, at);
            for (int64_t r = 0; r < rows_per_head; r += ROWS) {
                const Element* rows = q + row_of(h, r) * room.Dp;
                float* s = scores + row_of(h, r) * TILE + t;
                with_rows(rows_per_head - r, r == 0 && direct_k, [&](auto R, auto first) __attribute__((always_inline)) {
                    Rows<Element> k{at, later + t, a.k.stride[1], a.k.stride[1] == k_bytes};
                    score_rows<M, R.value, first.value>(rows, room.Dp, k, count, s, TILE);
                });
            }
        }
    }

#if defined(PAGEDKV_AVX512)

    // How many rows see no key of the tile from the t-th on.
    int64_t rows_before(const Tile& tile, int64_t t) const {
        int64_t rows = a.causal && !a.tree.data ? (tile.first + t - position) * G : 0;
        return rows < 0 ? 0 : rows < rows_per_head ? rows : rows_per_head;
    }

    // Keys of 32 a panel. While one is multiplied, the next one is asked for, and the values of these keys.
    void keys_packed(const Tile& tile, int64_t h) {
        const Element* at[AT_ONCE];
        const auto panel = [&](int64_t t) { return tile.padded - t < AT_ONCE ? tile.padded - t : AT_ONCE; };
        for (int64_t t = 0, after; t < tile.padded; t = after) {
            int64_t count = panel(t), known = tile.n - t < count ? tile.n - t : count;
            after = t + AT_ONCE;
            readable(tile.k + t, h * a.k.stride[2], count, known, direct_k ? 0 : a.D, room.Dp, k_bytes, nullptr, at);
            pack_keys<M>(at, count, room.Dp, reinterpret_cast<vi*>(packed));
            Soon soon[2] = {{tile.v + t, h * a.v.stride[2], count, v_bytes}, {tile.k + after, h * a.k.stride[2], panel(after), k_bytes}};
            if (after >= tile.padded) soon[1] = {tile.k, (h + 1) * a.k.stride[2], h + 1 < u.k1 ? panel(0) : 0, k_bytes};
            int64_t blind = rows_before(tile, t) / 8 * 8, row = row_of(h, blind);
            score_packed<M>(q + row * room.Dp, rows_per_head - blind, room.Dp, reinterpret_cast<vi*>(packed), count, scores + row * TILE + t,
                            soon);
        }
    }

    // All keys of the tile, 32 columns a panel: o passes through once for TILE keys. Meanwhile the next tile's first keys are asked for.
    void values_packed(const Tile& tile, const Tile& next, int64_t h) {
        const Element* at[TILE];
        readable(tile.v, h * a.v.stride[2], tile.padded, tile.n, direct_v ? 0 : a.Dv, room.Dvp, v_bytes, nullptr, at);
        const auto cells_for = [&](int64_t r) {  // as many as row r sees
            int64_t low, high;
            visible(tile, r, low, high);
            return (high + Cells<M>::WIDE - 1) / Cells<M>::WIDE;
        };
        Soon keys{next.k, u.k0 * a.k.stride[2], h + 1 == u.k1 ? (next.n < AT_ONCE ? next.n : AT_ONCE) : 0, k_bytes};
        for (int64_t d = 0; d < room.Dvp; d += 32) {
            pack_values<M>(at, cells_for(rows_per_head - 1), d, reinterpret_cast<vi*>(packed));
            weigh_packed<M>(state.o + row_of(h, 0) * room.Dvp + d, rows_per_head, room.Dvp, reinterpret_cast<vi*>(packed), cells_for,
                            scores + row_of(h, 0) * TILE, keys);
        }
    }

#endif

    // Dot products become scores: scale, soft cap, ALiBi and masks.
    INLINE void shape(const Tile& tile, int64_t h, int64_t r, int64_t low, int64_t high, float* s) const {
        vf scale = all(a.scale);
        for (int64_t t = 0; t < tile.padded; t += LANES) store(s + t, load(s + t) * scale);
        if (!plain) shape_rarely(tile, h, r, s);
        for (int64_t t = 0; t < low; t++) s[t] = NOTHING;
        for (int64_t t = high; t < tile.padded; t++) s[t] = NOTHING;
    }

    void shape_rarely(const Tile& tile, int64_t h, int64_t r, float* s) const {
        if (a.k_scale.data)
            for (int64_t t = 0; t < tile.padded; t += LANES) store(s + t, load(s + t) * load(k_scales + t));
        if (a.softcap)
            for (int64_t t = 0; t < tile.padded; t += LANES)
                store(s + t, all(a.softcap) * hyperbolic_tangent(load(s + t) * all(1.0f / a.softcap)));
        if (a.slopes.data) {
            float slope = *reinterpret_cast<const float*>(a.slopes.data + (h * G + r % G) * a.slopes.stride[0]);
            for (int64_t t = 0; t < tile.n; t++) s[t] += slope * static_cast<float>(tile.first + t - position - r / G);
        }
        if (a.tree.data) {
            const char* sees = a.tree.data + token_of(r) * a.tree.stride[0];
            for (int64_t t = 0, j = tile.first - first_new; t < tile.n; t++, j++)
                if (j >= 0 && !sees[j * a.tree.stride[1]]) s[t] = NOTHING;
        }
    }

    // Which keys of the tile query row r may see, as a range; the tree mask hides more of them.
    INLINE void visible(const Tile& tile, int64_t r, int64_t& low, int64_t& high) const {
        int64_t p = position + r / G;
        low = a.window ? p - a.window + 1 - tile.first : 0;
        high = a.causal && !a.tree.data ? p + 1 - tile.first : tile.n;
        low = low < 0 ? 0 : low > tile.n ? tile.n : low;
        high = high < low ? low : high > tile.n ? tile.n : high;
    }

    // Scores become weights exp(s - m), in place; o and l of the row shrink if m grows, which soon becomes rare.
    INLINE void weights(const Tile& tile, int64_t h, int64_t r) {
        int64_t row = row_of(h, r), low, high;
        visible(tile, r, low, high);
        float* s = scores + row * TILE;
        if (plain && low == 0 && high == TILE) return all_weights(row, s);
        shape(tile, h, r, low, high, s);
        vf highest = load(s);
        for (int64_t t = LANES; t < tile.padded; t += LANES) highest = max(highest, load(s + t));
        vf origin = grow(row, largest(highest)), sum = load(lanes + row * LANES);
        for (int64_t t = 0; t < tile.padded; t += LANES) {
            vf p = exponential(load(s + t) - origin);
            sum = sum + p;
            if (a.v_scale.data) p = p * load(v_scales + t);
            M::put_weights(s, t, p);
        }
        store(lanes + row * LANES, sum);
    }

    // The same where a whole tile is seen and scores are only scaled, most of a prefill: they are read and written once.
    INLINE void all_weights(int64_t row, float* s) {
        constexpr int N = TILE / LANES;
        vf x[N], scale = all(a.scale);
        unroll<N>(EACH(i) { x[i] = load(s + i * LANES) * scale; });
        vf highest = max(x[0], x[1]);
        unroll<N - 2>(EACH(i) { highest = max(highest, x[i + 2]); });
        vf origin = grow(row, largest(highest)), sum = load(lanes + row * LANES);
        unroll<N>(EACH(i) {
            vf p = exponential(x[i] - origin);
            sum = sum + p;
            M::put_weights(s, i * LANES, p);
        });
        store(lanes + row * LANES, sum);
    }

    // What is taken off the row's scores now that `top` is among them.
    INLINE vf grow(int64_t row, float top) {
        float *o = state.o + row * room.Dvp, *l = lanes + row * LANES, old = state.m[row];
        if (top > old) {
            vf shrink = exponential(all(old - top));
            if (old != NOTHING) {
                for (int64_t d = 0; d < room.Dvp; d += LANES) store(o + d, load(o + d) * shrink);
                store(l, load(l) * shrink);
            }
            state.m[row] = top;
        }
        return all(state.m[row] == NOTHING ? 0.0f : state.m[row]);
    }

    void values(const Tile& tile, const Tile& next, int64_t h) {
#if defined(PAGEDKV_AVX512)
        if (many) return values_packed(tile, next, h);
#endif
        const Element* at[AT_ONCE];
        const char* later[TILE + 16];
        look_ahead(tile, next, true, h, later);
        for (int64_t t = 0; t < tile.n; t += AT_ONCE) {
            int64_t count = tile.padded - t < AT_ONCE ? tile.padded - t : AT_ONCE, known = tile.n - t < count ? tile.n - t : count;
            readable(tile.v + t, h * a.v.stride[2], count, known, direct_v ? 0 : a.Dv, room.Dvp, v_bytes, later + t, at);
            for (int64_t r = 0; r < rows_per_head; r += ROWS) {
                float *o = state.o + row_of(h, r) * room.Dvp, *p = M::weights_from(scores + row_of(h, r) * TILE, t);
                with_rows(rows_per_head - r, r == 0 && direct_v, [&](auto R, auto first) __attribute__((always_inline)) {
                    Rows<Element> v{at, later + t, a.v.stride[1], a.v.stride[1] == v_bytes};
                    weigh_rows<M, R.value, first.value>(o, room.Dvp, p, TILE, v, known);
                });
            }
        }
    }
};

// The rows of a unit, from their state: sinks, division, q's dtype, and the LSE.
inline void finish(const Attention& a, const Unit& u, const Room& room, State s) {
    int64_t G = a.H / a.K, row = 0;
    for (int64_t h = u.k0; h < u.k1; h++) {
        for (int64_t r = 0; r < (u.i1 - u.i0) * G; r++, row++) {
            int64_t token = a.cu_seqlens_q[u.b] + u.i0 + r / G, head = h * G + r % G;
            float m = s.m[row], l = s.l[row], keep = 1.0f;
            if (a.sinks.data) {  // a logit that takes part and carries no value
                float sink = *reinterpret_cast<const float*>(a.sinks.data + head * a.sinks.stride[0]), top = sink > m ? sink : m;
                const auto share = [&](float x) { return x == NOTHING ? 0.0f : x == top ? 1.0f : __builtin_expf(x - top); };  // also of infinity
                keep = share(m), l = l * keep + share(sink);
                m = top;
            }
            char* out = a.out.data + token * a.out.stride[0] + head * a.out.stride[1];
            from_floats(s.o + row * room.Dvp, l != 0.0f ? keep / l : 0.0f, a.q_type, out, a.Dv);
            float* lse = reinterpret_cast<float*>(a.lse.data + token * a.lse.stride[0] + head * a.lse.stride[1]);
            *lse = l != 0.0f ? m + __builtin_logf(l) : NOTHING;
        }
    }
}

// All keys of a unit by `attend(from, end, state)`, which leaves the state over some of them.
template <class F>
INLINE void attend_chunks(const Attention& a, const Unit& u, const Room& room, float* memory, const F& attend) {
    int64_t n = a.seq_lens[u.b], position = n - (a.cu_seqlens_q[u.b + 1] - a.cu_seqlens_q[u.b]) + u.i0;
    int64_t low = a.window ? position - a.window + 1 : 0;
    int64_t high = a.causal && !a.tree.data ? position + u.i1 - u.i0 : n;
    high = high < n ? high : n;
    State one = state_at(memory, room), total = state_at(memory + room.state_floats, room);
    bool folds = !u.partial && u.c1 - u.c0 > 1;
    if (folds) clear(total, room);
    for (int64_t c = u.c0; c < u.c1; c++) {
        int64_t from = c * u.chunk, end = (c + 1) * u.chunk;
        if (u.partial) one = state_at(u.partial + (c - u.c0) * room.state_floats, room);
        attend(from < low ? low : from, end < high ? end : high, one);
        if (folds) fold(total, one, room);
    }
    if (!u.partial) finish(a, u, room, folds ? total : one);
}

template <class M>
void walk_unit(const Attention& a, const Unit& u, const Room& room, char* memory) {
    Walk<M> walk(a, u, room, memory + 8 * room.state_floats);
    attend_chunks(a, u, room, reinterpret_cast<float*>(memory), [&](int64_t from, int64_t end, State state) {
        walk.state = state;
        walk.attend(from, end);
    });
}

inline void merge_units(const Attention& a, const Unit& first, int64_t parts, const Room& room, char* memory) {
    State total = state_at(reinterpret_cast<float*>(memory), room);
    clear(total, room);
    for (int64_t i = 0; i < parts; i++) fold(total, state_at(first.partial + i * room.state_floats, room), room);
    finish(a, first, room, total);
}
