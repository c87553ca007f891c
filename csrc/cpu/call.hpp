// A call of the CPU backend as plain data: the call, a unit of its work, the functions of one instruction set.
// Kernels rely on the checks of pagedkv/kernels/checks.py; python/binding.hpp reads its table.
//
// Every instruction set's source includes this header, so it holds no function with a body that could be shared: if the
// linker handed a copy compiled for AVX-512 to the portable code, an old machine would meet an illegal instruction.
#pragma once

#include <cstdint>

namespace pagedkv {

// Elements, as NUMBERS of pagedkv/spec.py: i5 are keys and c4 values, packed; i4 are weights of linear operations.
enum class Dtype : int { f32, bf16, f16, e4m3, e5m2, i8, i5, c4, i4 };

// A strided view. Strides are in bytes, so that packed elements need no exception. Letters as in
// pagedkv/kernels/args.py.
struct View {
    char* data = nullptr;
    int64_t stride[3] = {0, 0, 0};
};

struct Attention {
    Dtype q_type, k_type, v_type;
    bool rotated;  // K and V are stored rotated (rotation.inc)
    int64_t B, H, K, D, Dv, S;
    View q, k, v, out;  // q [T, H, D], k and v [F, S, K, *], out [T, H, Dv]
    View k_scale, v_scale;  // float16 [F, S, K]; data is null for none; one scale for all is in `scale` or `v_factor`
    View calibration;  // float32 [K, 2, D]: centre and divisor of the channels of K; or null
    View table, rows, lse, tree;  // int32 [A, P], int32 [B] or null, float32 [T, H], bool [T, *] or null
    View causal_of;  // bool [>= B], or null: `causal` holds for all sequences
    View sinks, slopes;  // float32 [H] or null
    const int32_t *seq_lens, *cu_seqlens_q;
    float scale, v_factor, softcap;  // v_factor multiplies the results
    bool causal;
    int64_t window, split_tokens;  // 0 for none
    int64_t right;  // positions after its own that a query may see if its sequence is not causal; FARTHEST for all
};

// Larger than any distance of two positions; equal to FARTHEST in pagedkv/kernels/layout.py.
constexpr int64_t FARTHEST = int64_t{1} << 30;

// Queries [i0, i1) and kv heads [k0, k1) of sequence b, over the keys of chunks [c0, c1). A chunk is `chunk` keys;
// chunk c begins at key c * chunk. A unit whose rows have keys in other units leaves its state in `partial`; null if it
// has all keys. A query at position p sees no key after p + right; a tree mask may hide more.
struct Unit {
    int64_t b, i0, i1, k0, k1, c0, c1, chunk, right;
    float* partial;  // one state per chunk
    int64_t group;  // units of one group hold the same rows; the unit that finishes last merges their states
};

// Sizes of one thread's scratch memory: of a state of online softmax, of decoded and of packed vectors, in floats, and
// of all together, in bytes. Rows are [kv head][query][head of group].
//
//     state    o [rows, Dv padded], m [rows], l [rows]        o = sum of exp(s - m) v, l = sum of exp(s - m)
struct Scratch {
    int64_t rows, Dp, Dvp, state_floats, decoded, packed, bytes;
};

constexpr int64_t TILE = 128;  // keys whose scores exist at a time
constexpr int64_t AT_ONCE = 32;  // keys decoded at a time
constexpr int64_t PADDING = 32;  // head dims are padded to a multiple of it inside a unit
constexpr int64_t MAX_LANES = 16;

struct Write {
    Dtype new_type, kv_type;
    bool rotated;
    int64_t K, D, S;
    View fresh, pool, scale;  // fresh [T, K, D], pool [F, S, K, D], scale as in Attention; or one float32 for all
    View calibration;  // as in Attention, for keys
    bool scale_per_token_head;
    const char* slots;  // int64 [T]
    int64_t slots_stride;
    View cos, sin,
        positions;  // float32 [*, half] and int64 [T], if RoPE rotates the vectors
    int64_t half;  // pairs that RoPE rotates: (i, half + i), or (2i, 2i + 1) if interleaved; 0 for none
    bool interleaved;
};

struct Gather {
    Dtype kv_type, out_type;
    bool rotated, scale_per_token_head;
    int64_t B, K, D, S;
    int64_t L;  // rows of each sequence, if results are padded
    View pool, scale, calibration;  // as in Write
    View out;  // [B, L, K, D]; packed, [N, K, D]: a sequence has stride 0
    View table, rows;  // as in Attention
    const int32_t *seq_lens, *first;
    const int64_t* starts;  // [B + 1]: the first row of each sequence, if results are packed; null if padded
    bool streams;  // stores bypass the caches: each vector of `out` is whole lines of 64 bytes
};

struct States {
    Dtype type;  // of out
    int64_t T, H, Dv;
    View out_a, lse_a, out_b, lse_b;  // out [T, H, Dv], lse float32 [T, H]
    char *out, *lse;  // of the same shapes, contiguous
};

// One linear operation of a decoder's step over a few tokens (pagedkv/kernels/linear/reference.py has the formulas):
//
//     y = norm(x) W^T + bias      x [T, K], W [N, K]; with a gate W [2N, K]: the rows of the gate, then those of `up`
//
//     STORE   out = y              ADD   out += y              SILU, GELU   out = act(y of the gate) * (y of `up`)
struct Linear {
    enum Mode { STORE, ADD, SILU, GELU };
    Mode mode;
    Dtype type, norm_type, out_type;  // of x and bias; of the norm's weight; of out: `type`, or float32
    Dtype weight_type;  // `type`, or i8 or i4: integers, whose scales are float32 [N, K / 64]
    int64_t T, N, K;
    View x, weights, scales, out;
    const char *norm, *bias;  // null for none
    float eps;
};

// residual [T, N] += norm(y) [T, N]
struct AddNormed {
    Dtype type, norm_type;
    int64_t T, N;
    View y, residual;
    const char* norm;
    float eps;
};

// Heads of q and k of qkv [T, (H + 2K) D], in place: norm, then rotation by cos and sin [T, D / 2] of the same dtype.
struct NormRotate {
    Dtype type, norm_type;
    int64_t T, H, K, D;
    View qkv, cos, sin;
    const char *q_norm, *k_norm;  // null for none
    float eps;
};

constexpr int64_t GROUP = 64;  // columns that share a scale; as in pagedkv/kernels/linear/matrix.py
constexpr int64_t WHOLE = 64;  // elements of x are padded with zeros to a multiple of it
constexpr int64_t LINEAR_ROWS = 24;  // no walk makes the products of more rows of W at a time
constexpr int64_t ROW_ROOM = 32;  // these products have room for ROW_ROOM (T + 1) floats, so for whole vectors

struct LinearIsa {
    void (*take)(const Linear&, int64_t first, int64_t end, char* scratch, char* spare);  // norm tokens of x
    void (*rows)(const Linear&, int64_t first, int64_t end, char* scratch);  // columns of the result
    void (*add_normed)(const AddNormed&, char* scratch);
    void (*norm_rotate)(const NormRotate&, int64_t first, int64_t end, char* scratch);  // rows (token, head of q or k)
};

// The states of a step, as core/handles.py has them: sequence b reads frame in[b] and writes frame out[b]. The state
// after offsets[i] of its tokens is written to frames[i], for i from saves[b] on. in -1: zeros. out -1: it is not kept.
struct StateFrames {
    int64_t B, stride;  // in bytes, from frame to frame
    char* data;
    const int32_t *in, *out, *starts, *saves, *offsets, *frames;  // the tokens of sequence b begin at starts[b]
};

// The gated delta rule (recurrent/delta.inc). A frame has V / BLOCK blocks [K][BLOCK] of each head.
struct DeltaRule {
    Dtype type;  // of q, k, v and out
    int64_t H, Hk, K, V;
    StateFrames frames;
    View q, k, v, out, decay, beta;  // q, k [T, Hk, K], v, out [T, H, V], float32 [T, H]
    bool streams;  // frames are written past the caches; they are aligned
};

struct CausalConv {
    Dtype type;  // of x, weight, the states and out
    int64_t C, W;
    StateFrames frames;  // [W - 1, C]
    View x, out;  // [T, C]
    const char* weight;  // [C, W]
    bool silu;
};

constexpr int64_t BLOCK = 16;  // as in pagedkv/kernels/recurrent/reference.py
constexpr int64_t CHUNK = 16;  // tokens of the delta rule at a time, at most
constexpr int64_t CONV_CHANNELS = 256;  // that are convolved at a time
constexpr int64_t MOST_WIDTH = 16;  // of a convolution

struct RecurrentIsa {
    void (*delta)(const DeltaRule&, int64_t first, int64_t end, float* scratch);  // items (sequence, head)
    void (*conv)(const CausalConv&, int64_t first, int64_t end);  // runs of CONV_CHANNELS channels
};

struct Isa {
    const char* name;
    bool (*supported)();
    void (*attend)(const Attention&, const Unit&, const Scratch&, char* memory);
    void (*merge)(const Attention&, const Unit&, int64_t k0, int64_t parts, const Scratch&,
        char* memory);  // the unit's heads of consecutive partials, which hold the heads from k0 on
    void (*write)(const Write&, int64_t first, int64_t end);
    void (*gather)(const Gather&, int64_t first, int64_t end);  // rows
    void (*merge_states)(const States&, int64_t first, int64_t end);  // rows (token, head)
    uint64_t (*read)(const char* base, const int64_t* offsets, int64_t count, int64_t bytes);  // a benchmark's ceiling
    const LinearIsa& linear;
    const RecurrentIsa& recurrent;
};

extern const Isa portable_isa, avx2_isa, avx2_vnni_isa, avx512_isa, avx512_bf16_isa, neon_isa, neon_bf16_isa;

}  // namespace pagedkv
