// Vectors of floats, one width per instruction set: `vf`, LANES of them, and what the kernels need beyond + - *.
//
// Included by each instruction set's source inside its own anonymous namespace; knows nothing of attention.

#define INLINE inline __attribute__((always_inline))

template <int N>
struct Index {
    static constexpr int value = N;
    constexpr operator int() const { return N; }
};

// f(Index<0>), f(Index<1>), ...: indices are constants before optimisation starts, so small arrays of vectors stay in registers.
template <int N, int FROM = 0, class F>
INLINE void unroll(const F& f) {
    if constexpr (FROM < N) {
        f(Index<FROM>{});
        unroll<N, FROM + 1>(f);
    }
}
#define EACH(i) [&](auto i) __attribute__((always_inline))

#if defined(PAGEDKV_AVX512)

typedef __m512 vf;
constexpr int LANES = 16, ACCUMULATORS = 16;
INLINE vf load(const float* p) { return _mm512_loadu_ps(p); }
INLINE void store(float* p, vf x) { _mm512_storeu_ps(p, x); }
INLINE vf all(float x) { return _mm512_set1_ps(x); }
INLINE vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE float largest(vf x) { return _mm512_reduce_max_ps(x); }
INLINE float sum_of(vf x) { return _mm512_reduce_add_ps(x); }
INLINE vf rounded(vf x) { return _mm512_roundscale_ps(x, 0); }
INLINE vf times_two_to(vf x, vf n) { return _mm512_scalef_ps(x, n); }
INLINE vf where_less(vf a, vf b, vf then, vf otherwise) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), otherwise, then);
}
INLINE vf magnitude(vf x) { return _mm512_abs_ps(x); }

#elif defined(PAGEDKV_AVX2)

typedef __m256 vf;
constexpr int LANES = 8, ACCUMULATORS = 8;
INLINE vf load(const float* p) { return _mm256_loadu_ps(p); }
INLINE void store(float* p, vf x) { _mm256_storeu_ps(p, x); }
INLINE vf all(float x) { return _mm256_set1_ps(x); }
INLINE vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vf max(vf a, vf b) { return _mm256_max_ps(a, b); }
INLINE vf rounded(vf x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vf times_two_to(vf x, vf n) {
    __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return x * _mm256_castsi256_ps(bits);
}
INLINE vf where_less(vf a, vf b, vf then, vf otherwise) { return _mm256_blendv_ps(otherwise, then, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
INLINE vf magnitude(vf x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }

#else

constexpr int LANES = 4, ACCUMULATORS = 8;
typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
INLINE vf load(const float* p) { vf x; __builtin_memcpy(&x, p, sizeof x); return x; }
INLINE void store(float* p, vf x) { __builtin_memcpy(p, &x, sizeof x); }
INLINE vf all(float x) { return vf{x, x, x, x}; }
INLINE vf fma(vf a, vf b, vf c) { return a * b + c; }
INLINE vf max(vf a, vf b) { return (vf)(((vi)a & (a > b)) | ((vi)b & ~(a > b))); }
INLINE vf rounded(vf x) { return (x + 12582912.0f) - 12582912.0f; }  // 1.5 * 2^23: |x| < 2^22 loses its fraction
INLINE vf times_two_to(vf x, vf n) { return x * (vf)((__builtin_convertvector(n, vi) + 127) << 23); }
INLINE vf where_less(vf a, vf b, vf then, vf otherwise) { return (vf)(((vi)then & (a < b)) | ((vi)otherwise & ~(a < b))); }
INLINE vf magnitude(vf x) { return (vf)((vi)x & 0x7fffffff); }

#endif

#if !defined(PAGEDKV_AVX512)
INLINE float largest(vf x) {
    float best = x[0];
    for (int i = 1; i < LANES; i++) best = x[i] > best ? x[i] : best;
    return best;
}
INLINE float sum_of(vf x) {
    float sum = x[0];
    for (int i = 1; i < LANES; i++) sum += x[i];
    return sum;
}
#endif

// e^x = 2^n 2^f for lowest <= x <= 88; x counts as lowest where it is less. Taylor of 2^f, |f| <= 1/2: relative error 2e-7.
// max(a, x) is x if x is NaN, on every instruction set: NaN in, NaN out.
INLINE vf exponential_from(float lowest, vf x) {
    vf t = max(all(lowest), x), n = rounded(t * all(1.44269504f));
    vf f = fma(t, all(1.44269504f), all(0.0f) - n);
    vf p = fma(all(1.5403530e-4f), f, all(1.3333558e-3f));
    p = fma(p, f, all(9.6181291e-3f));
    p = fma(p, f, all(5.5504109e-2f));
    p = fma(p, f, all(2.4022651e-1f));
    p = fma(p, f, all(6.9314718e-1f));
    return times_two_to(fma(p, f, all(1.0f)), n);
}

#if defined(PAGEDKV_AVX512)

// e^x = 2^n 2^f, n = floor(x / ln 2), which vscalefps takes itself; 2^f by the polynomial of least relative error with p(0) = 1: 9e-8.
// e^-inf is 0, and NaN stays NaN, without a comparison: the fraction of -inf is 0.
INLINE vf exponential(vf x) {
    vf t = x * all(1.44269504f), f = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    vf p = fma(all(1.867131686e-3f), f, all(9.017026901e-3f));
    p = fma(p, f, all(5.579991555e-2f));
    p = fma(p, f, all(2.401644495e-1f));
    p = fma(p, f, all(6.931513119e-1f));
    return times_two_to(fma(p, f, all(1.0f)), t);
}

#else

// e^x for x <= 88; 0 below -87, where the result is subnormal.
INLINE vf exponential(vf x) { return where_less(x, all(-87.0f), all(0.0f), exponential_from(-87.0f, x)); }

#endif

// tanh x: its series near 0, where (1 - e) / (1 + e) would cancel.
INLINE vf hyperbolic_tangent(vf x) {
    vf a = magnitude(x), e = exponential(all(-2.0f) * a), square = x * x;
    vf far = (all(1.0f) - e) / (all(1.0f) + e);
    vf near = fma(fma(fma(all(-17.0f / 315), square, all(2.0f / 15)), square, all(-1.0f / 3)), square, all(1.0f)) * x;
    return where_less(a, all(0.15f), near, where_less(x, all(0.0f), all(0.0f) - far, far));
}

// out[i] = sum of the lanes of x[i]. The order of additions is the same for every i and N, so a sum's bits do not depend on its company.
template <int N>
INLINE void totals(const vf* x, float* out) {
#if defined(PAGEDKV_AVX512)
    vf zero = all(0.0f), pairs[8], fours[4];
    const auto at = [&](int i) __attribute__((always_inline)) { return i < N ? x[i] : zero; };
    unroll<8>(EACH(i) { pairs[i] = _mm512_unpacklo_ps(at(2 * i), at(2 * i + 1)) + _mm512_unpackhi_ps(at(2 * i), at(2 * i + 1)); });
    unroll<4>(EACH(i) {
        __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
        fours[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)) + _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    });
    vf low = _mm512_shuffle_f32x4(fours[0], fours[1], 0x88) + _mm512_shuffle_f32x4(fours[0], fours[1], 0xdd);
    vf high = _mm512_shuffle_f32x4(fours[2], fours[3], 0x88) + _mm512_shuffle_f32x4(fours[2], fours[3], 0xdd);
    store(out, _mm512_shuffle_f32x4(low, high, 0x88) + _mm512_shuffle_f32x4(low, high, 0xdd));
#elif defined(PAGEDKV_AVX2)
    vf zero = all(0.0f);
    const auto at = [&](int i) __attribute__((always_inline)) { return i < N ? x[i] : zero; };
    unroll<(N + 3) / 4>(EACH(i) {
        vf sums = _mm256_hadd_ps(_mm256_hadd_ps(at(4 * i), at(4 * i + 1)), _mm256_hadd_ps(at(4 * i + 2), at(4 * i + 3)));
        _mm_storeu_ps(out + 4 * i, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
    });
#else
    for (int i = 0; i < N; i++) out[i] = sum_of(x[i]);
#endif
}
