// write: new tokens' keys (or values) into their slots, quantised on the way if the pool is.
//
//     x      = the vector, turned by the angles of its token's position if there are any (RoPE)
//     stored = round(clamp(x / scale, -qmax, qmax))        scale = amax / qmax of the vector, or 1 where that is 0, if it is per (token, head)
//
// NaN is NaN in fp8 and 0 as an integer; a scale of a (token, head) is NaN if one of its numbers is.
//
// Included by each instruction set's source inside its own anonymous namespace. Unit: a run of tokens, every kv head of each.
// Bytes: D * sizeof(new) read and D * sizeof(stored) written per token and kv head.

inline float largest_magnitude(Dtype type) {
    switch (type) {
        case Dtype::e4m3: return 448.0f;
        case Dtype::e5m2: return 57344.0f;
        case Dtype::i8: return 127.0f;
        default: return 7.0f;
    }
}

#if defined(PAGEDKV_AVX512)

// to_fp8 of 16 floats, each in 32 bits: a sum with 2^23 units of the last place that is kept rounds to it, half to even.
INLINE __m512i sixteen_to_fp8(vf x, int mantissa) {
    int bias = mantissa == 3 ? 7 : 15;
    unsigned drop = 23 - static_cast<unsigned>(mantissa);
    vf a = magnitude(x);
    __m512i least = _mm512_set1_epi32((1 - bias + 127) << 23);
    __m512i exponent = _mm512_max_epi32(_mm512_and_si512((__m512i)a, _mm512_set1_epi32(0x7f800000)), least);
    __m512i units = _mm512_add_epi32(exponent, _mm512_set1_epi32(static_cast<int>(drop << 23)));
    __m512i places = _mm512_sub_epi32((__m512i)(a + (vf)units), units);
    __m512i code = _mm512_add_epi32(places, _mm512_srli_epi32(_mm512_sub_epi32(exponent, least), drop));
    code = _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), code, _mm512_set1_epi32(0x7f));
    return _mm512_or_si512(code, _mm512_and_si512(_mm512_srli_epi32((__m512i)x, 24), _mm512_set1_epi32(0x80)));
}

// As `quantise`, for whole vectors of 32; returns how many elements that was.
inline int64_t quantise_vectors(const float* x, int64_t n, Dtype type, float scale, char* to) {
    vf limit = all(largest_magnitude(type)), lowest = all(-largest_magnitude(type));
    const auto bytes = [&](int64_t i) __attribute__((always_inline)) {
        vf y = _mm512_min_ps(limit, _mm512_max_ps(lowest, load(x + i) / all(scale)));  // NaN stays NaN
        if (type == Dtype::e4m3) return _mm512_cvtepi32_epi8(sixteen_to_fp8(y, 3));
        if (type == Dtype::e5m2) return _mm512_cvtepi32_epi8(sixteen_to_fp8(y, 2));
        return _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(y));  // half to even; NaN becomes -2^31, of which the last byte is 0
    };
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        __m256i all32 = _mm256_set_m128i(bytes(i + 16), bytes(i));
        if (type != Dtype::i4) {
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), all32);
            continue;
        }
        all32 = _mm256_add_epi8(all32, _mm256_set1_epi8(8));  // pairs of nibbles: low + 16 * high
        __m256i pairs = _mm256_maddubs_epi16(all32, _mm256_set1_epi16(0x1001));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i / 2), _mm256_cvtepi16_epi8(pairs));
    }
    return i;
}

#endif

inline void quantise(const float* x, int64_t n, Dtype type, float scale, char* to) {
#if defined(PAGEDKV_AVX512)
    int64_t done = quantise_vectors(x, n, type, scale, to);
    x += done, n -= done, to += type == Dtype::i4 ? done / 2 : done;
#endif
    float limit = largest_magnitude(type);
    uint8_t* bytes = reinterpret_cast<uint8_t*>(to);
    const auto clamped = [&](int64_t i) {
        float y = x[i] / scale;
        y = y < -limit ? -limit : y;
        return y > limit ? limit : y;
    };
    const auto nearest = [&](int64_t i) {  // half to even
        float y = clamped(i);
        return y == y ? static_cast<int32_t>((y + 12582912.0f) - 12582912.0f) : 0;
    };
    if (type == Dtype::i8) {
        for (int64_t i = 0; i < n; i++) bytes[i] = static_cast<uint8_t>(nearest(i));
    } else if (type == Dtype::i4) {
        for (int64_t i = 0; i < n / 2; i++) bytes[i] = static_cast<uint8_t>((nearest(2 * i) + 8) | (nearest(2 * i + 1) + 8) << 4);
    } else if (type == Dtype::e4m3) {
        for (int64_t i = 0; i < n; i++) bytes[i] = to_fp8(clamped(i), 3);
    } else {
        for (int64_t i = 0; i < n; i++) bytes[i] = to_fp8(clamped(i), 2);
    }
}

// x[a_i], x[b_i] = x[a_i] cos_i - x[b_i] sin_i, x[b_i] cos_i + x[a_i] sin_i for the pairs of RoPE.
inline void turn(const Write& w, int64_t token, float* x) {
    int64_t position = *reinterpret_cast<const int64_t*>(w.positions.data + token * w.positions.stride[0]);
    const float* c = reinterpret_cast<const float*>(w.cos.data + position * w.cos.stride[0]);
    const float* s = reinterpret_cast<const float*>(w.sin.data + position * w.sin.stride[0]);
    const auto pair = [&](int64_t i, float& a, float& b) {
        float first = a, second = b;
        a = first * c[i] - second * s[i];
        b = second * c[i] + first * s[i];
    };
    if (w.interleaved) {
        for (int64_t i = 0; i < w.half; i++) pair(i, x[2 * i], x[2 * i + 1]);
    } else {
        for (int64_t i = 0; i < w.half; i++) pair(i, x[i], x[w.half + i]);
    }
}

// Asks for the lines of a slot that will be written: arithmetic fills the processor's window, so their absence would show.
inline void ask_for_slot(const Write& w, int64_t slot) {
    if (slot < 0) return;
    char* to = w.pool.data + slot / w.S * w.pool.stride[0] + slot % w.S * w.pool.stride[1];
    int64_t bytes = w.kv_type == Dtype::i4 ? w.D / 2 : w.D;
    for (int64_t h = 0; h < w.K; h++)
        for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(to + h * w.pool.stride[2] + line, 1);
}

inline void write_tokens(const Write& w, int64_t first, int64_t end) {
    bool quantised = w.kv_type != Dtype::f32 && w.kv_type != Dtype::bf16 && w.kv_type != Dtype::f16;
    int64_t size = w.new_type == Dtype::f32 ? 4 : 2;
    const auto slot_of = [&](int64_t token) { return *reinterpret_cast<const int64_t*>(w.slots + token * w.slots_stride); };
    alignas(64) float x[4096];
    for (int64_t token = first; token < end; token++) {
        int64_t slot = slot_of(token);
        if (quantised && token + 1 < end) ask_for_slot(w, slot_of(token + 1));
        if (slot < 0) continue;
        int64_t frame = slot / w.S, offset = slot % w.S;
        for (int64_t h = 0; h < w.K; h++) {
            const char* from = w.fresh.data + token * w.fresh.stride[0] + h * w.fresh.stride[1];
            char* to = w.pool.data + frame * w.pool.stride[0] + offset * w.pool.stride[1] + h * w.pool.stride[2];
            if (w.new_type == w.kv_type && !w.half) {
                __builtin_memcpy(to, from, static_cast<uint64_t>(w.D * size));
                continue;
            }
            to_floats(w.new_type, from, x, w.D, w.D);
            if (w.half) turn(w, token, x);
            if (!quantised) {
                from_floats(x, 1.0f, w.kv_type, to, w.D);
                continue;
            }
            float scale = 1.0f;
            if (w.scale.data) {
                char* at = w.scale.data + frame * w.scale.stride[0] + offset * w.scale.stride[1] + h * w.scale.stride[2];
                float* stored_scale = reinterpret_cast<float*>(at);
                if (w.scale_per_token_head) {
                    uint32_t bits = 0;  // magnitudes are ordered as their bits are, NaN last: a maximum of integers becomes vectors
                    for (int64_t d = 0; d < w.D; d++) bits = (float_to_bits(x[d]) & 0x7fffffff) > bits ? float_to_bits(x[d]) & 0x7fffffff : bits;
                    float exact = bits_to_float(bits) / largest_magnitude(w.kv_type);
                    *stored_scale = exact == 0.0f ? 1.0f : exact;
                }
                scale = *stored_scale;
            }
            quantise(x, w.D, w.kv_type, scale, to);
        }
    }
}
