// From Python objects to an Attention; and the memory of calls that were checked.
//
// Whether a call keeps the contract and which kernel serves it depend on its **signature** alone, as long as PAGEDKV_DEBUG does not ask for
// values to be looked at: dtype, device, shape and strides of each tensor, options, backend, the registry and the PAGEDKV_* variables. So
// Python checks the first call of a signature and has it remembered; `again` computes all that follow. What differs in anything is not
// known and goes Python's way. Signatures are compared whole: a hash only says where to look.
//
//     again(q, k, v, ..., backend, registry)   ->  its results, or None if the signature is not known
//     at_once(the same)                        ->  likewise, and None if something of torch's watches: pagedkv/kernels/known.py says what
//     remember(the same, isa, threads)             one signature to a place: the later forgets the earlier
//
// All this is written for caches that are cold, as they are after each kernel: what counts is how many lines of memory a call touches. Python's
// own way through the same checks takes 25 us when warm and 150 when cold.
//
// max_seqlen_k is no part of it (nothing depends on it) and grows with each step. Where seq_lens and the tables point is in no signature.
#include "calls.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "isas.hpp"
#include "schedule.hpp"
#include "tensors.hpp"

#if defined(__APPLE__)
#include <crt_externs.h>
#define environ (*_NSGetEnviron())
#else
extern char** environ;
#endif

namespace pagedkv {
namespace {

// The arguments, in the order of the operator (pagedkv/kernels/ops.py); `out` and `lse` may be absent from `again`.
enum { Q, K, V, K_SCALE, V_SCALE, TABLE, ROWS, SEQ_LENS, STARTS, MAX_Q, MAX_K, SCALE, CAUSAL, WINDOW, SOFTCAP, SINKS, SLOPES, TREE, SPLIT,
       OUT, LSE, BACKEND, REGISTRY, ISA, THREADS };
constexpr int TENSORS[] = {Q, K, V, K_SCALE, V_SCALE, TABLE, ROWS, SEQ_LENS, STARTS, SINKS, SLOPES, TREE, OUT, LSE};
constexpr Py_ssize_t OF_AGAIN = REGISTRY + 1, OF_REMEMBER = THREADS + 1, OF_ATTENTION = LSE + 1 + 2;
constexpr uint64_t PLACES = 256;

struct Call {
    Tensor at[LSE + 1];
    bool has[LSE + 1] = {};
    int64_t max_q, window, split;
    double scale, softcap;
    bool causal;
};

struct Signature {
    static constexpr int ROOM = 192;  // 14 tensors of 1 + 2 * MOST_DIMS words, and what follows them
    int64_t words[ROOM];
    int count = 0;
    char variables[512];
    size_t length = 0;
    void put(int64_t x) { words[count++] = x; }
    void put(double x) { std::memcpy(words + count++, &x, sizeof x); }
    void put(const Tensor& t) {
        put(int64_t{t.code} | int64_t{t.bits} << 8 | int64_t{t.dims} << 16 | int64_t{t.device_type} << 24 | int64_t{t.device_id} << 40);
        for (int i = 0; i < t.dims; i++) put(t.shape[i]), put(t.strides[i]);
    }
    uint64_t hash() const {
        uint64_t h = 0;
        for (int i = 0; i < count; i++) h = (h ^ static_cast<uint64_t>(words[i])) * 0x9e3779b97f4a7c15u, h ^= h >> 29;
        return h;
    }
};

struct Known {
    std::vector<int64_t> words;
    std::string variables;
    PyObject* registry;  // kept alive, so its address stays its own
    const Isa* isa;
    int threads;         // 0: as many as torch's
    bool is(const Signature& s, PyObject* asked) const {
        return registry == asked && words.size() == static_cast<size_t>(s.count) && variables.size() == s.length &&
               !std::memcmp(words.data(), s.words, 8 * words.size()) && !std::memcmp(variables.data(), s.variables, s.length);
    }
};

std::unique_ptr<Known> known[PLACES];
PyObject *watchers = nullptr, *num_threads = nullptr, *grad_enabled = nullptr, *wants_gradient = nullptr, *fresh_name = nullptr, *dtype_name = nullptr, *float32 = nullptr;

bool whole(PyObject* x, int64_t& to) { return PyLong_CheckExact(x) && ((to = PyLong_AsLongLong(x)) != -1 || !PyErr_Occurred()); }

bool number(PyObject* x, double& to) {
    if (PyFloat_CheckExact(x)) return to = PyFloat_AS_DOUBLE(x), true;
    return PyLong_CheckExact(x) && ((to = PyLong_AsDouble(x)) != -1.0 || !PyErr_Occurred());
}

bool optional(PyObject* x, int64_t& to) { return x == Py_None ? (to = 0, true) : whole(x, to) && to > 0; }

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
    bool automatic = backend == Py_None || (PyUnicode_Check(backend) && !PyUnicode_CompareWithASCIIString(backend, "auto"));
    if (!automatic && (!PyUnicode_Check(backend) || PyUnicode_CompareWithASCIIString(backend, "cpu"))) return false;
    s.put(int64_t{automatic});
    for (char** variable = environ; variable && *variable; variable++) {
        if (std::strncmp(*variable, "PAGEDKV_", 8)) continue;
        size_t length = std::strlen(*variable) + 1;
        if (s.length + length > sizeof s.variables) return false;
        std::memcpy(s.variables + s.length, *variable, length), s.length += length;
    }
    return true;
}

Dtype dtype_of(const Tensor& t) {
    if (t.code == 2) return t.bits == 32 ? Dtype::f32 : Dtype::f16;
    return t.code == 4 ? Dtype::bf16 : t.code == 10 ? Dtype::e4m3 : t.code == 12 ? Dtype::e5m2 : t.code == 0 ? Dtype::i8 : Dtype::i4;
}

View view(const Call& c, int i) {
    View v;
    if (!c.has[i]) return v;
    const Tensor& t = c.at[i];
    v.data = t.address();
    for (int d = 0; d < t.dims && d < 3; d++) v.stride[d] = t.strides[d] * t.bytes();
    return v;
}

Attention attention_of(const Call& c) {
    Attention a{};
    a.B = c.at[SEQ_LENS].shape[0], a.H = c.at[Q].shape[1], a.K = c.at[K].shape[2], a.D = c.at[Q].shape[2], a.Dv = value_dim(c);
    a.S = c.at[K].shape[1], a.q_type = dtype_of(c.at[Q]), a.kv_type = dtype_of(c.at[K]);
    a.causal = c.causal, a.window = c.window, a.split_tokens = c.split;
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

// Runs without the interpreter's lock. False with an exception set where memory or threads ran out.
bool run(const Isa& isa, const Attention& a, int threads) {
    std::string why;
    PyThreadState* held = PyEval_SaveThread();
    try {
        run_attention(isa, a, threads);
    } catch (const std::exception& failure) {
        why = failure.what();
    }
    PyEval_RestoreThread(held);
    if (!why.empty()) PyErr_SetString(PyExc_RuntimeError, why.c_str());
    return why.empty();
}

// q.new_empty(shape[, dtype=float32])
PyObject* fresh(PyObject* q, PyObject* shape, bool is_lse) {
    if (!shape) return nullptr;
    PyObject* arguments[] = {q, shape, float32};
    PyObject* keywords = is_lse ? PyTuple_Pack(1, dtype_name) : nullptr;
    PyObject* made = is_lse && !keywords ? nullptr : PyObject_VectorcallMethod(fresh_name, arguments, 2, keywords);
    Py_XDECREF(keywords), Py_DECREF(shape);
    return made;
}

int torch_threads() {
    PyObject* count = PyObject_CallNoArgs(num_threads);
    int threads = count ? static_cast<int>(PyLong_AsLong(count)) : -1;
    Py_XDECREF(count);
    return threads;
}

PyObject* refused(const char* text) { return PyErr_SetString(PyExc_TypeError, text), nullptr; }

// The answer to a question; yes, with no exception set, also if asking failed.
bool says_yes(PyObject* x) {
    int yes = x ? PyObject_IsTrue(x) : -1;
    Py_XDECREF(x);
    if (yes < 0) PyErr_Clear();
    return yes != 0;
}

bool unwatched(PyObject* const* x) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(watchers); i++)
        if (says_yes(PyObject_CallNoArgs(PyTuple_GET_ITEM(watchers, i)))) return false;
    if (!says_yes(PyObject_CallNoArgs(grad_enabled))) return true;
    for (int i : {Q, K, V, K_SCALE, V_SCALE, SINKS, SLOPES, OUT})
        if (x[i] != Py_None && says_yes(PyObject_GetAttr(x[i], wants_gradient))) return false;
    return true;
}

PyObject* again(PyObject*, PyObject* const* x, Py_ssize_t count) {
    Call c;
    Signature s;
    if (count != OF_AGAIN) return refused("again takes the arguments of the operator, and the registry");
    if (!take(x, c) || !sign(c, x[BACKEND], s)) return PyErr_Clear(), Py_NewRef(Py_None);
    const Known* found = known[s.hash() % PLACES].get();
    if (!found || !found->is(s, x[REGISTRY])) Py_RETURN_NONE;
    const Isa& isa = *found->isa;  // not `found`, which another thread may replace meanwhile
    int threads = found->threads ? found->threads : torch_threads();
    int64_t T = c.at[Q].shape[0], H = c.at[Q].shape[1];
    PyObject* out = c.has[OUT] ? Py_NewRef(x[OUT]) : fresh(x[Q], Py_BuildValue("(LLL)", T, H, value_dim(c)), false);
    PyObject* lse = x[LSE] == Py_True ? fresh(x[Q], Py_BuildValue("(LL)", T, H), true) : Py_NewRef(x[LSE]);
    bool ready = out && lse && threads > 0;
    for (int i : {OUT, LSE}) {
        PyObject* result = i == OUT ? out : lse;
        if (ready && !c.has[i] && result != Py_None) ready = c.has[i] = read_tensor(result, c.at[i], false);
    }
    if (!ready && !PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "torch made no plain tensor for the results");
    Attention a{};
    if (ready) a = attention_of(c);
    if (ready && !c.has[LSE]) a.lse = unwanted(a, T);
    PyObject* results = ready && run(isa, a, threads) ? (lse == Py_None ? Py_NewRef(out) : PyTuple_Pack(2, out, lse)) : nullptr;
    Py_XDECREF(out), Py_XDECREF(lse);
    return results;
}

PyObject* at_once(PyObject* self, PyObject* const* x, Py_ssize_t count) {
    if (count != OF_AGAIN) return refused("at_once takes the arguments of the operator, and the registry");
    for (int i : TENSORS) __builtin_prefetch(x[i]);
    return unwatched(x) ? again(self, x, count) : Py_NewRef(Py_None);
}

PyObject* remember(PyObject*, PyObject* const* x, Py_ssize_t count) {
    Call c;
    Signature s;
    int64_t threads;
    if (count != OF_REMEMBER || !whole(x[THREADS], threads)) return refused("remember takes what again does, a name and a number of threads");
    const Isa* isa = isa_named(PyUnicode_AsUTF8(x[ISA]));
    if (!isa) return refused("this processor has no such instruction set");
    if (!take(x, c) || !sign(c, x[BACKEND], s)) return PyErr_Clear(), Py_NewRef(Py_None);
    std::unique_ptr<Known>& place = known[s.hash() % PLACES];
    if (place) Py_DECREF(place->registry);
    place.reset(new Known{{s.words, s.words + s.count}, {s.variables, s.length}, Py_NewRef(x[REGISTRY]), isa, static_cast<int>(threads)});
    Py_RETURN_NONE;
}

// attention(the fields of an AttentionCall, isa, threads): whatever it is, it was checked.
PyObject* attention(PyObject*, PyObject* const* x, Py_ssize_t count) {
    Call c;
    int64_t threads;
    if (count != OF_ATTENTION || !whole(x[LSE + 2], threads)) return refused("attention takes a call's fields, a name and a number");
    const Isa* isa = isa_named(PyUnicode_AsUTF8(x[LSE + 1]));
    if (!isa) return refused("this processor has no such instruction set");
    if (!take(x, c, true) || !c.has[OUT] || !c.has[LSE]) {
        return PyErr_Occurred() ? nullptr : refused("these are not the checked fields of an AttentionCall");
    }
    return run(*isa, attention_of(c), static_cast<int>(threads)) ? Py_NewRef(Py_None) : nullptr;
}

// meet(torch.Tensor, torch.float32, torch.get_num_threads, torch.is_grad_enabled, watchers, by_table)
PyObject* meet(PyObject*, PyObject* const* x, Py_ssize_t count) {
    if (count != 6 || !PyTuple_Check(x[4])) return refused("meet takes Tensor, float32, get_num_threads, is_grad_enabled, a tuple and a bool");
    if (!meet_tensors(x[0], x[5] == Py_True)) return nullptr;
    fresh_name = PyUnicode_InternFromString("new_empty"), dtype_name = PyUnicode_InternFromString("dtype");
    wants_gradient = PyUnicode_InternFromString("requires_grad");
    float32 = Py_NewRef(x[1]), num_threads = Py_NewRef(x[2]), grad_enabled = Py_NewRef(x[3]), watchers = Py_NewRef(x[4]);
    Py_RETURN_NONE;
}

PyCFunction fast(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

}  // namespace

PyMethodDef call_methods[] = {
    {"meet", fast(meet), METH_FASTCALL, "What tensors are, and whom to ask for them and for the number of threads."},
    {"attention", fast(attention), METH_FASTCALL, "A checked call."},
    {"again", fast(again), METH_FASTCALL, "The results of a call whose signature is remembered, or None."},
    {"at_once", fast(at_once), METH_FASTCALL, "As again, unless one of those who watch says so."},
    {"remember", fast(remember), METH_FASTCALL, "A signature that was checked, and what serves it."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace pagedkv
