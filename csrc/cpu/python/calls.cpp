// From Python objects to an Attention; known.hpp remembers those that were checked.
//
//     again(q, k, v, ..., backend, registry)   ->  its results, or None if the signature is not known
//     at_once(the same)                        ->  likewise, and None if something of torch's watches: pagedkv/kernels/known.py says what
//     remember(the same, isa, threads, None)   or, if other kernels serve it, (..., "", 0, a callable that takes the call's fields)
//
// Python's own way through the same checks takes 25 us when warm and 150 when cold.
//
// max_seqlen_k is no part of the signature (nothing depends on it) and grows with each step. Where seq_lens and the tables point is in none.
#include "calls.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "known.hpp"
#include "schedule.hpp"

namespace pagedkv {
namespace {

// The arguments, in the order of the operator (pagedkv/kernels/ops.py); `out` and `lse` may be absent from `again`.
enum { Q, K, V, K_SCALE, V_SCALE, TABLE, ROWS, SEQ_LENS, STARTS, MAX_Q, MAX_K, SCALE, CAUSAL, WINDOW, SOFTCAP, SINKS, SLOPES, TREE, SPLIT,
       OUT, LSE, BACKEND, REGISTRY, ISA, THREADS, SERVE };
constexpr int TENSORS[] = {Q, K, V, K_SCALE, V_SCALE, TABLE, ROWS, SEQ_LENS, STARTS, SINKS, SLOPES, TREE, OUT, LSE};
constexpr Py_ssize_t OF_AGAIN = REGISTRY + 1, OF_REMEMBER = SERVE + 1, OF_ATTENTION = LSE + 1 + 2;

constexpr int64_t FARTHEST = int64_t{1} << 32;  // no two places of a sequence are so far apart: lengths are int32; and sums of it fit

struct Call {
    Tensor at[LSE + 1];
    bool has[LSE + 1] = {};
    int64_t max_q, window, split;
    double scale, softcap;
    bool causal;
};

// False if an argument is not of the plain type that torch would hand over unchanged; an exception may be set.
bool take(PyObject* const* x, Call& c, bool any_class = false) {
    for (int i : TENSORS) {
        c.has[i] = x[i] != Py_None && !(i == LSE && x[i] == Py_True);
        if (c.has[i] && !read_tensor(x[i], c.at[i], any_class)) return false;
    }
    int64_t bound;
    if (!whole(x[MAX_Q], c.max_q) || !whole(x[MAX_K], bound)) return false;
    if (!optional(x[WINDOW], c.window) || !optional(x[SPLIT], c.split) || !number(x[SOFTCAP], c.softcap) || !PyBool_Check(x[CAUSAL])) return false;
    c.causal = x[CAUSAL] == Py_True;
    if (x[SCALE] != Py_None) return number(x[SCALE], c.scale);
    if (!c.has[Q] || c.at[Q].dims != 3) return false;
    c.scale = std::pow(static_cast<double>(std::max<int64_t>(1, c.at[Q].shape[2])), -0.5);
    return true;
}

int64_t value_dim(const Call& c) { return c.at[V].shape[3] * (c.at[V].code == 1 ? 2 : 1); }  // two int4 in a byte

// Is it a result as `fresh` makes one: [T, H, last] without gaps, of elements like q's (out) or float32 (lse)?
bool is_fresh(const Tensor& t, const Tensor& q, bool is_lse, int64_t last) {
    if (t.dims != (is_lse ? 2 : 3) || t.device_type != q.device_type || t.device_id != q.device_id) return false;
    if (is_lse ? t.code != 2 || t.bits != 32 : t.code != q.code || t.bits != q.bits) return false;
    if (t.shape[0] != q.shape[0] || t.shape[1] != q.shape[1] || (!is_lse && t.shape[2] != last)) return false;
    int64_t row = is_lse ? 1 : last;
    return (is_lse || t.strides[2] == 1) && t.strides[1] == row && t.strides[0] == row * q.shape[1];
}

bool sign(const Call& c, PyObject* backend, Signature& s) {
    if (!c.has[Q] || !c.has[V] || c.at[Q].dims != 3 || c.at[V].dims != 4) return false;
    for (int i : TENSORS) {
        bool result = i == OUT || i == LSE;
        if (!c.has[i] || (result && is_fresh(c.at[i], c.at[Q], i == LSE, value_dim(c)))) s.put(int64_t{-1});
        else s.put(c.at[i]);
    }
    s.put(c.max_q), s.put(c.window), s.put(c.split), s.put(int64_t{c.causal}), s.put(c.scale), s.put(c.softcap);
    return s.put_choice(backend);
}

View view(const Call& c, int i) { return c.has[i] ? view_of(c.at[i]) : View{}; }

Attention attention_of(const Call& c) {
    Attention a{};
    a.B = c.at[SEQ_LENS].shape[0], a.H = c.at[Q].shape[1], a.K = c.at[K].shape[2], a.D = c.at[Q].shape[2], a.Dv = value_dim(c);
    a.S = c.at[K].shape[1], a.q_type = dtype_of(c.at[Q]), a.kv_type = dtype_of(c.at[K]);
    a.causal = c.causal, a.split_tokens = std::min(c.split, FARTHEST);
    a.window = c.window < FARTHEST ? c.window : 0;
    a.scale = static_cast<float>(c.scale), a.softcap = static_cast<float>(c.softcap);
    a.q = view(c, Q), a.k = view(c, K), a.v = view(c, V), a.k_scale = view(c, K_SCALE), a.v_scale = view(c, V_SCALE);
    a.table = view(c, TABLE), a.rows = view(c, ROWS), a.sinks = view(c, SINKS), a.slopes = view(c, SLOPES), a.tree = view(c, TREE);
    a.out = view(c, OUT), a.lse = view(c, LSE);
    a.seq_lens = reinterpret_cast<const int32_t*>(c.at[SEQ_LENS].address());
    a.cu_seqlens_q = reinterpret_cast<const int32_t*>(c.at[STARTS].address());
    return a;
}

// The LSE of a caller who does not want it goes here.
View unwanted(const Attention& a, int64_t T) {
    thread_local std::vector<float> floats;
    if (floats.size() < static_cast<size_t>(T * a.H)) floats.resize(static_cast<size_t>(T * a.H));
    return {reinterpret_cast<char*>(floats.data()), {a.H * 4, 4, 0}};
}

bool run(const Isa& isa, const Call& c, int threads) {
    Attention a = attention_of(c);
    return released([&] {
        if (!c.has[LSE]) a.lse = unwanted(a, c.at[Q].shape[0]);
        run_attention(isa, a, threads);
    });
}

PyObject* results_of(PyObject* out, PyObject* lse) { return lse == Py_None ? Py_NewRef(out) : PyTuple_Pack(2, out, lse); }

// Hands a call's fields to Python: `out` and `lse` are made, and its scale is a number.
bool hand_over(PyObject* serve, PyObject* const* x, double scale, PyObject* out, PyObject* lse) {
    PyObject* fields[LSE + 1];
    std::copy(x, x + LSE + 1, fields);
    fields[OUT] = out, fields[LSE] = lse, fields[SCALE] = PyFloat_FromDouble(scale);
    PyObject* nothing = fields[SCALE] ? PyObject_Vectorcall(serve, fields, LSE + 1, nullptr) : nullptr;
    bool well = nothing != nullptr;
    Py_XDECREF(fields[SCALE]), Py_XDECREF(nothing);
    return well;
}

// Computes with the kernels of this extension.
bool compute(const Server& server, Call& c, PyObject* out, PyObject* lse) {
    bool ready = server.threads > 0;
    for (int i : {OUT, LSE}) {
        PyObject* result = i == OUT ? out : lse;
        if (ready && !c.has[i] && result != Py_None) ready = c.has[i] = read_tensor(result, c.at[i], false);
    }
    if (!ready && !PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "torch made no plain tensor for the results");
    return ready && run(*server.isa, c, server.threads);
}

bool unwatched(PyObject* const* x) {
    PyObject* const wanting[] = {x[Q], x[K], x[V], x[K_SCALE], x[V_SCALE], x[SINKS], x[SLOPES], x[OUT]};
    return nobody_watches(wanting, 8);
}

PyObject* again(PyObject*, PyObject* const* x, Py_ssize_t count) {
    Call c;
    Signature s(Op::attention);
    if (count != OF_AGAIN) return refused("again takes the arguments of the operator, and the registry");
    if (!take(x, c) || !sign(c, x[BACKEND], s)) return PyErr_Clear(), Py_NewRef(Py_None);
    Server server = server_of(s, x[REGISTRY]);
    if (!server.isa && !server.serve) Py_RETURN_NONE;
    int64_t T = c.at[Q].shape[0], H = c.at[Q].shape[1];
    PyObject* out = c.has[OUT] ? Py_NewRef(x[OUT]) : fresh(x[Q], Py_BuildValue("(LLL)", T, H, value_dim(c)), false);
    bool wanted = x[LSE] == Py_True || (server.serve && x[LSE] == Py_None);  // Python's kernels store it in any case
    PyObject* lse = wanted ? fresh(x[Q], Py_BuildValue("(LL)", T, H), true) : Py_NewRef(x[LSE]);
    bool well = out && lse && (server.serve ? hand_over(server.serve, x, c.scale, out, lse) : compute(server, c, out, lse));
    PyObject* results = well ? results_of(out, x[LSE] == Py_None ? x[LSE] : lse) : nullptr;
    Py_XDECREF(out), Py_XDECREF(lse), Py_XDECREF(server.serve);
    return results;
}

PyObject* at_once(PyObject* self, PyObject* const* x, Py_ssize_t count) {
    if (count != OF_AGAIN) return refused("at_once takes the arguments of the operator, and the registry");
    for (int i : TENSORS) __builtin_prefetch(x[i]);
    return unwatched(x) ? again(self, x, count) : Py_NewRef(Py_None);
}

PyObject* remember(PyObject*, PyObject* const* x, Py_ssize_t count) {
    Call c;
    Signature s(Op::attention);
    int64_t threads;
    if (count != OF_REMEMBER || !whole(x[THREADS], threads)) return refused("remember takes what again does, a name, a number and a server");
    PyObject* serve = x[SERVE] == Py_None ? nullptr : x[SERVE];
    const Isa* isa = serve ? nullptr : isa_of(x[ISA]);
    if (!isa && !serve) return nullptr;
    if (!take(x, c) || !sign(c, x[BACKEND], s)) return PyErr_Clear(), Py_NewRef(Py_None);
    keep(s, x[REGISTRY], {isa, static_cast<int>(threads), serve});
    Py_RETURN_NONE;
}

// attention(the fields of an AttentionCall, isa, threads): whatever it is, it was checked.
PyObject* attention(PyObject*, PyObject* const* x, Py_ssize_t count) {
    Call c;
    int64_t threads;
    if (count != OF_ATTENTION || !whole(x[LSE + 2], threads)) return refused("attention takes a call's fields, a name and a number");
    const Isa* isa = isa_of(x[LSE + 1]);
    if (!isa) return nullptr;
    if (!take(x, c, true) || !c.has[OUT] || !c.has[LSE]) {
        return PyErr_Occurred() ? nullptr : refused("these are not the checked fields of an AttentionCall");
    }
    return run(*isa, c, static_cast<int>(threads)) ? Py_NewRef(Py_None) : nullptr;
}

}  // namespace

PyMethodDef call_methods[] = {
    {"meet", fast(meet), METH_FASTCALL, "What tensors are, whom to ask for them and for the number of threads, and who watches."},
    {"attention", fast(attention), METH_FASTCALL, "A checked call."},
    {"again", fast(again), METH_FASTCALL, "The results of a call whose signature is remembered, or None."},
    {"at_once", fast(at_once), METH_FASTCALL, "As again, unless one of those who watch says so."},
    {"remember", fast(remember), METH_FASTCALL, "A signature that was checked, and what serves it."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace pagedkv
