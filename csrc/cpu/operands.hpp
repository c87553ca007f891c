// What AVX-512 multiplies: spans of stored keys and values as vectors ("operands"), for each stored type. Nothing is decoded into memory:
// an element is widened in registers between the load and the product.
//
// Included by each AVX-512 source inside its own anonymous namespace. Three kinds of arithmetic:
//
//     Widened   float32: 16 elements an operand            float32, float16, and bfloat16 where there is no vdpbf16ps
//     Pairs     bfloat16, two products and a sum: 32       bfloat16; fp8 through a table of 128 magnitudes (every fp8 is a bfloat16)
//     Words     int16, two products and a sum, VNNI: 32    int8; q and weights are rounded to 15 bits and a scale per row
//     Nibbles   bytes, four products and a sum, VNNI: 64   int4; q is rounded to 7 bits, weights to 8; four rows take keys ACROSS
//
// A kind says: SPAN elements of a key are BYTES bytes and make KEYS operands; SPAN elements of STEP values (one key, or two or four
// neighbours interleaved) make VALUES operands. The order of elements inside a span is the kind's own: q is laid out alike (`query`), and
// the columns of o are put right at the end (`columns`).

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

// Bytes 0 .. 31 of 16 keys as eight columns: lane t of to[j] holds bytes 4j .. 4j + 3 of key t.
INLINE void columns_of_keys(const char* keys, int64_t stride, vi* to) {
    vi x[8];
    unroll<8>(EACH(i) {
        const char* at = keys + (i / 4 * 8 + i % 4) * stride;
        __m256i key = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
        x[i] = _mm512_inserti64x4(_mm512_castsi256_si512(key), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + 4 * stride)), 1);
    });
    unroll<2>(EACH(i) {
        vi *y = x + 4 * i, a = _mm512_unpacklo_epi32(y[0], y[1]), b = _mm512_unpackhi_epi32(y[0], y[1]);
        vi c = _mm512_unpacklo_epi32(y[2], y[3]), d = _mm512_unpackhi_epi32(y[2], y[3]);
        y[0] = _mm512_unpacklo_epi64(a, c), y[1] = _mm512_unpackhi_epi64(a, c);
        y[2] = _mm512_unpacklo_epi64(b, d), y[3] = _mm512_unpackhi_epi64(b, d);
    });
    unroll<4>(EACH(j) { to[j] = _mm512_shuffle_i32x4(x[j], x[4 + j], 0x88), to[4 + j] = _mm512_shuffle_i32x4(x[j], x[4 + j], 0xdd); });
}

template <Dtype KV>
struct Widened {
    typedef vf Operand;
    typedef vf Sum;
    static constexpr int SPAN = 16, BYTES = KV == Dtype::f32 ? 64 : 32, KEYS = 1, STEP = 1, VALUES = 1, Q_BYTES = 4;
    static constexpr bool INTEGER = false, ACROSS = false, QUANTISED = false;
    static constexpr float BIAS = 0.0f;
    static INLINE vf widen(const char* p) {
        if constexpr (KV == Dtype::f32) return _mm512_loadu_ps(reinterpret_cast<const float*>(p));
        __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        if constexpr (KV == Dtype::f16) return _mm512_cvtph_ps(halves);
        return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
    }
    static INLINE void key(const char* p, vf* to) { to[0] = widen(p); }
    static INLINE void value(const char* x, int64_t, vf* to) { to[0] = widen(x); }
    static INLINE vf dot(vf a, vf b, vf sum) { return fma(a, b, sum); }
    static INLINE vf dot_key(vf q, vf k, vf sum) { return dot(q, k, sum); }
    static INLINE vf weight(const char* p) { return all(*reinterpret_cast<const float*>(p)); }
    static INLINE vf totals(const vf* sums) { return total_of_each(sums, [](vf a, vf b) __attribute__((always_inline)) { return a + b; }); }
    static INLINE void put_weights(char* to, vf p) { store(reinterpret_cast<float*>(to), p); }
    // What the products of a query row must be multiplied by; and one span of it as operands, the sum of which is returned if it matters.
    static INLINE float factor(const float*, int64_t) { return 1.0f; }
    static INLINE float query(const float* q, float, vf* to, int64_t) { return to[0] = load(q), 0.0f; }
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
    static constexpr bool FP8 = KV != Dtype::bf16, INTEGER = false, ACROSS = false, QUANTISED = FP8;
    static constexpr float BIAS = 0.0f;
    static constexpr int SPAN = FP8 ? 64 : 32, BYTES = 64, KEYS = FP8 ? 2 : 1, STEP = 2, VALUES = FP8 ? 4 : 2, Q_BYTES = 2;
    // 64 fp8 as bfloat16: 0-7 16-23 32-39 48-55, then 8-15 24-31 40-47 56-63.
    static INLINE void decode(vi x, vi* to) {
        const Magnitudes<KV>& table = MAGNITUDES<KV>;
        vi low = _mm512_permutex2var_epi8(_mm512_loadu_si512(table.low), x, _mm512_loadu_si512(table.low + 64));
        vi high = _mm512_permutex2var_epi8(_mm512_loadu_si512(table.high), x, _mm512_loadu_si512(table.high + 64));
        high = _mm512_ternarylogic_epi64(high, x, _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8);  // high | (x & 0x80)
        to[0] = _mm512_unpacklo_epi8(low, high), to[1] = _mm512_unpackhi_epi8(low, high);
    }
    static INLINE void key(const char* p, vi* to) {
        if constexpr (FP8) decode(_mm512_loadu_si512(p), to);
        else to[0] = _mm512_loadu_si512(p);
    }
    static INLINE void value(const char* p, int64_t stride, vi* to) {
        vi x = _mm512_loadu_si512(p), y = _mm512_loadu_si512(p + stride);
        if constexpr (FP8) decode(_mm512_unpacklo_epi8(x, y), to), decode(_mm512_unpackhi_epi8(x, y), to + 2);
        else to[0] = _mm512_unpacklo_epi16(x, y), to[1] = _mm512_unpackhi_epi16(x, y);
    }
    static INLINE vf dot(vi a, vi b, vf sum) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
    static INLINE vf dot_key(vi q, vi k, vf sum) { return dot(q, k, sum); }
    static INLINE vi weight(const char* p) { return _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(p)); }
    static INLINE vf totals(const vf* sums) { return total_of_each(sums, [](vf a, vf b) __attribute__((always_inline)) { return a + b; }); }
    static INLINE void put_weights(char* to, vf p) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(p));
    }
    static INLINE float factor(const float*, int64_t) { return 1.0f; }
    static INLINE float query(const float* q, float, vi* to, int64_t stride) {
        vi first = (vi)_mm512_cvtne2ps_pbh(load(q + 16), load(q));
        if constexpr (!FP8) {
            to[0] = first;
        } else {
            vi second = (vi)_mm512_cvtne2ps_pbh(load(q + 48), load(q + 32));
            to[0] = _mm512_shuffle_i64x2(first, second, 0x88), to[stride] = _mm512_shuffle_i64x2(first, second, 0xdd);
        }
        return 0.0f;
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

// The largest magnitude of a row, in units of which it is rounded to integers up to `limit`.
INLINE float unit_of(const float* x, int64_t n, float limit) {
    uint32_t bits = 0;  // magnitudes are ordered as their bits are, NaN last
    for (int64_t d = 0; d < n; d++) bits = (float_to_bits(x[d]) & 0x7fffffff) > bits ? float_to_bits(x[d]) & 0x7fffffff : bits;
    return bits_to_float(bits) < 1e-30f ? 1.0f : bits_to_float(bits) / limit;
}

// sum + unsigned bytes of 16 keys . the four signed bytes of one cell of q
INLINE vi dot_cell(vi keys, const int32_t* cell, vi sum) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(keys), "m"(*cell));
    return sum;
}

INLINE vf integers_to_floats(const vi* sums) {
    return _mm512_cvtepi32_ps(total_of_each(sums, [](vi a, vi b) __attribute__((always_inline)) { return _mm512_add_epi32(a, b); }));
}

// int8 is multiplied as it is. A row of q is rounded to 15 bits of its largest magnitude: that keeps all bits of a bfloat16 down to 1/128
// of the largest, and what is smaller is rounded by less than the largest's own last bit. |q| < 2^15, |k| <= 2^7, D <= 512: totals fit 32
// bits.
struct Words {
    typedef vi Operand;
    typedef vi Sum;
    static constexpr bool INTEGER = true, ACROSS = false, QUANTISED = true;
    static constexpr int SPAN = 64, BYTES = 64, KEYS = 2, STEP = 2, VALUES = 4, Q_BYTES = 2;
    static constexpr float LIMIT = 32767.0f, VALUE_UNIT = 1.0f, BIAS = 0.0f;
    static INLINE void key(const char* p, vi* to) {
        to[0] = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
        to[1] = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32)));
    }
    static INLINE void value(const char* p, int64_t stride, vi* to) {
        vi a[2], b[2];
        key(p, a), key(p + stride, b);
        unroll<2>(EACH(i) { to[2 * i] = _mm512_unpacklo_epi16(a[i], b[i]), to[2 * i + 1] = _mm512_unpackhi_epi16(a[i], b[i]); });
    }
    static INLINE vi dot(vi a, vi b, vi sum) {  // gcc 12 copies the sum of the intrinsic back and forth: a third of all instructions
        asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
        return sum;
    }
    static INLINE vi dot_key(vi q, vi k, vi sum) { return dot(q, k, sum); }
    static INLINE vi weight(const char* p) { return _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(p)); }
    static INLINE vf totals(const vi* sums) { return integers_to_floats(sums); }
    static INLINE void put_weights(char* to, vf p) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(p)));
    }
    static INLINE float factor(const float* q, int64_t n) { return unit_of(q, n, LIMIT); }
    static INLINE float query(const float* q, float factor, vi* to, int64_t stride) {
        vf one = all(1.0f / factor);
        const auto words = [&](int i) { return _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(load(q + 16 * i) * one)); };
        to[0] = _mm512_inserti64x4(_mm512_castsi256_si512(words(0)), words(1), 1);
        to[stride] = _mm512_inserti64x4(_mm512_castsi256_si512(words(2)), words(3), 1);
        return 0.0f;
    }
    static INLINE void columns(const vf* o, int64_t stride, float* to) {
        two_in_order(o[0], o[stride], to), two_in_order(o[2 * stride], o[3 * stride], to + 32);
    }
};

// Four keys' bytes 0 .. 15 (or 16 .. 31) side by side, from keys 0, 1 in one register and 2, 3 in another.
template <int FROM>
struct FourKeys {
    uint8_t from[64];
    constexpr FourKeys() : from() {
        for (int i = 0; i < 64; i++) from[i] = static_cast<uint8_t>(FROM + i / 4 + i % 4 * 32);
    }
};
template <int FROM>
alignas(64) constexpr FourKeys<FROM> FOUR_KEYS{};

// Bytes 0 2 4 .. 62, then 1 3 5 .. 63.
struct EvenOdd {
    uint8_t from[64];
    constexpr EvenOdd() : from() {
        for (int i = 0; i < 64; i++) from[i] = static_cast<uint8_t>(i % 32 * 2 + i / 32);
    }
};
alignas(64) constexpr EvenOdd EVEN_ODD{};

// int4: stored + 8, element 2i in the low half of byte i. Keys are multiplied as they are stored, 8 times the sum of q is taken off after;
// values as 16 times themselves. q keeps 7 bits of a row's largest magnitude, and weights 8 bits of the largest of 16 keys: small beside
// what int4 itself has rounded away (4 bits of a key's largest magnitude).
struct Nibbles {
    typedef vi Operand;
    typedef vi Sum;
    static constexpr bool INTEGER = true, ACROSS = true, QUANTISED = true;
    static constexpr int SPAN = 64, BYTES = 32, KEYS = 1, STEP = 4, VALUES = 4, Q_BYTES = 1;
    static constexpr float LIMIT = 255.0f, VALUE_UNIT = 1.0f / 16, BIAS = -8.0f;
    // Even elements, then odd ones.
    static INLINE void key(const char* p, vi* to) {
        vi twice = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
        to[0] = _mm512_and_si512(_mm512_srlv_epi64(twice, _mm512_setr_epi64(0, 0, 0, 0, 4, 4, 4, 4)), _mm512_set1_epi8(15));
    }
    // Columns 0 2 .. 30, 1 3 .. 31, 32 34 .. 62, 33 35 .. 63 of four keys.
    static INLINE void value(const char* p, int64_t stride, vi* to) {
        const auto half = [&](int64_t t) __attribute__((always_inline)) {
            return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + t * stride));
        };
        vi first = _mm512_inserti64x4(_mm512_castsi256_si512(half(0)), half(1), 1);
        vi second = _mm512_inserti64x4(_mm512_castsi256_si512(half(2)), half(3), 1);
        const auto high = [](vi x) __attribute__((always_inline)) {  // (x ^ 0x88) & 0xf0: less 8, as the upper half of a signed byte
            return _mm512_ternarylogic_epi64(x, _mm512_set1_epi8(static_cast<char>(0x88)), _mm512_set1_epi8(static_cast<char>(0xf0)), 0x28);
        };
        vi low16 = _mm512_permutex2var_epi8(first, _mm512_load_si512(FOUR_KEYS<0>.from), second);
        vi high16 = _mm512_permutex2var_epi8(first, _mm512_load_si512(FOUR_KEYS<16>.from), second);
        to[0] = high(_mm512_slli_epi16(low16, 4)), to[1] = high(low16);
        to[2] = high(_mm512_slli_epi16(high16, 4)), to[3] = high(high16);
    }
    // Which one is unsigned: keys against q, weights against values.
    static INLINE vi dot_key(vi q, vi k, vi sum) {
        asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(k), "v"(q));
        return sum;
    }
    static INLINE vi dot(vi w, vi v, vi sum) {
        asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(v));
        return sum;
    }
    static INLINE vi weight(const char* p) { return _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(p)); }
    static INLINE vf totals(const vi* sums) { return integers_to_floats(sums); }
    static INLINE void put_weights(char* to, vf p) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(p)));
    }
    static INLINE float factor(const float* q, int64_t n) { return unit_of(q, n, 127.0f); }
    // The bytes of even elements, then those of odd ones.
    static INLINE float query(const float* q, float factor, vi* to, int64_t) {
        vf one = all(1.0f / factor);
        alignas(64) int8_t bytes[64];
        vi sum = vi{};
        unroll<4>(EACH(i) {
            vi rounded = _mm512_cvtps_epi32(load(q + 16 * i) * one);
            _mm_store_si128(reinterpret_cast<__m128i*>(bytes + 16 * i), _mm512_cvtepi32_epi8(rounded));
            sum = _mm512_add_epi32(sum, rounded);
        });
        to[0] = _mm512_permutexvar_epi8(_mm512_load_si512(EVEN_ODD.from), _mm512_load_si512(bytes));
        return sum_of(_mm512_cvtepi32_ps(sum));
    }
    // Across, a column is multiplied as its lower four bits and as 16 times its upper ones: cells [column][lower, upper][4 rows].
    static INLINE void cells(vi span, int32_t* to) {
        _mm512_i32scatter_epi32(to, _mm512_setr_epi32(0, 8, 16, 24, 32, 40, 48, 56, 4, 12, 20, 28, 36, 44, 52, 60), span, 4);
    }
    static INLINE void across(vi column, const int32_t* cells, vi* sums) {
        vi lower = _mm512_and_si512(column, _mm512_set1_epi8(15)), upper = _mm512_and_si512(column, _mm512_set1_epi8(static_cast<char>(0xf0)));
        unroll<8>(EACH(i) { sums[i] = dot_cell(i < 4 ? lower : upper, cells + i, sums[i]); });
    }
    static INLINE vf across_total(vi lower, vi upper) { return _mm512_cvtepi32_ps(_mm512_add_epi32(lower, _mm512_srai_epi32(upper, 4))); }
    static INLINE void columns(const vf* o, int64_t stride, float* to) {
        for (int half = 0; half < 2; half++, o += 2 * stride, to += 32) {
            vi lower = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            store(to, _mm512_permutex2var_ps(o[0], lower, o[stride]));
            store(to + 16, _mm512_permutex2var_ps(o[0], _mm512_add_epi32(lower, _mm512_set1_epi32(8)), o[stride]));
        }
    }
};

#endif
