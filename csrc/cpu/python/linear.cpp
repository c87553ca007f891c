// From Python objects to the operations of linear.inc.
//
//     linear(mode, x, norm, weights, scales, bias, out, eps, isa, threads)
//     add_normed(residual, y, norm, eps, isa)
//     norm_rotate(qkv, q_norm, k_norm, cos, sin, num_heads, num_kv_heads, eps, isa, threads)
//
// Each returns True, or None if it does not serve the call: then the definition in torch does, or says what is wrong.
#include <algorithm>

#include "binding.hpp"
#include "schedule.hpp"

namespace pagedkv {
namespace {

enum { MODE, X, NORM, WEIGHTS, SCALES, BIAS, OUT, EPS, ISA, THREADS, NUM_LINEAR };
enum { RESIDUAL, ADDED, ADD_NORM, ADD_EPS, ADD_ISA, NUM_ADD };
enum { QKV, Q_NORM, K_NORM, COS, SIN, HEADS, KV_HEADS, ROTATE_EPS, ROTATE_ISA, ROTATE_THREADS, NUM_ROTATE };

constexpr int64_t MOST_NUMBERS = int64_t{1} << 40;  // of a matrix: sizes of scratch memory stay far from 2^63

bool read_float(PyObject* x, float& to) {
    if (PyFloat_CheckExact(x)) return to = static_cast<float>(PyFloat_AS_DOUBLE(x)), true;
    return false;
}

// A matrix of floats on the CPU whose rows are runs.
bool is_matrix(const Tensor& t, int64_t rows, int64_t columns) {
    return t.is_given && t.device_type == CPU_DEVICE && t.dims == 2 && is_float(t) && has_unit_stride(t) &&
        t.shape[0] == rows && t.shape[1] == columns;
}

// A matrix that a call writes to: no two of its elements share memory.
bool is_destination(const Tensor& t, int64_t rows, int64_t columns) {
    return is_matrix(t, rows, columns) && has_own_elements(t);
}

// Whether the memory of two matrices may overlap. A thread may write results while another still reads its input.
bool may_overlap(const Tensor& a, const Tensor& b) {
    const auto end = [](const Tensor& t) {
        int64_t last = (t.shape[0] - 1) * t.strides[0] + (t.shape[1] - 1) * t.strides[1];
        return t.data + (last + 1) * t.bits / 8;
    };
    bool is_some = a.shape[0] && a.shape[1] && b.shape[0] && b.shape[1];
    return is_some && a.data < end(b) && b.data < end(a);
}

bool is_vector(const Tensor& t, int64_t length) {
    return t.device_type == CPU_DEVICE && t.dims == 1 && is_float(t) && has_unit_stride(t) && t.shape[0] == length;
}

// A norm's weight is of the dtype of x, or float32.
bool is_norm(const Tensor& t, int64_t length, const Tensor& x) {
    return !t.is_given || (is_vector(t, length) && (same_type(t, x) || t.bits == 32));
}

// Weights are a matrix of the dtype of x; or integers, int8 or two int4 in a byte, and their scales.
bool is_weight(const Tensor& t, const Tensor& scales, int64_t rows, int64_t columns, const Tensor& x) {
    if (!scales.is_given) return is_matrix(t, rows, columns) && same_type(t, x);
    if (!t.is_given || t.device_type != CPU_DEVICE || t.dims != 2 || t.bits != 8 || t.code > 1) return false;
    int64_t bytes = t.code == 0 ? columns : columns / 2;
    return columns % GROUP == 0 && t.shape[0] == rows && t.shape[1] == bytes && has_unit_stride(t) &&
        is_matrix(scales, rows, columns / GROUP) && scales.code == 2 && scales.bits == 32;
}

py::object linear(PyObject* const* given) {
    Tensor x, norm, weights, scales, bias, out;
    int64_t mode, threads;
    Linear l{};
    for (const auto& [at, to] : {std::pair{X, &x}, {NORM, &norm}, {WEIGHTS, &weights}, {SCALES, &scales},
             {BIAS, &bias}, {OUT, &out}})
        if (!read_tensor(given[at], *to, false)) return py::none();
    if (!read_integer(given[MODE], mode) || !read_threads(given[THREADS], threads)) return py::none();
    if (!read_float(given[EPS], l.eps) || mode < Linear::STORE || mode > Linear::GELU) return py::none();
    l.mode = static_cast<Linear::Mode>(mode);
    l.T = x.shape[0], l.K = x.shape[1], l.N = out.shape[1];
    int64_t rows = l.mode >= Linear::SILU ? 2 * l.N : l.N;
    if (!is_matrix(x, l.T, l.K) || !is_destination(out, l.T, l.N) || !l.K) return py::none();
    if (!is_weight(weights, scales, rows, l.K, x) || !is_norm(norm, l.K, x)) return py::none();
    if (l.T > MOST_NUMBERS / std::max(l.K, l.N) || may_overlap(out, x) || may_overlap(out, weights)) return py::none();
    if (!same_type(x, out) && (out.bits != 32 || l.mode != Linear::STORE)) return py::none();
    if (bias.is_given && (!is_vector(bias, rows) || !same_type(bias, x))) return py::none();
    l.type = dtype_of(x), l.out_type = dtype_of(out), l.norm_type = norm.is_given ? dtype_of(norm) : l.type;
    l.weight_type = dtype_of(weights), l.scales = view_of(scales);
    l.x = view_of(x), l.weights = view_of(weights), l.out = view_of(out), l.norm = norm.data, l.bias = bias.data;
    const Isa& isa = isa_at(given[ISA]);
    return done([&] {
        if (l.T && l.N) run_linear(isa, l, static_cast<int>(threads));
    });
}

py::object add_normed(PyObject* const* given) {
    Tensor residual, y, norm;
    AddNormed a{};
    for (const auto& [at, to] : {std::pair{RESIDUAL, &residual}, {ADDED, &y}, {ADD_NORM, &norm}})
        if (!read_tensor(given[at], *to, false)) return py::none();
    a.T = y.shape[0], a.N = y.shape[1];
    if (!is_matrix(y, a.T, a.N) || !is_destination(residual, a.T, a.N) || !same_type(y, residual)) return py::none();
    if (!norm.is_given || !is_norm(norm, a.N, y) || !read_float(given[ADD_EPS], a.eps)) return py::none();
    a.type = dtype_of(y), a.norm_type = dtype_of(norm), a.y = view_of(y), a.residual = view_of(residual);
    a.norm = norm.data;
    const Isa& isa = isa_at(given[ADD_ISA]);
    return done([&] { run_add_normed(isa, a); });
}

py::object norm_rotate(PyObject* const* given) {
    Tensor qkv, q_norm, k_norm, cos, sin;
    int64_t threads;
    NormRotate h{};
    for (const auto& [at, to] :
        {std::pair{QKV, &qkv}, {Q_NORM, &q_norm}, {K_NORM, &k_norm}, {COS, &cos}, {SIN, &sin}})
        if (!read_tensor(given[at], *to, false)) return py::none();
    if (!read_integer(given[HEADS], h.H) || !read_integer(given[KV_HEADS], h.K)) return py::none();
    if (!read_threads(given[ROTATE_THREADS], threads) || !read_float(given[ROTATE_EPS], h.eps)) return py::none();
    h.T = qkv.shape[0], h.D = 2 * cos.shape[1];
    int64_t most = h.D ? qkv.shape[1] / h.D : 0;  // heads
    if (h.H < 1 || h.K < 1 || h.H > most || h.K > most || h.T > MOST_NUMBERS / most) return py::none();
    if (!is_destination(qkv, h.T, (h.H + 2 * h.K) * h.D)) return py::none();
    for (const Tensor* table : {&cos, &sin})
        if (!is_matrix(*table, h.T, h.D / 2) || !same_type(*table, qkv)) return py::none();
    if (!is_norm(q_norm, h.D, qkv) || !is_norm(k_norm, h.D, qkv)) return py::none();
    if (q_norm.is_given && k_norm.is_given && !same_type(q_norm, k_norm)) return py::none();
    h.type = dtype_of(qkv), h.norm_type = q_norm.is_given ? dtype_of(q_norm) : h.type;
    if (!q_norm.is_given && k_norm.is_given) h.norm_type = dtype_of(k_norm);
    h.qkv = view_of(qkv), h.cos = view_of(cos), h.sin = view_of(sin), h.q_norm = q_norm.data, h.k_norm = k_norm.data;
    const Isa& isa = isa_at(given[ROTATE_ISA]);
    return done([&] {
        if (h.T) run_norm_rotate(isa, h, static_cast<int>(threads));
    });
}

}  // namespace

void define_linear(py::module_& m) {
    define_fast<linear, NUM_LINEAR>(m, "linear", "Compute norm(x) W^T: True, or None if it does not serve the call.");
    define_fast<add_normed, NUM_ADD>(m, "add_normed", "Add norm(y) to a residual: True, or None.");
    define_fast<norm_rotate, NUM_ROTATE>(m, "norm_rotate", "Norm and rotate the heads of q and k: True, or None.");
}

}  // namespace pagedkv
