// The two ways to multiply: float32, and bfloat16 in pairs (vdpbf16ps). Each gives dot products of some rows of q with some keys, and adds
// weighted values to some rows of o, R rows at a time with all accumulators in registers.
//
// Included by each instruction set's source inside its own anonymous namespace. Pointers may be unaligned; head dims are padded.

constexpr int ROWS = 4;  // rows of q that share one load of a key

// How many keys R rows take at once: the accumulators that there are.
constexpr int keys_at_once(int rows) { return ACCUMULATORS / (rows == 3 ? 4 : rows); }

// Where some keys (or values) lie, and where what this thread reads a little later lies: each line that is loaded asks for one of those.
// Left alone, the hardware loses the stream at every head and page; asked in the order of use, four keys at once, it sees no stream at all.
// So where keys follow one another without a gap (`run`), lines are asked for in the order of addresses.
template <class E>
struct Rows {
    const E* const* at;
    const char* const* later;
    int64_t stride;  // bytes from key to key
    bool run;
    Rows from(int64_t t) const { return {at + t, later + t, stride, run}; }
};

struct Floats {
    typedef float Element;
    typedef vf Vector;
    static constexpr int WIDTH = LANES, ALIGNED = LANES;
    static constexpr Dtype STORED = Dtype::f32;
    static INLINE vf vector(const Element* p) { return load(p); }
    static INLINE vf dot(vf a, vf b, vf sum) { return fma(a, b, sum); }
    template <Dtype TYPE>
    static INLINE void decode(const char* from, Element* to, int64_t n, int64_t padded) { to_floats<TYPE>(from, to, n, padded); }
    static void take_row(Dtype type, const char* q, Element* to, int64_t n, int64_t padded) { to_floats(type, q, to, n, padded); }
    static INLINE void put_weights(float* s, int64_t i, vf p) { store(s + i, p); }  // in place
    static INLINE float* weights_from(float* s, int64_t i) { return s + i; }

    // o[r] += sum over t of p[r][t] * v[t], for C vectors of columns.
    template <int R, int C, bool FIRST>
    static INLINE void add(float* o, int64_t o_stride, const float* p, int64_t p_stride, const Rows<Element>& v, int64_t at, int64_t n) {
        vf sums[R * C];
        unroll<R * C>(EACH(i) { sums[i] = load(o + i / C * o_stride + i % C * LANES); });
        const char* ask = v.later[0] + 4 * at * (v.run ? n : 1);
        int64_t ask_stride = v.run ? 4 * C * LANES : v.stride;
        for (int64_t t = 0; t < n; t++, ask += ask_stride) {
            const Element* row = v.at[t] + at;
            vf x[C];
            unroll<C>(EACH(c) {
                x[c] = load(row + c * LANES);
                if (FIRST && c * sizeof(vf) % 64 == 0) __builtin_prefetch(ask + 4 * c * LANES);
            });
            unroll<R>(EACH(r) {
                vf weight = all(p[r * p_stride + t]);
                unroll<C>(EACH(c) { sums[r * C + c] = fma(weight, x[c], sums[r * C + c]); });
            });
        }
        unroll<R * C>(EACH(i) { store(o + i / C * o_stride + i % C * LANES, sums[i]); });
    }
    static constexpr int COLUMNS = LANES;                    // of one step of C
    static constexpr int steps_at_once(int rows) { return ACCUMULATORS / (rows < 2 ? 2 : rows == 3 ? 4 : rows); }
    static INLINE void put_columns_in_order(float*, int64_t) {}
};

#if defined(PAGEDKV_BF16_DOT)

// Two rows of v are interleaved on the fly, so that one vdpbf16ps takes a pair of keys. unpacklo / unpackhi interleave within 128 bits: o keeps
// the columns of each 32 as blocks of four in the order 0 2 4 6 1 3 5 7, and only the end of a walk puts them right.
struct Brain {
    typedef u16 Element;
    typedef __m512bh Vector;
    static constexpr int WIDTH = 32, ALIGNED = 32;
    static constexpr Dtype STORED = Dtype::bf16;
    static INLINE __m512bh vector(const Element* p) { return (__m512bh)_mm512_loadu_si512(p); }
    static INLINE vf dot(__m512bh a, __m512bh b, vf sum) { return _mm512_dpbf16_ps(sum, a, b); }
    template <Dtype TYPE>
    static INLINE void decode(const char* from, Element* to, int64_t n, int64_t padded) {
        if constexpr (TYPE != Dtype::f32 && TYPE != Dtype::f16) to_bf16s<TYPE>(from, to, n, padded);  // those two are never asked for
    }
    static void take_row(Dtype, const char* q, Element* to, int64_t n, int64_t padded) { to_bf16s<Dtype::bf16>(q, to, n, padded); }
    static INLINE void put_weights(float* s, int64_t i, vf p) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(reinterpret_cast<u16*>(s) + i), (__m256i)_mm512_cvtneps_pbh(p));
    }

    static INLINE float* weights_from(float* s, int64_t i) { return reinterpret_cast<float*>(reinterpret_cast<u16*>(s) + i); }

    template <int R, int C, bool FIRST>
    static INLINE void add(float* o, int64_t o_stride, const float* p, int64_t p_stride, const Rows<Element>& v, int64_t at, int64_t n) {
        vf sums[R * 2 * C];
        unroll<R * 2 * C>(EACH(i) { sums[i] = load(o + i / (2 * C) * o_stride + i % (2 * C) * LANES); });
        const char* ask = v.later[0] + 2 * at * (v.run ? n : 1);
        int64_t ask_stride = v.run ? 64 * C : v.stride;
        for (int64_t t = 0; t < n; t += 2, ask += 2 * ask_stride) {
            const Element *even = v.at[t] + at, *odd = v.at[t + 1] + at;
            __m512bh weights[R];
            unroll<R>(EACH(r) {
                int32_t pair;
                __builtin_memcpy(&pair, reinterpret_cast<const u16*>(p + r * p_stride) + t, 4);
                weights[r] = (__m512bh)_mm512_set1_epi32(pair);
            });
            unroll<C>(EACH(c) {
                __m512i x = _mm512_loadu_si512(even + c * 32), y = _mm512_loadu_si512(odd + c * 32);
                if (FIRST) __builtin_prefetch(ask + 64 * c), __builtin_prefetch(ask + ask_stride + 64 * c);
                __m512bh low = (__m512bh)_mm512_unpacklo_epi16(x, y), high = (__m512bh)_mm512_unpackhi_epi16(x, y);
                unroll<R>(EACH(r) {
                    sums[r * 2 * C + 2 * c] = _mm512_dpbf16_ps(sums[r * 2 * C + 2 * c], weights[r], low);
                    sums[r * 2 * C + 2 * c + 1] = _mm512_dpbf16_ps(sums[r * 2 * C + 2 * c + 1], weights[r], high);
                });
            });
        }
        unroll<R * 2 * C>(EACH(i) { store(o + i / (2 * C) * o_stride + i % (2 * C) * LANES, sums[i]); });
    }
    static constexpr int COLUMNS = 32;
    static constexpr int steps_at_once(int rows) { return rows == 1 ? 4 : 8 / (rows == 3 ? 4 : rows); }
    static INLINE void put_columns_in_order(float* o, int64_t n) {
        for (int64_t d = 0; d < n; d += 32) two_in_order(load(o + d), load(o + d + 16), o + d);
    }
};

#endif

// s[r][t] = q[r] . k[t] for R rows and keys_at_once(R) keys. Only the FIRST rows of a head look ahead.
template <class M, int R, bool FIRST>
INLINE void dot_products(const typename M::Element* q, int64_t q_stride, const Rows<typename M::Element>& k, float* s, int64_t s_stride) {
    constexpr int T = keys_at_once(R);
    vf sums[R * T];
    unroll<R * T>(EACH(i) { sums[i] = all(0.0f); });
    constexpr int64_t STEP = M::WIDTH * sizeof(typename M::Element);
    const char* ask = k.later[0];
    int64_t ask_stride = k.run ? STEP : k.stride, ask_step = k.run ? T * STEP : STEP;
    for (int64_t d = 0; d < q_stride; d += M::WIDTH, ask += ask_step) {
        typename M::Vector rows[R];
        unroll<R>(EACH(r) { rows[r] = M::vector(q + r * q_stride + d); });
        unroll<T>(EACH(t) {
            typename M::Vector key = M::vector(k.at[t] + d);
            if (FIRST && t * STEP % 64 == 0) __builtin_prefetch(ask + t * ask_stride);
            unroll<R>(EACH(r) { sums[r * T + t] = M::dot(rows[r], key, sums[r * T + t]); });
        });
    }
    alignas(64) float out[16];
    totals<R * T>(sums, out);
    unroll<R>(EACH(r) { __builtin_memcpy(s + r * s_stride, out + r * T, T * sizeof(float)); });
}

// The same for keys 0 .. n - 1; n is a multiple of 16.
template <class M, int R, bool FIRST>
void score_rows(const typename M::Element* q, int64_t q_stride, const Rows<typename M::Element>& k, int64_t n, float* s, int64_t s_stride) {
    for (int64_t t = 0; t < n; t += keys_at_once(R)) dot_products<M, R, FIRST>(q, q_stride, k.from(t), s + t, s_stride);
}

// o[r] += p[r] . v for R rows and all columns.
template <class M, int R, bool FIRST>
void weigh_rows(float* o, int64_t o_stride, const float* p, int64_t p_stride, const Rows<typename M::Element>& v, int64_t n) {
    constexpr int C = M::steps_at_once(R);
    int64_t at = 0;
    for (; at + C * M::COLUMNS <= o_stride; at += C * M::COLUMNS) M::template add<R, C, FIRST>(o + at, o_stride, p, p_stride, v, at, n);
    for (; at < o_stride; at += M::COLUMNS) M::template add<R, 1, FIRST>(o + at, o_stride, p, p_stride, v, at, n);
}

// f(rows, are they the first?) for `rows` of 1 to 4, all constants.
template <class F>
INLINE void with_rows(int64_t rows, bool first, const F& f) {
    switch (rows) {
        case 1: return first ? f(Index<1>{}, Index<1>{}) : f(Index<1>{}, Index<0>{});
        case 2: return first ? f(Index<2>{}, Index<1>{}) : f(Index<2>{}, Index<0>{});
        case 3: return first ? f(Index<3>{}, Index<1>{}) : f(Index<3>{}, Index<0>{});
        default: return first ? f(Index<4>{}, Index<1>{}) : f(Index<4>{}, Index<0>{});
    }
}
