// From Python objects to an Attention.
//
//     bind_attention(k, v, k_scale, v_scale, sinks, alibi_slopes, scale, causal, window, softcap, split_tokens)
//         returns a Binding, or None if the operator must serve every call
//     Binding.attend(q, block_table, rows, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k, tree_mask, out,
//                    with_lse)
//     Binding.attend_checked(the same, but the LSE's tensor for with_lse, isa, threads)
//         computes a call that Python has checked
//
// A Python kernel that serves a bound call takes the arguments of attend, with `out` made and the LSE's tensor in the
// place of with_lse.
#include <algorithm>
#include <vector>

#include "binding.hpp"
#include "schedule.hpp"
#include "torch_state.hpp"

namespace pagedkv {
namespace {

enum { Q, TABLE, ROWS, SEQ_LENS, STARTS, MAX_Q, MAX_K, TREE, OUT, LSE, NUM_ATTEND };
enum { ISA = NUM_ATTEND, THREADS, NUM_CHECKED };  // attend_checked takes two more
constexpr int TENSORS[] = {Q, TABLE, ROWS, SEQ_LENS, STARTS, TREE, OUT};

// Lengths are int32, so no two positions are so far apart. Sums of two fit 64 bits.
constexpr int64_t FARTHEST = int64_t{1} << 32;

struct Tensors {
    Tensor at[NUM_ATTEND];
    bool has[NUM_ATTEND] = {};
    View view(int i) const { return has[i] ? view_of(at[i]) : View{}; }
    bool read(int i, PyObject* x, bool any_class) {
        has[i] = x != Py_None;
        return !has[i] || read_tensor(x, at[i], any_class);
    }
};

struct Options {
    int64_t window, split;
    double scale, softcap;
    bool causal;
};

// False if one has a type that torch would convert; an exception may be set.
bool read_options(PyObject* scale, PyObject* causal, PyObject* window, PyObject* softcap, PyObject* split, Options& o) {
    if (!read_number(scale, o.scale) || !PyBool_Check(causal) || !read_optional(window, o.window)) return false;
    o.causal = causal == Py_True;
    return read_number(softcap, o.softcap) && read_optional(split, o.split);
}

void put_batch(Attention& a, const Tensors& t) {
    const Tensor& q = t.at[Q];
    a.q_type = dtype_of(q), a.B = t.at[SEQ_LENS].shape[0], a.H = q.shape[1];
    a.q = view_of(q), a.out = t.view(OUT), a.lse = t.view(LSE);
    a.table = t.view(TABLE), a.rows = t.view(ROWS), a.tree = t.view(TREE);
    a.seq_lens = reinterpret_cast<const int32_t*>(t.at[SEQ_LENS].address());
    a.cu_seqlens_q = reinterpret_cast<const int32_t*>(t.at[STARTS].address());
}

// The LSE of a caller who does not want one goes to this scratch buffer of the thread.
View discarded_lse(const Attention& a, int64_t T) {
    thread_local std::vector<float> scratch;
    if (scratch.size() < static_cast<size_t>(T * a.H)) scratch.resize(static_cast<size_t>(T * a.H));
    return {reinterpret_cast<char*>(scratch.data()), {a.H * 4, 4, 0}};
}

bool run(const Isa& isa, Attention& a, const Tensors& t, int threads) {
    return run_unlocked([&] {
        if (!t.has[LSE]) a.lse = discarded_lse(a, t.at[Q].shape[0]);
        run_attention(isa, a, threads);
    });
}

bool is_query(const Tensor& q, const Tensor& k) {
    bool is_double = q.code == 2 && q.bits == 64, is_float = q.code == 4 || q.code == 2;
    bool is_quantised = k.code != 2 && k.code != 4;
    return is_float && (is_quantised || is_double || (q.code == k.code && q.bits == k.bits));
}

// The rules of checks.attention in pagedkv/kernels/checks.py for all that may change from call to call.
bool keeps_contract(const Binding& b, const Tensors& t, int64_t max_q) {
    const Tensor &q = t.at[Q], &k = b.tensors[BOUND_K].seen, &table = t.at[TABLE];
    const Tensor &lens = t.at[SEQ_LENS], &starts = t.at[STARTS], &rows = t.at[ROWS];
    const Tensor &tree = t.at[TREE], &out = t.at[OUT];
    if (q.dims != 3 || !is_beside(q, k) || q.shape[2] != b.attention.D) return false;
    if (!has_unit_stride(q) || !is_query(q, k)) return false;
    int64_t T = q.shape[0], H = q.shape[1];
    if (!H || H % b.attention.K) return false;
    if (!is_int(lens, 32, 1, k) || !is_int(starts, 32, 1, k) || !is_int(table, 32, 2, k)) return false;
    int64_t B = lens.shape[0];
    if (starts.shape[0] != B + 1) return false;
    if (!has_unit_stride(lens) || !has_unit_stride(starts) || !has_unit_stride(table)) return false;
    if (t.has[ROWS] ? !is_int(rows, 32, 1, k) || rows.shape[0] != B : table.shape[0] < B) return false;
    for (int i : {BOUND_SINKS, BOUND_SLOPES}) {
        const Tensor& heads = b.tensors[i].seen;
        if (b.tensors[i].object && (!is_float32(heads, 1, k) || heads.shape[0] != H)) return false;
    }
    if (t.has[TREE] && (tree.code != 6 || tree.bits != 8 || tree.dims != 2 || !is_beside(tree, k))) return false;
    if (t.has[TREE] && (tree.shape[0] != T || tree.shape[1] < max_q)) return false;
    if (!t.has[OUT]) return true;
    bool is_like_q = out.dims == 3 && out.code == q.code && out.bits == q.bits && is_beside(out, k);
    bool has_shape = is_like_q && out.shape[0] == T && out.shape[1] == H && out.shape[2] == b.attention.Dv;
    return has_shape && has_unit_stride(out) && has_own_elements(out);
}

bool read_tensors(PyObject* const* x, Tensors& t, bool any_class) {
    for (int i : TENSORS)
        if (!t.read(i, x[i], any_class)) return false;
    return t.has[Q] && t.has[TABLE] && t.has[SEQ_LENS] && t.has[STARTS];
}

bool read_call(PyObject* const* x, Tensors& t, int64_t& max_q) {
    int64_t max_k;
    if (!read_tensors(x, t, false) || !PyBool_Check(x[LSE])) return false;
    return read_integer(x[MAX_Q], max_q) && read_integer(x[MAX_K], max_k);
}

bool compute(const Binding& b, const Server& server, Tensors& t, PyObject* out, PyObject* lse) {
    bool is_read = t.has[OUT] || t.read(OUT, out, false);
    if (!is_read || !t.read(LSE, lse, false)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "torch made no plain tensor for the results");
        return false;
    }
    int threads = server.threads ? server.threads : torch_threads();
    if (threads < 1) return false;
    Attention a = b.attention;
    put_batch(a, t);
    return run(*server.isa, a, t, threads);
}

bool hand_over(PyObject* serve, PyObject* const* x, PyObject* out, PyObject* lse) {
    PyObject* arguments[NUM_ATTEND];
    std::copy(x, x + NUM_ATTEND, arguments);
    arguments[OUT] = out, arguments[LSE] = lse;
    PyObject* none = PyObject_Vectorcall(serve, arguments, NUM_ATTEND, nullptr);
    Py_XDECREF(none);
    return none != nullptr;
}

// bind_attention(...): see above. None if the operator must serve every call.
PyObject* bind_attention(PyObject*, PyObject* const* x, Py_ssize_t count) {
    Options o;
    if (count != 11) return type_error("bind_attention takes six tensors and five options");
    Binding* b = read_options(x[6], x[7], x[8], x[9], x[10], o) ? new_binding(Op::attention, x) : nullptr;
    if (!b) return PyErr_Clear(), Py_NewRef(Py_None);
    const Tensor &k = b->tensors[BOUND_K].seen, &v = b->tensors[BOUND_V].seen;
    Attention& a = b->attention;
    a.K = k.shape[2], a.S = k.shape[1], a.D = head_dim_of(k), a.Dv = head_dim_of(v), a.kv_type = dtype_of(k);
    a.k = view_of(k), a.v = view_of(v);
    a.k_scale = bound_view(*b, BOUND_K_SCALE), a.v_scale = bound_view(*b, BOUND_V_SCALE);
    a.sinks = bound_view(*b, BOUND_SINKS), a.slopes = bound_view(*b, BOUND_SLOPES);
    a.causal = o.causal, a.window = o.window < FARTHEST ? o.window : 0, a.split_tokens = std::min(o.split, FARTHEST);
    a.scale = static_cast<float>(o.scale), a.softcap = static_cast<float>(o.softcap);
    return reinterpret_cast<PyObject*>(b);
}

}  // namespace

PyObject* attend_bound(PyObject* self, PyObject* const* x, Py_ssize_t count) {
    Tensors t;
    int64_t max_q;
    Binding& b = binding_of(self);
    if (count != NUM_ATTEND || b.op != Op::attention)
        return type_error("attend takes the ten arguments of a bound attention call");
    prefetch(b, &b.attention, sizeof b.attention);
    for (int i : {Q, TABLE, SEQ_LENS, STARTS, OUT}) __builtin_prefetch(x[i]);
    PyObject* floats[2 + Binding::MOST_TENSORS] = {x[Q], x[OUT]};
    for (int i = 0; i < Binding::MOST_TENSORS; i++) __builtin_prefetch(floats[2 + i] = b.tensors[i].object);
    if (is_observed(floats, 2 + Binding::MOST_TENSORS, 2) || !read_call(x, t, max_q) || !is_unchanged(b)
        || !keeps_contract(b, t, max_q))
        return PyErr_Clear(), Py_NewRef(Py_None);
    const Tensor& q = t.at[Q];
    int64_t T = q.shape[0], H = q.shape[1];
    int64_t kind = H << 20 | int64_t{t.has[TREE]} << 16 | int64_t{q.code} << 8 | q.bits;
    const Server* found = server_of(b, kind);
    if (!found) return PyLong_FromLongLong(kind);
    Server server = *found;  // another thread may replace it meanwhile
    Py_XINCREF(server.serve);
    bool with_lse = x[LSE] == Py_True, makes_lse = with_lse || server.serve;  // Python's kernels always store one
    PyObject* shape = t.has[OUT] ? nullptr : Py_BuildValue("(LLL)", T, H, b.attention.Dv);
    PyObject* out = t.has[OUT] ? Py_NewRef(x[OUT]) : new_tensor(x[Q], shape, false);
    PyObject* lse = makes_lse ? new_tensor(x[Q], Py_BuildValue("(LL)", T, H), true) : Py_NewRef(Py_None);
    bool is_done = out && lse;
    if (is_done) is_done = server.serve ? hand_over(server.serve, x, out, lse) : compute(b, server, t, out, lse);
    PyObject* results = !is_done ? nullptr : with_lse ? PyTuple_Pack(2, out, lse) : Py_NewRef(out);
    Py_XDECREF(out), Py_XDECREF(lse), Py_XDECREF(server.serve);
    return results;
}

PyObject* attend_checked(PyObject* self, PyObject* const* x, Py_ssize_t count) {
    Tensors t;
    int64_t threads;
    Binding& b = binding_of(self);
    if (count != NUM_CHECKED || b.op != Op::attention || !read_integer(x[THREADS], threads))
        return type_error("attend_checked takes twelve arguments of a checked attention call");
    const Isa* isa = isa_of(x[ISA]);
    if (!isa) return nullptr;
    if (!read_tensors(x, t, true) || !t.read(LSE, x[LSE], true) || !t.has[OUT] || !t.has[LSE])
        return PyErr_Occurred() ? nullptr : type_error("these are not the checked arguments of an attention call");
    Attention a = b.attention;
    put_batch(a, t);
    return run(*isa, a, t, static_cast<int>(threads)) ? Py_NewRef(Py_None) : nullptr;
}

PyMethodDef attention_methods[] = {
    {"bind_attention", fast_call(bind_attention), METH_FASTCALL,
        "Bind a checked layer and options; None if the operator must serve."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace pagedkv
