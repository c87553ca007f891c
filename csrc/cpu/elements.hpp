// Stored elements: float32, bfloat16, float16, fp8, int8, int4; to float32 (or bfloat16) and back, as pagedkv/kernels/quant.py defines them.
//
// Included by each instruction set's source inside its own anonymous namespace. Every quantised element is a bfloat16 exactly, so one
// look-up table of 256 bfloat16 per type (of its bytes) is the definition; wide registers hold the half without the sign.

typedef uint16_t u16;

INLINE float bits_to_float(uint32_t bits) { float x; __builtin_memcpy(&x, &bits, 4); return x; }
INLINE uint32_t float_to_bits(float x) { uint32_t bits; __builtin_memcpy(&bits, &x, 4); return bits; }

INLINE float from_bf16(u16 x) { return bits_to_float(static_cast<uint32_t>(x) << 16); }

INLINE u16 to_bf16(float x) {
    uint32_t bits = float_to_bits(x);
    u16 rounded = static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);  // to nearest, ties to even
    return x != x ? static_cast<u16>(0x7fc0) : rounded;
}

INLINE float from_f16(u16 x) {
#if defined(PAGEDKV_AVX512) || defined(PAGEDKV_AVX2)
    return _cvtsh_ss(x);
#else
    uint32_t sign = static_cast<uint32_t>(x & 0x8000) << 16, rest = x & 0x7fff;
    if (rest >= 0x7c00) return bits_to_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    float magnitude = bits_to_float(rest << 13) * bits_to_float(0x77800000);  // 2^112: the exponents' biases differ by 112
    return bits_to_float(sign | float_to_bits(magnitude));
#endif
}

INLINE u16 to_f16(float x) {
#if defined(PAGEDKV_AVX512) || defined(PAGEDKV_AVX2)
    return static_cast<u16>(_cvtss_sh(x, 0));
#else
    uint32_t bits = float_to_bits(x), sign = bits >> 16 & 0x8000;
    float a = bits_to_float(bits & 0x7fffffff);
    if (a != a) return static_cast<u16>(sign | 0x7e00);
    if (a >= 65520.0f) return static_cast<u16>(sign | 0x7c00);
    if (a < bits_to_float(0x38800000)) return static_cast<u16>(sign | (float_to_bits(a + 0.5f) - 0x3f000000));  // below 2^-14: steps of 2^-24
    bits = float_to_bits(a);
    return static_cast<u16>(sign | ((bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13));
#endif
}

INLINE float from_fp8(uint8_t x, int mantissa) {
    int exponent = (x & 0x7f) >> mantissa, bias = mantissa == 3 ? 7 : 15, fraction = x & ((1 << mantissa) - 1);
    bool is_nan = mantissa == 3 ? (x & 0x7f) == 0x7f : exponent == 31 && fraction;
    float value = static_cast<float>(fraction + (exponent ? 1 << mantissa : 0));
    value *= bits_to_float(static_cast<uint32_t>((exponent ? exponent : 1) - bias - mantissa + 127) << 23);
    if (is_nan) value = bits_to_float(0x7fc00000);
    if (mantissa == 2 && exponent == 31 && !fraction) value = bits_to_float(0x7f800000);
    return x & 0x80 ? -value : value;
}

// `x` is within the finite range of the type, or NaN. Adding a constant whose unit in the last place is the step rounds to even.
INLINE uint8_t to_fp8(float x, int mantissa) {
    uint32_t sign = float_to_bits(x) >> 24 & 0x80;
    float a = bits_to_float(float_to_bits(x) & 0x7fffffff);
    if (a != a) return static_cast<uint8_t>(sign | 0x7f);
    int bias = mantissa == 3 ? 7 : 15;
    float least = bits_to_float(static_cast<uint32_t>(1 - bias + 127) << 23);  // the smallest normal number
    uint32_t code;
    if (a < least) {
        float shift = bits_to_float(static_cast<uint32_t>(1 - bias - mantissa + 23 + 127) << 23);
        code = float_to_bits(a + shift) - float_to_bits(shift);
    } else {
        uint32_t bits = float_to_bits(a), drop = 23 - static_cast<uint32_t>(mantissa);
        bits += (1u << (drop - 1)) - 1 + (bits >> drop & 1);
        code = (bits >> drop) - (static_cast<uint32_t>(127 - bias) << mantissa);
    }
    return static_cast<uint8_t>(sign | code);
}

// The bfloat16 of every byte of a one-byte type. int4's table is of its nibbles.
struct Tables {
    u16 e4m3[256], e5m2[256], i4[32];
    Tables() {
        for (int i = 0; i < 256; i++) e4m3[i] = to_bf16(from_fp8(static_cast<uint8_t>(i), 3));
        for (int i = 0; i < 256; i++) e5m2[i] = to_bf16(from_fp8(static_cast<uint8_t>(i), 2));
        for (int i = 0; i < 32; i++) i4[i] = to_bf16(static_cast<float>((i & 15) - 8));
    }
};

inline const Tables& tables() {
    static const Tables once;
    return once;
}

#if defined(PAGEDKV_AVX512)

// 32 bytes, widened to 16 bits, through a table of the 128 magnitudes; bit 7 is the sign.
INLINE __m512i look_up(__m512i x, const u16* table) {
    __m512i a = _mm512_loadu_si512(table), b = _mm512_loadu_si512(table + 32), c = _mm512_loadu_si512(table + 64);
    __m512i d = _mm512_loadu_si512(table + 96), low = _mm512_permutex2var_epi16(a, x, b), high = _mm512_permutex2var_epi16(c, x, d);
    __m512i magnitude = _mm512_mask_blend_epi16(_mm512_test_epi16_mask(x, _mm512_set1_epi16(0x40)), low, high);
    return _mm512_or_si512(magnitude, _mm512_slli_epi16(_mm512_and_si512(x, _mm512_set1_epi16(0x80)), 8));
}

// 32 integers of 8 bits as bfloat16: exact, so the upper halves of their floats are all of them.
INLINE __m512i integers_to_bf16(__m256i x) {
    vf low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(x)));
    vf high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(x, 1)));
#if defined(PAGEDKV_BF16_DOT)
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
#else
    __m256i lows = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(low), 16));
    __m256i highs = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(high), 16));
    return _mm512_inserti64x4(_mm512_castsi256_si512(lows), highs, 1);
#endif
}

// Elements 32i .. 32i + 31 of a quantised vector as bfloat16.
template <Dtype TYPE>
INLINE __m512i thirty_two(const char* from, int64_t i) {
    if constexpr (TYPE == Dtype::i4) {
        __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 16 * i)), mask = _mm_set1_epi8(15);
        __m128i low = _mm_and_si128(bytes, mask), high = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
        __m256i nibbles = _mm256_set_m128i(_mm_unpackhi_epi8(low, high), _mm_unpacklo_epi8(low, high));
        return _mm512_permutexvar_epi16(_mm512_cvtepu8_epi16(nibbles), _mm512_loadu_si512(tables().i4));
    } else {
        __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32 * i));
        if constexpr (TYPE == Dtype::i8) return integers_to_bf16(bytes);
        return look_up(_mm512_cvtepu8_epi16(bytes), TYPE == Dtype::e4m3 ? tables().e4m3 : tables().e5m2);
    }
}

#endif

template <Dtype TYPE>
INLINE float one_element(const char* from, int64_t i) {
    if constexpr (TYPE == Dtype::f32) return reinterpret_cast<const float*>(from)[i];
    if constexpr (TYPE == Dtype::bf16) return from_bf16(reinterpret_cast<const u16*>(from)[i]);
    if constexpr (TYPE == Dtype::f16) return from_f16(reinterpret_cast<const u16*>(from)[i]);
    if constexpr (TYPE == Dtype::i8) return static_cast<float>(reinterpret_cast<const int8_t*>(from)[i]);
    uint8_t byte = reinterpret_cast<const uint8_t*>(from)[TYPE == Dtype::i4 ? i / 2 : i];
    if constexpr (TYPE == Dtype::i4) return static_cast<float>((i % 2 ? byte >> 4 : byte & 15) - 8);
    return from_bf16(TYPE == Dtype::e4m3 ? tables().e4m3[byte] : tables().e5m2[byte]);
}

// The `n` elements at `from` as float32, then zeros up to `padded`.
template <Dtype TYPE>
INLINE void to_floats(const char* from, float* to, int64_t n, int64_t padded) {
    int64_t i = 0;
#if defined(PAGEDKV_AVX512)
    if constexpr (TYPE == Dtype::f16) {
        for (; i + 16 <= n; i += 16) store(to + i, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 2 * i))));
    } else if constexpr (TYPE != Dtype::f32 && TYPE != Dtype::bf16) {
        for (; i + 32 <= n; i += 32) {
            __m512i x = thirty_two<TYPE>(from, i / 32);
            __m512i low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(x)), high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(x, 1));
            store(to + i, _mm512_castsi512_ps(_mm512_slli_epi32(low, 16)));
            store(to + i + 16, _mm512_castsi512_ps(_mm512_slli_epi32(high, 16)));
        }
    }
#elif defined(PAGEDKV_AVX2)
    if constexpr (TYPE == Dtype::f16) {
        for (; i + 8 <= n; i += 8) store(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * i))));
    }
#endif
    for (; i < n; i++) to[i] = one_element<TYPE>(from, i);
    for (; i < padded; i++) to[i] = 0.0f;
}

// f(Dtype as a constant).
template <class F>
INLINE void with_type(Dtype type, const F& f) {
    switch (type) {
        case Dtype::f32: return f(Index<static_cast<int>(Dtype::f32)>{});
        case Dtype::bf16: return f(Index<static_cast<int>(Dtype::bf16)>{});
        case Dtype::f16: return f(Index<static_cast<int>(Dtype::f16)>{});
        case Dtype::e4m3: return f(Index<static_cast<int>(Dtype::e4m3)>{});
        case Dtype::e5m2: return f(Index<static_cast<int>(Dtype::e5m2)>{});
        case Dtype::i8: return f(Index<static_cast<int>(Dtype::i8)>{});
        case Dtype::i4: return f(Index<static_cast<int>(Dtype::i4)>{});
    }
}

inline void to_floats(Dtype type, const char* from, float* to, int64_t n, int64_t padded) {
    with_type(type, EACH(t) { to_floats<static_cast<Dtype>(t.value)>(from, to, n, padded); });
}

#if defined(PAGEDKV_AVX512)

// The `n` elements at `from`, of a type whose values are bfloat16 exactly, as bfloat16, then zeros up to `padded`.
template <Dtype TYPE>
INLINE void to_bf16s(const char* from, u16* to, int64_t n, int64_t padded) {
    int64_t i = 0;
    if constexpr (TYPE == Dtype::bf16) {
        __builtin_memcpy(to, from, 2 * static_cast<uint64_t>(n));
        i = n;
    } else {
        for (; i + 32 <= n; i += 32) _mm512_storeu_si512(to + i, thirty_two<TYPE>(from, i / 32));
        for (; i < n; i++) to[i] = to_bf16(one_element<TYPE>(from, i));
    }
    for (; i < padded; i++) to[i] = 0;
}

#endif

// `n` floats, times `factor`, as elements of a float type.
inline void from_floats(const float* from, float factor, Dtype type, char* to, int64_t n) {
    if (type == Dtype::f32) {
        for (int64_t i = 0; i < n; i++) reinterpret_cast<float*>(to)[i] = from[i] * factor;
    } else if (type == Dtype::bf16) {
        for (int64_t i = 0; i < n; i++) reinterpret_cast<u16*>(to)[i] = to_bf16(from[i] * factor);
    } else {
        int64_t i = 0;
#if defined(PAGEDKV_AVX512)
        for (; i + 16 <= n; i += 16) _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 2 * i), _mm512_cvtps_ph(load(from + i) * all(factor), 0));
#elif defined(PAGEDKV_AVX2)
        for (; i + 8 <= n; i += 8) _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 2 * i), _mm256_cvtps_ph(load(from + i) * all(factor), 0));
#endif
        for (; i < n; i++) reinterpret_cast<u16*>(to)[i] = to_f16(from[i] * factor);
    }
}
