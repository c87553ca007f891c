// What AVX-512 multiplies: spans of stored keys and values as vectors ("operands"), for each stored type. Nothing is decoded into memory:
// an element is widened in registers between the load and the product.
//
// Included by each AVX-512 source inside its own anonymous namespace. Three kinds of arithmetic:
//
//     Widened   float32: 16 elements an operand            float32, float16, and bfloat16 where there is no vdpbf16ps
//     Pairs     bfloat16, two products and a sum: 32       bfloat16; fp8 through a table of 128 magnitudes (every fp8 is a bfloat16)
//     Words     int16, two products and a sum, VNNI: 32    int8, int4; q and weights are rounded to 15 bits and a scale per row
//
// A kind says: SPAN elements of a key are BYTES bytes and make KEYS operands; SPAN elements of STEP values (one key, or two neighbours
// interleaved) make VALUES operands. The order of elements inside a span is the kind's own: q is laid out alike (`query`), and the columns
// of o are put right at the end (`columns`).

typedef __m512i vi;

// v[0 .. n) for 16 sums: lane i of the result is the total of v[i]. The order of additions is the same for every lane.
template <class V, class Add>
INLINE V total_of_each(const V* v, const Add& add) {
    const auto low32 = [](V a, V b) __attribute__((always_inline)) { return (V)_mm512_unpacklo_epi32((vi)a, (vi)b); };
    const auto high32 = [](V a, V b) __attribute__((always_inline)) { return (V)_mm512_unpackhi_epi32((vi)a, (vi)b); };
    const auto low64 = [](V a, V b) __attribute__((always_inline)) { return (V)_mm512_unpacklo_epi64((vi)a, (vi)b); };
    const auto high64 = [](V a, V b) __attribute__((always_inline)) { return (V)_mm512_unpackhi_epi64((vi)a, (vi)b); };
    const auto even = [](V a, V b) __attribute__((always_inline)) { return (V)_mm512_shuffle_i32x4((vi)a, (vi)b, 0x88); };
    const auto odd = [](V a, V b) __attribute__((always_inline)) { return (V)_mm512_shuffle_i32x4((vi)a, (vi)b, 0xdd); };
    V pairs[8], fours[4];
    unroll<8>(EACH(i) { pairs[i] = add(low32(v[2 * i], v[2 * i + 1]), high32(v[2 * i], v[2 * i + 1])); });
    unroll<4>(EACH(i) { fours[i] = add(low64(pairs[2 * i], pairs[2 * i + 1]), high64(pairs[2 * i], pairs[2 * i + 1])); });
    V low = add(even(fours[0], fours[1]), odd(fours[0], fours[1])), high = add(even(fours[2], fours[3]), odd(fours[2], fours[3]));
    return add(even(low, high), odd(low, high));
}

// Two operands that hold columns 0-3 8-11 16-19 24-27 and 4-7 12-15 20-23 28-31: what unpacklo and unpackhi of 16 bits make of 32.
INLINE void two_in_order(vf low, vf high, float* to) {
    store(to, (vf)_mm512_permutex2var_epi64((vi)low, _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), (vi)high));
    store(to + 16, (vf)_mm512_permutex2var_epi64((vi)low, _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), (vi)high));
}

// Four operands, the 128-bit lanes of which are a 4 x 4 matrix to be transposed.
INLINE void four_in_order(vf a, vf b, vf c, vf d, vf* to) {
    vf ab = _mm512_shuffle_f32x4(a, b, 0x44), cd = _mm512_shuffle_f32x4(c, d, 0x44);
    vf AB = _mm512_shuffle_f32x4(a, b, 0xee), CD = _mm512_shuffle_f32x4(c, d, 0xee);
    to[0] = _mm512_shuffle_f32x4(ab, cd, 0x88), to[1] = _mm512_shuffle_f32x4(ab, cd, 0xdd);
    to[2] = _mm512_shuffle_f32x4(AB, CD, 0x88), to[3] = _mm512_shuffle_f32x4(AB, CD, 0xdd);
}

template <Dtype KV>
struct Widened {
    typedef vf Operand;
    typedef vf Sum;
    static constexpr int SPAN = 16, BYTES = KV == Dtype::f32 ? 64 : 32, KEYS = 1, STEP = 1, VALUES = 1, Q_BYTES = 4;
    static constexpr bool INTEGER = false;
    static INLINE vf widen(const char* p) {
        if constexpr (KV == Dtype::f32) return _mm512_loadu_ps(reinterpret_cast<const float*>(p));
        __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        if constexpr (KV == Dtype::f16) return _mm512_cvtph_ps(halves);
        return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
    }
    static INLINE void key(const char* p, vf* to) { to[0] = widen(p); }
    static INLINE void value(const char* x, const char*, vf* to) { to[0] = widen(x); }
    static INLINE vf dot(vf a, vf b, vf sum) { return fma(a, b, sum); }
    static INLINE vf weight(const char* p) { return all(*reinterpret_cast<const float*>(p)); }
    static INLINE vf totals(const vf* sums) { return total_of_each(sums, [](vf a, vf b) __attribute__((always_inline)) { return a + b; }); }
    static INLINE void put_weights(char* to, vf p) { store(reinterpret_cast<float*>(to), p); }
    // One span of a query row as operands; returns what its products must be multiplied by.
    static INLINE float factor(const float*, int64_t) { return 1.0f; }
    static INLINE void query(const float* q, float, vf* to, int64_t stride) { (void)stride, to[0] = load(q); }
    static INLINE void columns(const vf* o, int64_t, float* to) { store(to, o[0]); }
};

#if defined(PAGEDKV_BF16_DOT)

// bfloat16s of the magnitudes of a fp8 type, their low and their high bytes: vpermi2b looks 64 elements up at once, and ignores the sign.
// A constant, not a static of a function: its registers are loaded once for a loop.
template <Dtype KV>
struct Magnitudes {
    uint8_t low[128], high[128];
    constexpr Magnitudes() : low(), high() {
        constexpr int mantissa = KV == Dtype::e4m3 ? 3 : 2, bias = KV == Dtype::e4m3 ? 7 : 15, one = 1 << mantissa;
        for (int i = 0; i < 128; i++) {
            int exponent = i >> mantissa, fraction = i & (one - 1);
            bool infinite = KV == Dtype::e5m2 && i == 0x7c, nan = i > (KV == Dtype::e4m3 ? 0x7e : 0x7c);
            int shift = 0;
            while (exponent == 0 && fraction && (fraction << shift) < one) shift++;  // subnormal: 0.f * 2^(1 - bias)
            int fields = exponent ? i << (7 - mantissa) : fraction ? (1 - shift) * 128 + ((fraction << shift) - one) * (128 / one) : 0;
            int bits = nan ? 0x7fc0 : infinite ? 0x7f80 : exponent || fraction ? fields + ((127 - bias) << 7) : 0;
            low[i] = static_cast<uint8_t>(bits & 255), high[i] = static_cast<uint8_t>(bits >> 8);
        }
    }
};

template <Dtype KV>
alignas(64) constexpr Magnitudes<KV> MAGNITUDES{};

template <Dtype KV>
struct Pairs {
    typedef vi Operand;
    typedef vf Sum;
    static constexpr bool FP8 = KV != Dtype::bf16, INTEGER = false;
    static constexpr int SPAN = FP8 ? 64 : 32, BYTES = 64, KEYS = FP8 ? 2 : 1, STEP = 2, VALUES = FP8 ? 4 : 2, Q_BYTES = 2;
    // 64 fp8 as bfloat16: 0-7 16-23 32-39 48-55, then 8-15 24-31 40-47 56-63.
    static INLINE void decode(const char* p, vi* to) {
        const Magnitudes<KV>& table = MAGNITUDES<KV>;
        vi x = _mm512_loadu_si512(p);
        vi low = _mm512_permutex2var_epi8(_mm512_loadu_si512(table.low), x, _mm512_loadu_si512(table.low + 64));
        vi high = _mm512_permutex2var_epi8(_mm512_loadu_si512(table.high), x, _mm512_loadu_si512(table.high + 64));
        high = _mm512_ternarylogic_epi64(high, x, _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8);  // high | (x & 0x80)
        to[0] = _mm512_unpacklo_epi8(low, high), to[1] = _mm512_unpackhi_epi8(low, high);
    }
    static INLINE void key(const char* p, vi* to) {
        if constexpr (FP8) decode(p, to);
        else to[0] = _mm512_loadu_si512(p);
    }
    static INLINE void value(const char* x, const char* y, vi* to) {
        vi a[KEYS], b[KEYS];
        key(x, a), key(y, b);
        unroll<KEYS>(EACH(i) { to[2 * i] = _mm512_unpacklo_epi16(a[i], b[i]), to[2 * i + 1] = _mm512_unpackhi_epi16(a[i], b[i]); });
    }
    static INLINE vf dot(vi a, vi b, vf sum) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
    static INLINE vi weight(const char* p) { return _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(p)); }
    static INLINE vf totals(const vf* sums) { return total_of_each(sums, [](vf a, vf b) __attribute__((always_inline)) { return a + b; }); }
    static INLINE void put_weights(char* to, vf p) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(p));
    }
    static INLINE float factor(const float*, int64_t) { return 1.0f; }
    static INLINE void query(const float* q, float, vi* to, int64_t stride) {
        vi first = (vi)_mm512_cvtne2ps_pbh(load(q + 16), load(q));
        if constexpr (!FP8) {
            to[0] = first;
        } else {
            vi second = (vi)_mm512_cvtne2ps_pbh(load(q + 48), load(q + 32));
            to[0] = _mm512_shuffle_i64x2(first, second, 0x88), to[stride] = _mm512_shuffle_i64x2(first, second, 0xdd);
        }
    }
    static INLINE void columns(const vf* o, int64_t stride, float* to) {
        if constexpr (FP8) {
            vf rows[4];
            four_in_order(o[0], o[stride], o[2 * stride], o[3 * stride], rows);
            unroll<4>(EACH(i) { store(to + 16 * i, rows[i]); });
        } else {
            two_in_order(o[0], o[stride], to);
        }
    }
};

// int8 and int4 are multiplied as they are. A row of q is rounded to 15 bits of its largest magnitude: that keeps all bits of a bfloat16
// down to 1/128 of the largest, and what is smaller is rounded by less than the largest's own last bit.
template <Dtype KV>
struct Words {
    typedef vi Operand;
    typedef vi Sum;
    static constexpr bool INTEGER = true, NIBBLES = KV == Dtype::i4;
    static constexpr int SPAN = 64, BYTES = NIBBLES ? 32 : 64, KEYS = 2, STEP = 2, VALUES = 4, Q_BYTES = 2;
    static constexpr float LIMIT = 32767.0f;
    // int8: elements 0-31, 32-63. int4: the even ones of 64, the odd ones.
    static INLINE void key(const char* p, vi* to) {
        if constexpr (NIBBLES) {
            vi bytes = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), eight = _mm512_set1_epi16(8);
            to[0] = _mm512_sub_epi16(_mm512_and_si512(bytes, _mm512_set1_epi16(15)), eight);
            to[1] = _mm512_sub_epi16(_mm512_srli_epi16(bytes, 4), eight);
        } else {
            to[0] = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
            to[1] = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32)));
        }
    }
    static INLINE void value(const char* x, const char* y, vi* to) {
        vi a[2], b[2];
        key(x, a), key(y, b);
        unroll<2>(EACH(i) { to[2 * i] = _mm512_unpacklo_epi16(a[i], b[i]), to[2 * i + 1] = _mm512_unpackhi_epi16(a[i], b[i]); });
    }
    static INLINE vi dot(vi a, vi b, vi sum) { return _mm512_dpwssd_epi32(sum, a, b); }
    static INLINE vi weight(const char* p) { return _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(p)); }
    // |q| < 2^15, |k| <= 2^7, D <= 512: the total fits 32 bits.
    static INLINE vf totals(const vi* sums) {
        return _mm512_cvtepi32_ps(total_of_each(sums, [](vi a, vi b) __attribute__((always_inline)) { return _mm512_add_epi32(a, b); }));
    }
    static INLINE void put_weights(char* to, vf p) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(p)));
    }
    static INLINE float factor(const float* q, int64_t n) {
        uint32_t bits = 0;  // magnitudes are ordered as their bits are, NaN last
        for (int64_t d = 0; d < n; d++) bits = (float_to_bits(q[d]) & 0x7fffffff) > bits ? float_to_bits(q[d]) & 0x7fffffff : bits;
        return bits_to_float(bits) < 1e-30f ? 1.0f : bits_to_float(bits) / LIMIT;
    }
    static INLINE void query(const float* q, float factor, vi* to, int64_t stride) {
        vf one = all(1.0f / factor);
        const auto words = [&](int i) { return _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(load(q + 16 * i) * one)); };
        vi first = _mm512_inserti64x4(_mm512_castsi256_si512(words(0)), words(1), 1);
        vi second = _mm512_inserti64x4(_mm512_castsi256_si512(words(2)), words(3), 1);
        if constexpr (NIBBLES) {
            const auto odd = [](vi x) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32(x, 16)); };
            to[0] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(first)), _mm512_cvtepi32_epi16(second), 1);
            to[stride] = _mm512_inserti64x4(_mm512_castsi256_si512(odd(first)), odd(second), 1);
        } else {
            to[0] = first, to[stride] = second;
        }
    }
    static INLINE void columns(const vf* o, int64_t stride, float* to) {
        if constexpr (NIBBLES) {
            vi even_and_odd = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
            vf rows[4];
            four_in_order(o[0], o[stride], o[2 * stride], o[3 * stride], rows);
            unroll<4>(EACH(i) { store(to + 16 * i, _mm512_permutexvar_ps(even_and_odd, rows[i])); });
        } else {
            two_in_order(o[0], o[stride], to), two_in_order(o[2 * stride], o[3 * stride], to + 32);
        }
    }
};

#endif
