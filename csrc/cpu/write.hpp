// write: new tokens' keys (or values) into their slots, quantised on the way if the pool is.
//
//     x      = the vector, turned by the angles of its token's position if there are any (RoPE)
//     stored = round(clamp(x / scale, -qmax, qmax))        scale = amax / qmax of the vector, or 1 where that is 0, if it is per (token, head)
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

inline void quantise(const float* x, int64_t n, Dtype type, float scale, char* to) {
    float limit = largest_magnitude(type);
    uint8_t* bytes = reinterpret_cast<uint8_t*>(to);
    const auto clamped = [&](int64_t i) {
        float y = x[i] / scale;
        y = y < -limit ? -limit : y;
        return y > limit ? limit : y;
    };
    const auto nearest = [&](int64_t i) { return static_cast<int32_t>((clamped(i) + 12582912.0f) - 12582912.0f); };  // half to even
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

inline void write_tokens(const Write& w, int64_t first, int64_t end) {
    bool quantised = w.kv_type != Dtype::f32 && w.kv_type != Dtype::bf16 && w.kv_type != Dtype::f16;
    int64_t size = w.new_type == Dtype::f32 ? 4 : 2;
    alignas(64) float x[4096];
    for (int64_t token = first; token < end; token++) {
        int64_t slot = *reinterpret_cast<const int64_t*>(w.slots + token * w.slots_stride);
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
                    float amax = bits_to_float(bits);
                    *stored_scale = amax == 0.0f ? 1.0f : amax / largest_magnitude(w.kv_type);
                }
                scale = *stored_scale;
            }
            quantise(x, w.D, w.kv_type, scale, to);
        }
    }
}
