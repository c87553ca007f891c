// merge: attention over the keys of a and attention over those of b become attention over both.
//
//     lse = ln(e^a + e^b)        out = out_a e^(a - lse) + out_b e^(b - lse)
//
// A state without weight is not read: it may hold anything. Infinity (a sink's, which has no value) leaves zeros; NaN stays NaN. Sums are
// float32 and rounded once, when stored.
//
// Included by each instruction set's source inside its own anonymous namespace. Unit: a run of rows (token, head).
// Bytes: 3 * Dv * sizeof(out) and 12 of LSEs per row.

constexpr int64_t COLUMNS = 256;  // turned into floats at a time

struct Weights {
    float a, b, lse;
};

inline Weights weights_of(float a, float b) {
    float top = a > b ? a : b, low = a > b ? b : a;  // NaN is in one of them
    if (top - top != 0.0f && low == low && top == top) return {0.0f, 0.0f, top};
    float e = __builtin_expf(low - top), sum = 1.0f + e, larger = 1.0f / sum, smaller = e / sum;
    return {a > b ? larger : smaller, a > b ? smaller : larger, top + __builtin_logf(sum)};
}

// `n` columns as floats: where they are, or in `room`. `stride` in bytes.
template <Dtype TYPE>
INLINE const float* floats_of(const char* from, int64_t stride, int64_t n, float* room) {
    if (stride != (TYPE == Dtype::f32 ? 4 : 2)) {
        for (int64_t i = 0; i < n; i++) room[i] = one_element<TYPE>(from + i * stride, 0);
        return room;
    }
    if constexpr (TYPE == Dtype::f32) return reinterpret_cast<const float*>(from);
    to_floats<TYPE>(from, room, n, n);
    return room;
}

template <Dtype TYPE>
inline void merge_row(const States& s, const Weights& w, const char* a, const char* b, char* to) {
    constexpr int64_t SIZE = TYPE == Dtype::f32 ? 4 : 2;
    alignas(64) float x[COLUMNS], y[COLUMNS], z[COLUMNS];
    for (int64_t c = 0; c < s.Dv; c += COLUMNS) {
        int64_t n = s.Dv - c < COLUMNS ? s.Dv - c : COLUMNS, wa = s.out_a.stride[2], wb = s.out_b.stride[2];
        float* sums = TYPE == Dtype::f32 ? reinterpret_cast<float*>(to + c * SIZE) : z;
        if (w.a != 0.0f && w.b != 0.0f) {
            const float *from_a = floats_of<TYPE>(a + c * wa, wa, n, x), *from_b = floats_of<TYPE>(b + c * wb, wb, n, y);
            for (int64_t i = 0; i < n; i++) sums[i] = from_a[i] * w.a + from_b[i] * w.b;
        } else if (w.a != 0.0f || w.b != 0.0f) {
            const float* from = w.a != 0.0f ? floats_of<TYPE>(a + c * wa, wa, n, x) : floats_of<TYPE>(b + c * wb, wb, n, y);
            float weight = w.a != 0.0f ? w.a : w.b;
            for (int64_t i = 0; i < n; i++) sums[i] = from[i] * weight;
        } else {
            for (int64_t i = 0; i < n; i++) sums[i] = 0.0f;
        }
        if constexpr (TYPE != Dtype::f32) from_floats(z, 1.0f, TYPE, to + c * SIZE, n);
    }
}

inline void merge_rows(const States& s, int64_t first, int64_t end) {
    int64_t size = s.type == Dtype::f32 ? 4 : 2;
    for (int64_t row = first, t = first / s.H, h = first % s.H; row < end; row++) {
        const auto lse_of = [&](const View& v) { return *reinterpret_cast<const float*>(v.data + t * v.stride[0] + h * v.stride[1]); };
        Weights w = weights_of(lse_of(s.lse_a), lse_of(s.lse_b));
        reinterpret_cast<float*>(s.lse)[row] = w.lse;
        const char *a = s.out_a.data + t * s.out_a.stride[0] + h * s.out_a.stride[1];
        const char *b = s.out_b.data + t * s.out_b.stride[0] + h * s.out_b.stride[1];
        char* to = s.out + row * s.Dv * size;
        if (s.type == Dtype::f32) merge_row<Dtype::f32>(s, w, a, b, to);
        else if (s.type == Dtype::bf16) merge_row<Dtype::bf16>(s, w, a, b, to);
        else merge_row<Dtype::f16>(s, w, a, b, to);
        if (++h == s.H) h = 0, t++;
    }
}
