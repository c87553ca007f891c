// packed: many query rows of one kv head against a tile of keys, as two small matrix products. What Walk does for a prefill on AVX-512.
//
// Included by each AVX-512 source inside its own anonymous namespace. A cell is what one lane multiplies: a float, or two bfloat16.
//
//     keys      [cell of D][32 keys]: 16 x 16 cells are transposed once (64 shuffles) and serve every row
//     values    [cell of keys][32 columns]: two rows of bfloat16 interleaved, or rows of floats; columns in the order of modes.hpp
//     products  8 rows x 32 keys (or columns) in 16 accumulators: for every cell 2 loads, 8 broadcasts, 16 vdpbf16ps or FMA
//
// A panel of keys or values is 16 KB and stays in the first cache while all rows pass; q, o and scores of 256 rows are 128 KB each and lie in
// the second. Weights of 128 keys are multiplied with their values at once, so o passes through once for every 128 keys. Rows that see
// nothing of a panel are left out.
// Bytes: with 128 rows a head, packing takes a twentieth of the time, with 256 half of that. What is packed next is asked for during the
// products (`Soon`): packing took a seventh without that.
// Tuned: 2 cores, Zen 5, where FMA of one core peak at 242 GFLOP/s: the products reach 225, float32 prefills 210. docs/explanation/cpu-kernels.md.

template <class M>
struct Cells {
    static constexpr int64_t WIDE = 4 / sizeof(typename M::Element);  // elements in a cell
    static INLINE vf dot(const char* cell, vi b, vf sum) {
        int32_t x;
        __builtin_memcpy(&x, cell, 4);
        return M::dot((typename M::Vector)_mm512_set1_epi32(x), (typename M::Vector)b, sum);
    }
};

// 16 cells of each of 16 vectors become 16 vectors of a cell of each; vector i is put at to[2 * i].
template <class E>
INLINE void transpose(const E* const* at, int64_t offset, vi* to) {
    vi a[16], b[16];
    unroll<8>(EACH(i) {
        vi x = _mm512_loadu_si512(at[2 * i] + offset), y = _mm512_loadu_si512(at[2 * i + 1] + offset);
        a[2 * i] = _mm512_unpacklo_epi32(x, y), a[2 * i + 1] = _mm512_unpackhi_epi32(x, y);
    });
    unroll<4>(EACH(j) {
        b[4 * j] = _mm512_unpacklo_epi64(a[4 * j], a[4 * j + 2]), b[4 * j + 1] = _mm512_unpackhi_epi64(a[4 * j], a[4 * j + 2]);
        b[4 * j + 2] = _mm512_unpacklo_epi64(a[4 * j + 1], a[4 * j + 3]), b[4 * j + 3] = _mm512_unpackhi_epi64(a[4 * j + 1], a[4 * j + 3]);
    });
    unroll<4>(EACH(c) {
        vf columns[4];
        four_in_order((vf)b[c], (vf)b[4 + c], (vf)b[8 + c], (vf)b[12 + c], columns);
        unroll<4>(EACH(i) { to[2 * (4 * i + c)] = (vi)columns[i]; });
    });
}

// `to` becomes [cell][2 x 16 keys]; with 16 keys, the second half is left as it is.
template <class M>
void pack_keys(const typename M::Element* const* at, int64_t count, int64_t dim, vi* to) {
    for (int64_t half = 0; half < count / 16; half++)
        for (int64_t d = 0; d < dim; d += 16 * Cells<M>::WIDE) transpose(at + 16 * half, d, to + 2 * (d / Cells<M>::WIDE) + half);
}

// `to` becomes [cell][32 columns from d on].
template <class M>
void pack_values(const typename M::Element* const* at, int64_t cells, int64_t d, vi* to) {
    for (int64_t t = 0; t < cells; t++) {
        if constexpr (Cells<M>::WIDE == 1) {
            *to++ = _mm512_loadu_si512(at[t] + d), *to++ = _mm512_loadu_si512(at[t] + d + 16);
        } else {
            vi x = _mm512_loadu_si512(at[2 * t] + d), y = _mm512_loadu_si512(at[2 * t + 1] + d);
            *to++ = _mm512_unpacklo_epi16(x, y), *to++ = _mm512_unpackhi_epi16(x, y);
        }
    }
}

// Vectors that are read soon, asked for a few at a time while products run: the hardware fetches nothing by itself here.
struct Soon {
    const char* const* at;
    int64_t offset, count, bytes, next = 0;
    INLINE void ask(int64_t vectors) {
        int64_t end = next + vectors < count ? next + vectors : count;
        for (; next < end; next++)
            for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(at[next] + offset + byte);
    }
};

// Two columns of vectors times R rows: sums[2 * r + i] += a[r][cell] * b[cell][i], for `cells` cells.
template <class M, int R>
INLINE void product(const char* a, int64_t a_stride, const vi* b, int64_t b_stride, int64_t cells, vf* sums) {
    for (int64_t c = 0; c < cells; c++, a += 4, b += b_stride) {
        vi low = _mm512_loadu_si512(b), high = _mm512_loadu_si512(b + 1);
        unroll<R>(EACH(r) {
            const char* cell = a + r / 4 * (4 * a_stride) + r % 4 * a_stride;
            sums[2 * r] = Cells<M>::dot(cell, low, sums[2 * r]), sums[2 * r + 1] = Cells<M>::dot(cell, high, sums[2 * r + 1]);
        });
    }
}

// f(R, first row) for runs of 8, 4 and single rows.
template <class F>
INLINE void by_rows(int64_t rows, const F& f) {
    int64_t r = 0;
    for (; r + 8 <= rows; r += 8) f(Index<8>{}, r);
    for (; r + 4 <= rows; r += 4) f(Index<4>{}, r);
    for (; r < rows; r++) f(Index<1>{}, r);
}

// s[r][0 .. count) = q[r] . k for all rows; s has rows of TILE.
template <class M>
__attribute__((noinline)) void score_packed(const typename M::Element* q, int64_t rows, int64_t dim, const vi* keys, int64_t count,
                                            float* s, Soon* soon) {
    by_rows(rows, [&](auto R, int64_t r) __attribute__((always_inline)) {
        vf sums[2 * R.value] = {};
        int64_t row_bytes = dim * static_cast<int64_t>(sizeof(*q)), vectors = R.value * 32 / rows + 1;
        soon[0].ask(vectors), soon[1].ask(vectors);
        product<M, R.value>(reinterpret_cast<const char*>(q) + r * row_bytes, row_bytes, keys, 2, dim / Cells<M>::WIDE, sums);
        unroll<R.value>(EACH(i) { store(s + (r + i) * TILE, sums[2 * i]); });
        if (count > 16) unroll<R.value>(EACH(i) { store(s + (r + i) * TILE + 16, sums[2 * i + 1]); });
    });
}

// o[r] += p[r] . v for all rows, 32 columns and the first cells_for(r) cells, as many as for row r - 1 or more; o has rows of dim, p has rows
// of TILE floats, whatever it holds.
template <class M, class F>
__attribute__((noinline)) void weigh_packed(float* o, int64_t rows, int64_t dim, const vi* values, const F& cells_for, const float* p,
                                            Soon& soon) {
    by_rows(rows, [&](auto R, int64_t r) __attribute__((always_inline)) {
        vf sums[2 * R.value];
        int64_t cells = cells_for(r + R.value - 1);
        unroll<2 * R.value>(EACH(i) { sums[i] = load(o + (r + i / 2) * dim + i % 2 * 16); });
        soon.ask(1);
        product<M, R.value>(reinterpret_cast<const char*>(p + r * TILE), 4 * TILE, values, 2, cells, sums);
        unroll<2 * R.value>(EACH(i) { store(o + (r + i / 2) * dim + i % 2 * 16, sums[i]); });
    });
}
