// stream: what Walk does, for the shapes that matter on AVX-512, at the speed of memory.
//
//     s[r,t] = scale * q[r] . K(t)      p = exp(s - m)      o[r,:] += p[r,t] V(t,:)        as in attend.hpp, same unit, same state
//
// Walk      page by page, K of all heads, then V of all heads, each in blocks of 16 keys: the order of addresses in a pool laid out
//           [frame][K, V][head][slot][D]. Every load asks for the line that lies AHEAD bytes later in the same walk, through heads and into
//           the next frames, in the order of addresses; that is all that hides latency (asking for every other line halves the speed). And
//           for the one AGAIN bytes later: a processor with its hands full drops what it is asked for, and a tenth of the speed with it.
//           Its hands are less full with quantised keys, which arithmetic holds up: they are asked for once, AHEAD_ONCE bytes before.
// Rows      R = 4 (or 1, 2) query rows of a kv head make a pass; a key is loaded once for R rows. 16 / R keys at once fill 16 accumulators,
//           and one tree of additions turns them into a vector of 16 scores, lane r * T + t, T = 16 / R. Scores stay in that form: maxima,
//           exponentials and sums are taken for R rows at a time. Rows are padded to whole passes: the last is repeated, then dropped.
//           int4 keys are turned on their side instead (`score_across`): a lane is a key, and there is no tree.
// Origin    m follows a row's maximum only when that is 8 above it: p <= e^8 harms no float, and o is rarely rescaled.
// Memory    per pass, all in vectors: q [span][operand][R], o [operand][R], m, l, factors, scores [128 / T].
// Elements  any kind of operands.hpp; scales per key multiply scores and weights.
// Bytes     (D + Dv) * sizeof(element) per key and kv head. For a bfloat16 key and head at D = 128, R = 4: 32 vdpbf16ps, 16 loads, 11
//           shuffles and additions, 8 other instructions; the rest is shared by 16 keys.
// Not here  pages of fewer than 16 keys, head dims that are no multiple of a span, float32 queries over quantised keys: Walk serves them.

constexpr int64_t BLOCK = 16;              // keys
constexpr float REACH = 8.0f;              // of an origin

// A run of keys of one page, at most TILE of them: where K and V of head 0 and their scales begin.
struct Run {
    int64_t first, n, blocks;
    const char *k, *v, *k_scale = nullptr, *v_scale = nullptr;
};

// Where the keys [from, end) of a sequence lie, run by run, holes left out.
struct Runs {
    const Attention* a;
    const int32_t* pages;
    int64_t from, end;
    bool next(Run& run) {
        int64_t page, slot, frame;
        for (;;) {
            if (from >= end) return false;
            page = from / a->S, slot = from % a->S, frame = pages[page];
            if (frame >= 0) break;
            from = (page + 1) * a->S;
        }
        int64_t take = a->S - slot;
        take = take < TILE ? take : TILE;
        take = take < end - from ? take : end - from;
        run = {from, take, (take + BLOCK - 1) / BLOCK, at(a->k, frame, slot), at(a->v, frame, slot)};
        run.k_scale = at(a->k_scale, frame, slot), run.v_scale = at(a->v_scale, frame, slot);
        from += take;
        return true;
    }
    static const char* at(const View& view, int64_t frame, int64_t slot) {
        return view.data ? view.data + frame * view.stride[0] + slot * view.stride[1] : nullptr;
    }
};

// The block that is read AHEAD bytes later: the same steps as the walk, some blocks before it.
struct Ahead {
    Runs runs;
    Run run;
    int64_t k0, k1, h, block;
    const char *head, *now;  // the head's first block, and the block
    bool v;
    Ahead(const Runs& all, int64_t k0, int64_t k1) : runs(all), k0(k0), k1(k1), h(k0), block(0), v(false) {
        if (!runs.next(run)) run = {0, 0, 1, nullptr, nullptr};
        now = head = run.k + k0 * runs.a->k.stride[2];
    }
    INLINE void step() {
        const View& view = v ? runs.a->v : runs.a->k;
        now += BLOCK * view.stride[1];
        if (++block == run.blocks) {
            block = 0, now = head += view.stride[2];
            if (++h == k1) {
                h = k0, v = !v;
                if (!v) runs.next(run);
                now = head = v ? run.v + k0 * runs.a->v.stride[2] : run.k + k0 * runs.a->k.stride[2];
            }
        }
        if (!run.k_scale || v) return;  // both kinds are wanted with the keys: a value's scale is part of its weight
        __builtin_prefetch(run.k_scale + h * runs.a->k_scale.stride[2] + block * BLOCK * runs.a->k_scale.stride[1]);
        __builtin_prefetch(run.v_scale + h * runs.a->v_scale.stride[2] + block * BLOCK * runs.a->v_scale.stride[1]);
    }
};

template <class C>
constexpr int64_t AHEAD_OF = C::QUANTISED ? AHEAD_ONCE : AHEAD;

// Lines to ask for beside the loads of a block: a step from key to key, and from span to span. Loads of half a line ask in turn.
template <int TIMES, bool ONCE>
struct Asking {
    const char *far, *near;
    int64_t key, span;
    INLINE void line(int64_t offset, int i) const {
        if constexpr (TIMES > 0) {
            if (TIMES == 2 || i % 2 == 0) __builtin_prefetch(far + offset);
            if (!ONCE && (TIMES == 2 || i % 2)) __builtin_prefetch(near + offset);
        }
    }
    INLINE void move(int64_t bytes) { far += bytes, near += bytes; }
};

// The maximum (or the sum) over the T lanes of each row, in all of them.
template <int T, class F>
INLINE vf over_keys(vf x, const F& f) {
    x = f(x, _mm512_permute_ps(x, 0xb1));
    x = f(x, _mm512_permute_ps(x, 0x4e));
    if constexpr (T >= 8) x = f(x, _mm512_shuffle_f32x4(x, x, 0xb1));
    if constexpr (T >= 16) x = f(x, _mm512_shuffle_f32x4(x, x, 0x4e));
    return x;
}

// The larger of two magnitudes, x's as it is: they are ordered as their bits are, NaN last, which `max` may lose.
INLINE vf larger(vf x, vf y) { return (vf)_mm512_max_epi32((vi)x, (vi)magnitude(y)); }

// e^x for x <= 88; 0 below -104, which is less than any float; NaN stays NaN.
INLINE vf small_exponential(vf x) { return exponential_from(-126.0f, x); }

// f(turn) for each span: `spans` is a number, or a constant; then turn is 0 1 0 1 ..
template <class F>
INLINE void each_span(int64_t spans, const F& f) {
    for (int64_t c = 0; c < spans; c++) f(0);
}
template <int N, class F>
INLINE void each_span(Index<N>, const F& f) {
    unroll<N>(EACH(c) { f(c % 2); });
}

// 16 scores of R rows times 16 / R keys, R times: keys 0 .. 15 of a block.
template <class C, int R, class Ask, class Count>
INLINE void score_block(const char* keys, int64_t stride, const typename C::Operand* q, Count spans, Ask ask, float* s) {
    constexpr int T = BLOCK / R;
    for (int64_t b = 0; b < R; b++, keys += T * stride, ask.move(T * ask.key * (ask.span > C::BYTES ? spans : 1))) {
        typename C::Sum sums[16] = {};
        const typename C::Operand* rows = q;
        const char* at = keys;
        Ask now = ask;
        each_span(spans, [&](int turn) __attribute__((always_inline)) {
            unroll<T>(EACH(t) {
                typename C::Operand k[C::KEYS];
                C::key(at + t / 4 * (4 * stride) + t % 4 * stride, k);
                now.line(t / 4 * (4 * ask.key) + t % 4 * ask.key, t + turn);
                unroll<C::KEYS * R>(EACH(i) { sums[i % R * T + t] = C::dot_key(rows[i], k[i / R], sums[i % R * T + t]); });
            });
            at += C::BYTES, now.move(ask.span), rows += C::KEYS * R;
        });
        store(s + 16 * b, C::totals(sums));
    }
}

// The same of four rows, keys turned on their side: a cell of q is multiplied with those of 16 keys, and no tree of additions is needed.
template <class C, class Ask, class Count>
INLINE void score_across(const char* keys, int64_t stride, const int32_t* cells, Count spans, Ask ask, float* s) {
    vi sums[8] = {};
    each_span(spans, [&](int turn) __attribute__((always_inline)) {
        vi columns[8];
        columns_of_keys(keys, stride, columns);
        unroll<8>(EACH(j) {
            ask.line(2 * j * ask.key, turn), ask.line((2 * j + 1) * ask.key, turn + 1);
            C::across(columns[j], cells, sums);
            cells += 8;
        });
        keys += C::BYTES, ask.move(ask.span);
    });
    vf rows[4], quads[4];
    unroll<4>(EACH(r) { rows[r] = C::across_total(sums[r], sums[4 + r]); });
    four_in_order(rows[0], rows[1], rows[2], rows[3], quads);
    unroll<4>(EACH(i) { store(s + 16 * i, quads[i]); });
}

// o += weights . values of a block, for SPANS spans of columns and R rows.
template <class C, int R, int SPANS, class Ask>
INLINE void weigh_spans(vf* o, const char* values, int64_t stride, const char* weights, const float* units, Ask ask) {
    constexpr int N = SPANS * C::VALUES, T = BLOCK / R;
    typename C::Sum sums[N * R];
    unroll<N * R>(EACH(i) {
        if constexpr (C::INTEGER) sums[i] = typename C::Sum{};
        else sums[i] = o[i];
    });
    for (int64_t b = 0; b < R; b++, weights += 64, values += T * stride, ask.move(T * ask.key)) {
        unroll<T / C::STEP>(EACH(i) {
            const char* rows = values + i * C::STEP * stride;
            typename C::Operand v[N];
            unroll<SPANS>(EACH(c) {
                C::value(rows + c * C::BYTES, stride, v + c * C::VALUES);
                unroll<C::STEP>(EACH(j) { ask.line((i * C::STEP + j) * ask.key + c * C::BYTES, i * C::STEP + j + c); });
            });
            unroll<R>(EACH(r) {
                typename C::Operand w = C::weight(weights + (r * T + i * C::STEP) * (4 / C::STEP));
                unroll<N>(EACH(n) { sums[n * R + r] = C::dot(w, v[n], sums[n * R + r]); });
            });
        });
    }
    unroll<N * R>(EACH(i) {
        if constexpr (C::INTEGER) o[i] = fma(_mm512_cvtepi32_ps(sums[i]), all(units[i % R * T]), o[i]);
        else o[i] = sums[i];
    });
}

// The same for all columns: as many spans at once as there are accumulators for.
template <class C, int R, class Ask>
INLINE void weigh_block(vf* o, int64_t spans, const char* values, int64_t stride, const char* weights, const float* units, Ask ask) {
    constexpr int SPANS = (R == 1 ? 8 : 16 / R) / C::VALUES;
    bool dense = ask.key == C::BYTES;
    const auto some = [&](auto N) __attribute__((always_inline)) {
        for (; spans >= N.value; spans -= N.value, o += N.value * C::VALUES * R, values += N.value * C::BYTES, ask.move(N.value * ask.span))
            weigh_spans<C, R, N.value>(o, values, stride, weights, units, Ask{ask.far, ask.near, dense ? N.value * C::BYTES : ask.key, 0});
    };
    some(Index<SPANS>{});
    if constexpr (SPANS > 2) some(Index<SPANS / 2>{});
    if constexpr (SPANS > 1) some(Index<1>{});
}

template <class C, int R>
struct Stream {
    typedef typename C::Operand Operand;
    static constexpr int T = BLOCK / R;
    static constexpr bool ACROSS = C::ACROSS && R == 4;
    const Attention& a;
    const Unit& u;
    const Room& room;
    int64_t G, rows_per_head, passes, k_spans, v_spans, first_new, position;
    Runs all_runs;
    Operand* q;                                                // [pass][span][KEYS][R]
    vf *o, *m, *l, *factors, *offsets, *units;                 // [pass][operand][R], [pass] each, [pass][TILE / BLOCK]
    float* scores;                                             // [pass][TILE / T] vectors, then weights in their place
    char *staging, *natural;                                   // BLOCK keys; a row of floats
    bool plain;

    Stream(const Attention& a, const Unit& u, const Room& room, char* memory) : a(a), u(u), room(room) {
        G = a.H / a.K, rows_per_head = (u.i1 - u.i0) * G, passes = (rows_per_head + R - 1) / R;
        k_spans = a.D / C::SPAN, v_spans = a.Dv / C::SPAN;
        first_new = a.seq_lens[u.b] - (a.cu_seqlens_q[u.b + 1] - a.cu_seqlens_q[u.b]), position = first_new + u.i0;
        int64_t row = a.rows.data ? *reinterpret_cast<const int32_t*>(a.rows.data + u.b * a.rows.stride[0]) : u.b;
        all_runs = {&a, reinterpret_cast<const int32_t*>(a.table.data + row * a.table.stride[0]), 0, 0};
        int64_t all_passes = (u.k1 - u.k0) * passes;
        const auto take = [&](int64_t bytes) { char* at = memory; memory += bytes; return at; };
        o = reinterpret_cast<vf*>(take(all_passes * R * a.Dv * 4));
        q = reinterpret_cast<Operand*>(take(all_passes * R * a.D * C::Q_BYTES));
        m = reinterpret_cast<vf*>(take(all_passes * 64)), l = reinterpret_cast<vf*>(take(all_passes * 64));
        factors = reinterpret_cast<vf*>(take(all_passes * 64)), offsets = reinterpret_cast<vf*>(take(all_passes * 64));
        units = reinterpret_cast<vf*>(take(all_passes * 64 * (TILE / BLOCK)));
        scores = reinterpret_cast<float*>(take(all_passes * R * TILE * 4));
        staging = take(BLOCK * 4 * (a.D > a.Dv ? a.D : a.Dv)), natural = take(4 * a.D);
        plain = !a.softcap && !a.slopes.data && !a.tree.data;
        for (int64_t h = u.k0; h < u.k1; h++)
            for (int64_t r = 0; r < passes * R; r++) take_row(h, r);
    }

    int64_t pass_of(int64_t h, int64_t p) const { return (h - u.k0) * passes + p; }
    int64_t known(int64_t r) const { return r < rows_per_head ? r : rows_per_head - 1; }
    int64_t token_of(int64_t r) const { return a.cu_seqlens_q[u.b] + u.i0 + known(r) / G; }

    void take_row(int64_t h, int64_t r) {
        float* row = reinterpret_cast<float*>(natural);
        to_floats(a.q_type, a.q.data + token_of(r) * a.q.stride[0] + (h * G + known(r) % G) * a.q.stride[1], row, a.D, a.D);
        int64_t pass = pass_of(h, r / R);
        float factor = C::factor(row, a.D);
        Operand* to = q + pass * R * k_spans * C::KEYS + r % R;
        float sum = 0.0f;
        for (int64_t c = 0; c < k_spans; c++) {
            if constexpr (ACROSS) {
                Operand span;
                sum += C::query(row + c * C::SPAN, factor, &span, 1);
                C::cells(span, reinterpret_cast<int32_t*>(to - r % R + c * R) + r % R);
            } else {
                sum += C::query(row + c * C::SPAN, factor, to + c * C::KEYS * R, R);
            }
        }
        for (int64_t t = 0; t < T; t++) {
            reinterpret_cast<float*>(factors + pass)[r % R * T + t] = factor * a.scale;
            reinterpret_cast<float*>(offsets + pass)[r % R * T + t] = factor * a.scale * C::BIAS * sum;
        }
    }

    // The state over keys [from, end).
    void attend(int64_t from, int64_t end, State state) {
        int64_t all_passes = (u.k1 - u.k0) * passes;
        for (int64_t i = 0; i < all_passes * R * a.Dv / 16; i++) o[i] = all(0.0f);
        for (int64_t i = 0; i < all_passes; i++) m[i] = all(NOTHING), l[i] = all(0.0f);
        Runs runs = all_runs;
        runs.from = from, runs.end = end;
        Ahead far(runs, u.k0, u.k1), near = far;
        for (int64_t bytes = 0; bytes < AHEAD_OF<C>; bytes += BLOCK * a.k.stride[1]) far.step();
        for (int64_t bytes = 0; !C::QUANTISED && bytes < AGAIN; bytes += BLOCK * a.k.stride[1]) near.step();
        for (Run run; runs.next(run);) {
            for (int64_t h = u.k0; h < u.k1; h++) {
                keys(run, h, far, near);
                for (int64_t p = 0; p < passes; p++) weights(run, h, p);
            }
            for (int64_t h = u.k0; h < u.k1; h++) values(run, h, far, near);
        }
        leave(state);
    }

    // The block at `from`, or if it has fewer than BLOCK keys, a copy with zeros after them.
    INLINE const char* whole(const char* from, int64_t n, int64_t bytes, int64_t& stride) {
        if (n >= BLOCK) return from;
        for (int64_t t = 0; t < n; t++) __builtin_memcpy(staging + t * bytes, from + t * stride, static_cast<uint64_t>(bytes));
        __builtin_memset(staging + n * bytes, 0, static_cast<uint64_t>((BLOCK - n) * bytes));
        stride = bytes;
        return staging;
    }

    static INLINE void step(Ahead& far, Ahead& near) {
        far.step();
        if constexpr (!C::QUANTISED) near.step();
    }

    // f(what a pass asks for): only the first asks.
    template <class F>
    INLINE void by_passes(const Ahead& far, const Ahead& near, int64_t key, int64_t span, const F& f) const {
        f(Asking<C::BYTES / 32, C::QUANTISED>{far.now, near.now, key, span}, 0);
        if constexpr (R == 4)
            for (int64_t p = 1; p < passes; p++) f(Asking<0, true>{nullptr, nullptr, key, span}, p);
    }

    void keys(const Run& run, int64_t h, Ahead& far, Ahead& near) {
        if constexpr (C::QUANTISED)  // unrolled for the common head dimension; more spans than two are slower so: float32 by 6 %
            if (k_spans == 128 / C::SPAN) return keys_of(Index<128 / C::SPAN>{}, run, h, far, near);
        keys_of(k_spans, run, h, far, near);
    }

    template <class Count>
    INLINE void keys_of(const Count spans, const Run& run, int64_t h, Ahead& far, Ahead& near) {
        const int64_t bytes = spans * C::BYTES, stride = a.k.stride[1];
        const bool dense = stride == bytes;
        const char* from = run.k + h * a.k.stride[2];
        for (int64_t block = 0; block < run.blocks; block++, from += BLOCK * stride, step(far, near)) {
            int64_t key = stride;
            const char* at = whole(from, run.n - block * BLOCK, bytes, key);
            const auto score = [&](auto ask, int64_t p) __attribute__((always_inline)) {
                const Operand* rows = q + pass_of(h, p) * R * spans * C::KEYS;
                float* s = scores_of(h, p) + block * BLOCK * R;
                if constexpr (ACROSS) score_across<C>(at, key, reinterpret_cast<const int32_t*>(rows), spans, ask, s);
                else score_block<C, R>(at, key, rows, spans, ask, s);
            };
            by_passes(far, near, dense ? C::BYTES : stride, dense ? (ACROSS ? BLOCK : T) * C::BYTES : C::BYTES, score);
        }
    }

    vf* units_of(int64_t pass) const { return units + pass * (TILE / BLOCK); }
    float* scores_of(int64_t h, int64_t p) const { return scores + pass_of(h, p) * R * TILE; }

    // Scores become weights exp(s - m), as C wants them, in place.
    void weights(const Run& run, int64_t h, int64_t p) {
        int64_t pass = pass_of(h, p), n = run.blocks * R;
        float* s = scores_of(h, p);
        shape(run, h, p, s);
        vf highest = load(s);
        for (int64_t i = 1; i < n; i++) highest = max(highest, load(s + 16 * i));
        highest = over_keys<T>(highest, [](vf x, vf y) __attribute__((always_inline)) { return max(x, y); });
        if (_mm512_cmp_ps_mask(highest, m[pass] + all(REACH), _CMP_GT_OQ)) move_origin(pass, highest);
        vf origin = max(m[pass], all(-3e38f)), sum = l[pass];
        alignas(64) float room[TILE];
        const float* scales = scales_of(a.v_scale, run.v_scale, h, run, room);
        for (int64_t block = 0; block < run.blocks; block++, s += 16 * R) {
            vf e[R], most = all(1e-30f);
            unroll<R>(EACH(i) {
                e[i] = small_exponential(load(s + 16 * i) - origin), sum = sum + e[i];
                if (scales) e[i] = e[i] * repeat(scales + block * BLOCK + i * T);
                if constexpr (C::INTEGER) most = larger(most, e[i]);
            });
            if constexpr (C::INTEGER) {
                most = over_keys<T>(most, [](vf x, vf y) __attribute__((always_inline)) { return larger(x, y); });
                units_of(pass)[block] = most * all(C::VALUE_UNIT / C::LIMIT), most = all(C::LIMIT) / most;
                unroll<R>(EACH(i) { e[i] = e[i] * most; });
            }
            unroll<R>(EACH(i) { C::put_weights(reinterpret_cast<char*>(s + 16 * i), e[i]); });
        }
        l[pass] = sum;
    }

    // Rows whose maximum is out of reach of their origin take it as the new one, and what they have summed shrinks.
    __attribute__((noinline)) void move_origin(int64_t pass, vf highest) {
        __mmask16 far = _mm512_cmp_ps_mask(highest, m[pass] + all(REACH), _CMP_GT_OQ);
        alignas(64) float shrink[16];
        store(shrink, _mm512_mask_blend_ps(far, all(1.0f), small_exponential(max(m[pass], all(-3e38f)) - highest)));
        m[pass] = _mm512_mask_blend_ps(far, m[pass], highest), l[pass] = l[pass] * load(shrink);
        vf* at = o + pass * R * v_spans * C::SPAN / 16;
        for (int64_t i = 0; i < v_spans * C::SPAN / 16; i++, at += R) unroll<R>(EACH(r) { at[r] = at[r] * all(shrink[r * T]); });
    }

    // The scales of a run's keys, whole blocks of them: where they lie, or in `room`; null if there are none.
    INLINE const float* scales_of(const View& view, const char* of_head_0, int64_t h, const Run& run, float* room) const {
        if (!view.data) return nullptr;
        const char* from = of_head_0 + h * view.stride[2];
        if (view.stride[1] == 4 && run.n % BLOCK == 0) return reinterpret_cast<const float*>(from);
        gather_scales(from, view.stride[1], run, room);
        return room;
    }
    __attribute__((noinline)) static void gather_scales(const char* from, int64_t stride, const Run& run, float* room) {
        for (int64_t t = 0; t < run.n; t++) room[t] = *reinterpret_cast<const float*>(from + t * stride);
        for (int64_t t = run.n; t < run.blocks * BLOCK; t++) room[t] = 0.0f;
    }
    // What belongs to T keys, a float each, for every row.
    static INLINE vf repeat(const float* x) {
        if constexpr (T == 4) return _mm512_broadcast_f32x4(_mm_loadu_ps(x));
        else if constexpr (T == 8) return _mm512_broadcast_f32x8(_mm256_loadu_ps(x));
        else return load(x);
    }

    // Dot products become scores: scales, soft cap, ALiBi and masks.
    INLINE void shape(const Run& run, int64_t h, int64_t p, float* s) const {
        vf factor = factors[pass_of(h, p)], offset = offsets[pass_of(h, p)];
        alignas(64) float room[TILE];
        const float* scales = scales_of(a.k_scale, run.k_scale, h, run, room);
        for (int64_t i = 0; i < run.blocks * R; i++) {
            vf x = load(s + 16 * i) * factor;
            if constexpr (C::BIAS != 0.0f) x = x + offset;
            if (scales) x = x * repeat(scales + i * T);
            store(s + 16 * i, x);
        }
        int64_t first = position + p * R / G, last = position + known(p * R + R - 1) / G;  // positions of the pass's rows
        bool all_seen = run.n == run.blocks * BLOCK && (!a.causal || run.first + run.n <= first + 1);
        if (!plain || !all_seen || (a.window && run.first <= last - a.window)) shape_rarely(run, h, p, s);
    }

    __attribute__((noinline)) void shape_rarely(const Run& run, int64_t h, int64_t p, float* s) const {
        for (int64_t i = 0; a.softcap && i < run.blocks * R; i++)
            store(s + 16 * i, all(a.softcap) * hyperbolic_tangent(load(s + 16 * i) * all(1.0f / a.softcap)));
        for (int64_t r = 0; r < R; r++) {
            int64_t row = known(p * R + r), place = position + row / G;
            int64_t low = a.window ? place - a.window + 1 - run.first : 0, high = a.causal && !a.tree.data ? place + 1 - run.first : run.n;
            float slope = a.slopes.data ? *reinterpret_cast<const float*>(a.slopes.data + (h * G + row % G) * a.slopes.stride[0]) : 0.0f;
            const char* sees = a.tree.data ? a.tree.data + token_of(row) * a.tree.stride[0] : nullptr;
            for (int64_t t = 0; t < run.blocks * BLOCK; t++) {
                float* at = s + t / T * 16 + r * T + t % T;
                int64_t j = run.first + t - first_new;
                if (slope != 0.0f) *at += slope * static_cast<float>(run.first + t - place);
                if (t < low || t >= high || t >= run.n || (sees && j >= 0 && !sees[j * a.tree.stride[1]])) *at = NOTHING;
            }
        }
    }

    void values(const Run& run, int64_t h, Ahead& far, Ahead& near) {
        const int64_t bytes = v_spans * C::BYTES, spans = v_spans, stride = a.v.stride[1];
        const bool dense = stride == bytes;
        const char* from = run.v + h * a.v.stride[2];
        for (int64_t block = 0; block < run.blocks; block++, from += BLOCK * stride, step(far, near)) {
            int64_t value = stride;
            const char* at = whole(from, run.n - block * BLOCK, bytes, value);
            const auto weigh = [&](auto ask, int64_t p) __attribute__((always_inline)) {
                vf* sums = o + pass_of(h, p) * R * spans * C::VALUES;
                const char* w = reinterpret_cast<const char*>(scores_of(h, p) + block * BLOCK * R);
                const float* unit = reinterpret_cast<const float*>(units_of(pass_of(h, p)) + block);
                weigh_block<C, R>(sums, spans, at, value, w, unit, ask);
            };
            by_passes(far, near, dense ? C::BYTES : stride, dense ? BLOCK * C::BYTES : C::BYTES, weigh);
        }
    }

    // Rows in their order, columns in theirs.
    void leave(State state) const {
        for (int64_t h = u.k0, row = 0; h < u.k1; h++) {
            for (int64_t r = 0; r < rows_per_head; r++, row++) {
                int64_t pass = pass_of(h, r / R), first = r % R * T;
                const vf* from = o + pass * R * v_spans * C::VALUES + r % R;
                for (int64_t c = 0; c < v_spans; c++) C::columns(from + c * C::VALUES * R, R, state.o + row * room.Dvp + c * C::SPAN);
                for (int64_t d = a.Dv; d < room.Dvp; d++) state.o[row * room.Dvp + d] = 0.0f;
                const float *lanes = reinterpret_cast<const float*>(l + pass);
                float sum = 0.0f;
                for (int64_t t = 0; t < T; t++) sum += lanes[first + t];
                state.l[row] = sum;
                state.m[row] = sum != sum ? 0.0f : reinterpret_cast<const float*>(m + pass)[first];  // a NaN must not look like nothing
            }
        }
    }
};

// f(kind of operands) if there is a stream for the call; false if Walk must serve.
template <class F>
INLINE bool with_stream(const Attention& a, const F& f) {
    if (!a.k.stride[1] || !a.v.stride[1]) return false;  // one vector in all slots: what lies ahead is never reached
    const auto fits = [&](int64_t span) { return a.S >= BLOCK && a.D % span == 0 && a.Dv % span == 0; };
    if (a.q_type == Dtype::f32 && a.kv_type == Dtype::f32 && fits(16)) return f(Widened<Dtype::f32>{}), true;
    if (a.q_type == Dtype::f16 && a.kv_type == Dtype::f16 && fits(16)) return f(Widened<Dtype::f16>{}), true;
#if defined(PAGEDKV_BF16_DOT)
    if (a.q_type == Dtype::bf16 && a.kv_type == Dtype::bf16 && fits(32)) return f(Pairs<Dtype::bf16>{}), true;
    if (a.q_type == Dtype::bf16 && a.kv_type == Dtype::e4m3 && fits(64)) return f(Pairs<Dtype::e4m3>{}), true;
    if (a.q_type == Dtype::bf16 && a.kv_type == Dtype::e5m2 && fits(64)) return f(Pairs<Dtype::e5m2>{}), true;
    if (a.q_type != Dtype::f32 && a.kv_type == Dtype::i8 && fits(64) && a.D <= 512) return f(Words{}), true;
    if (a.q_type != Dtype::f32 && a.kv_type == Dtype::i4 && fits(64) && a.D <= 512) return f(Nibbles{}), true;
#else
    if (a.q_type == Dtype::bf16 && a.kv_type == Dtype::bf16 && fits(16)) return f(Widened<Dtype::bf16>{}), true;
#endif
    return false;
}

template <class C, int R>
void stream_rows(const Attention& a, const Unit& u, const Room& room, char* memory) {
    Stream<C, R> stream(a, u, room, memory + 8 * room.state_floats);
    const auto attend = [&](int64_t from, int64_t end, State state) { stream.attend(from, end, state); };
    attend_chunks(a, u, room, reinterpret_cast<float*>(memory), attend);
}

inline bool stream_unit(const Attention& a, const Unit& u, const Room& room, char* memory) {
    int64_t rows = (u.i1 - u.i0) * (a.H / a.K);
    if (rows >= MANY && u.i1 - u.i0 > 1) return false;  // arithmetic binds, not memory: Walk packs keys for them
    return with_stream(a, [&](auto kind) {
        typedef decltype(kind) C;
        if (rows == 1) return stream_rows<C, 1>(a, u, room, memory);
        if (rows == 2) return stream_rows<C, 2>(a, u, room, memory);
        stream_rows<C, 4>(a, u, room, memory);
    });
}
