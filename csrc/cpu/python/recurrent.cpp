// From Python objects to the recurrent layers of recurrent/.
//
//     delta_rule(states, state_in, state_out, save_indptr, save_offsets, save_frames, indptr,
//                q, k, v, decay, beta, out, isa, threads)
//     causal_conv(states, ..., indptr, x, weight, activation, out, isa, threads)
//
// Each returns True, or None if it does not serve the call: then the definition in torch does, or says what is wrong.
// A frame that a step names is checked here: it is in the pool.
#include <algorithm>
#include <cstring>

#include "binding.hpp"
#include "schedule.hpp"

namespace pagedkv {
namespace {

enum { STATES, IN, OUT_FRAMES, SAVES, OFFSETS, SAVE_FRAMES, STARTS, NUM_STEP };
enum { Q = NUM_STEP, K, V, DECAY, BETA, DELTA_OUT, DELTA_ISA, DELTA_THREADS, NUM_DELTA };
enum { X = NUM_STEP, WEIGHT, ACTIVATION, CONV_OUT, CONV_ISA, CONV_THREADS, NUM_CONV };

constexpr int64_t MOST = int64_t{1} << 31;  // of a size: products of two stay far from 2^63
constexpr int64_t MOST_DIM = 4096;  // of K and V: scratch memory has 4 K V bytes a thread
constexpr int64_t PAST_CACHES = 256 << 10;  // bytes of states: a call that writes fewer leaves them in the caches

bool is_float32(const Tensor& t) { return t.code == 2 && t.bits == 32; }

// A tensor of floats on the CPU with this shape, whose last dim is a run.
bool has_shape(const Tensor& t, std::initializer_list<int64_t> shape) {
    return t.is_given && t.device_type == CPU_DEVICE && t.dims == static_cast<int>(shape.size()) && is_float(t) &&
        std::equal(shape.begin(), shape.end(), t.shape) && has_unit_stride(t) && std::max(shape) < MOST;
}

// Whether all dims from `first` on are one run.
bool is_run(const Tensor& t, int first) {
    int64_t size = 1;
    for (int i = t.dims - 1; i >= first; size *= t.shape[i--])
        if (t.shape[i] > 1 && t.strides[i] != size) return false;
    return true;
}

// The memory of a tensor with strides that are not negative: [data, end).
const char* end_of(const Tensor& t) {
    int64_t last = 0;
    for (int i = 0; i < t.dims; i++) last += (t.shape[i] - 1) * t.strides[i];
    return t.data + (last + 1) * t.bits / 8;
}

bool overlaps(const Tensor& a, const Tensor& b) { return a.data < end_of(b) && b.data < end_of(a); }

// int32 [length], or of any length if it is -1.
bool read_ints(PyObject* x, Tensor& t, int64_t length) {
    return read_tensor(x, t, false) && t.is_given && t.device_type == CPU_DEVICE && t.dims == 1 && t.code == 0 &&
        t.bits == 32 && has_unit_stride(t) && (length < 0 || t.shape[0] == length);
}

// Reads the step over `tokens` tokens, and checks each number in it. False if it breaks a rule of StateStep.
bool read_step(PyObject* const* given, const Tensor& states, int64_t tokens, StateFrames& f) {
    Tensor in, out, saves, offsets, frames, starts;
    if (!read_ints(given[IN], in, -1) || !read_ints(given[OUT_FRAMES], out, in.shape[0])) return false;
    f.B = in.shape[0];
    if (!read_ints(given[SAVES], saves, f.B + 1) || !read_ints(given[STARTS], starts, f.B + 1)) return false;
    if (!read_ints(given[OFFSETS], offsets, -1)) return false;
    if (!read_ints(given[SAVE_FRAMES], frames, offsets.shape[0])) return false;
    const auto numbers = [](const Tensor& t) { return reinterpret_cast<const int32_t*>(t.data); };
    f.in = numbers(in), f.out = numbers(out), f.starts = numbers(starts), f.saves = numbers(saves);
    f.offsets = numbers(offsets), f.frames = numbers(frames);
    f.data = states.data, f.stride = states.strides[0] * states.bits / 8;
    if (f.starts[0] || f.starts[f.B] != tokens || f.saves[0] || f.saves[f.B] > offsets.shape[0]) return false;
    const auto is_frame = [&](int32_t frame, int32_t least) { return frame >= least && frame < states.shape[0]; };
    for (int64_t b = 0; b < f.B; b++) {
        if (!is_frame(f.in[b], -1) || !is_frame(f.out[b], -1)) return false;
        if (f.starts[b] > f.starts[b + 1] || f.saves[b] > f.saves[b + 1]) return false;
        int32_t done = 0, count = f.starts[b + 1] - f.starts[b];
        for (int64_t i = f.saves[b]; i < f.saves[b + 1]; done = f.offsets[i++])
            if (i >= offsets.shape[0] || !is_frame(f.frames[i], 0) || f.offsets[i] <= done || f.offsets[i] > count)
                return false;
    }
    return true;
}

py::object delta_rule(PyObject* const* given) {
    Tensor states, q, k, v, decay, beta, out;
    int64_t threads;
    DeltaRule d{};
    for (const auto& [at, to] : {std::pair{+STATES, &states}, {Q, &q}, {K, &k}, {V, &v}, {DECAY, &decay}, {BETA, &beta},
             {DELTA_OUT, &out}})
        if (!read_tensor(given[at], *to, false)) return py::none();
    if (!read_threads(given[DELTA_THREADS], threads) || v.dims != 3 || k.dims != 3) return py::none();
    int64_t T = v.shape[0];
    d.H = v.shape[1], d.V = v.shape[2], d.Hk = k.shape[1], d.K = k.shape[2];
    if (!d.H || !d.Hk || d.H % d.Hk || !d.K || d.K % 16 || !d.V || d.V % BLOCK || std::max(d.K, d.V) > MOST_DIM)
        return py::none();
    if (!has_shape(states, {states.shape[0], d.H * d.V / BLOCK, d.K, BLOCK}) || !is_run(states, 1)) return py::none();
    for (const Tensor* x : {&q, &k})
        if (!has_shape(*x, {T, d.Hk, d.K}) || !same_type(*x, v)) return py::none();
    if (!has_shape(v, {T, d.H, d.V})) return py::none();
    if (!has_shape(out, {T, d.H, d.V}) || !has_own_elements(out) || !has_own_elements(states)) return py::none();
    if (decay.dims != 2 || beta.dims != 2 || decay.shape[0] != T || beta.shape[0] != T) return py::none();
    for (const Tensor* x : {&decay, &beta})
        if (x->shape[1] != d.H || x->device_type != CPU_DEVICE || !is_float32(*x)) return py::none();
    if (!is_float32(states) || !same_type(out, v)) return py::none();
    for (const Tensor* x : {&q, &k, &v, &decay, &beta, &states})
        if (T && overlaps(out, *x)) return py::none();
    if (!read_step(given, states, T, d.frames)) return py::none();
    d.type = dtype_of(v), d.q = view_of(q), d.k = view_of(k), d.v = view_of(v), d.out = view_of(out);
    d.decay = view_of(decay), d.beta = view_of(beta);
    bool is_aligned = reinterpret_cast<uintptr_t>(states.data) % 64 == 0 && d.frames.stride % 64 == 0;
    d.streams = is_aligned && 4 * d.frames.B * d.H * d.K * d.V >= PAST_CACHES;
    const Isa& isa = isa_at(given[DELTA_ISA]);
    return done([&] {
        if (d.frames.B) run_delta(isa, d, T, static_cast<int>(threads));
    });
}

py::object causal_conv(PyObject* const* given) {
    Tensor states, x, weight, out;
    int64_t threads;
    CausalConv c{};
    for (const auto& [at, to] : {std::pair{+STATES, &states}, {X, &x}, {WEIGHT, &weight}, {CONV_OUT, &out}})
        if (!read_tensor(given[at], *to, false)) return py::none();
    if (!read_threads(given[CONV_THREADS], threads) || x.dims != 2 || weight.dims != 2) return py::none();
    int64_t T = x.shape[0];
    c.C = x.shape[1], c.W = weight.shape[1];
    const char* activation = PyUnicode_AsUTF8(given[ACTIVATION]);
    if (!activation) throw py::error_already_set();
    c.silu = !std::strcmp(activation, "silu");
    if (!c.silu && *activation) return py::none();
    if (!c.C || c.W < 2 || c.W > MOST_WIDTH || !has_shape(x, {T, c.C})) return py::none();
    if (!has_shape(weight, {c.C, c.W}) || !is_run(weight, 0) || !has_shape(out, {T, c.C})) return py::none();
    if (!has_shape(states, {states.shape[0], c.W - 1, c.C}) || !is_run(states, 1)) return py::none();
    if (!has_own_elements(out) || !has_own_elements(states)) return py::none();
    for (const Tensor* t : {&weight, &out, &states})
        if (!same_type(*t, x) || (t != &out && T && overlaps(out, *t))) return py::none();
    if ((T && overlaps(out, x)) || !read_step(given, states, T, c.frames)) return py::none();
    c.type = dtype_of(x), c.x = view_of(x), c.out = view_of(out), c.weight = weight.data;
    const Isa& isa = isa_at(given[CONV_ISA]);
    return done([&] {
        if (c.frames.B) run_conv(isa, c, T, static_cast<int>(threads));
    });
}

}  // namespace

void define_recurrent(py::module_& m) {
    define_fast<delta_rule, NUM_DELTA>(m, "delta_rule", "Compute the gated delta rule: True, or None.");
    define_fast<causal_conv, NUM_CONV>(m, "causal_conv", "Convolve after the inputs that a state has: True, or None.");
}

}  // namespace pagedkv
