// From Python objects to an Attention.
//
//     bind_attention(k, v, k_scale, v_scale, calibration, scale, causal, window, right, softcap, sinks, alibi_slopes,
//                    split_tokens)
//         returns a binding, or None if the operator must serve every call
//     attend(binding, q, block_table, rows, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k, tree_mask, causal_of,
//            out, lse)
//         lse: a bool, whether the caller wants one; or, if Python has checked the call, the LSE's tensor
//
// The arguments have the names and the order of the fields of AttentionCall (pagedkv/kernels/args.py), which a test
// compares: bind_attention the fields before q, attend the fields from q on.
//
// Both return None if a table names what is not there: then checks.table_values has the words.
//
// A Python kernel that serves a bound call takes the arguments of attend after the first, with a tensor for out, and
// for lse a tensor, or None if the caller wants none.
#include <pybind11/stl.h>

#include <algorithm>
#include <vector>

#include "binding.hpp"
#include "schedule.hpp"

namespace pagedkv {
namespace {

enum {
    Q, BLOCK_TABLE, ROWS, SEQ_LENS, CU_SEQLENS_Q, MAX_SEQLEN_Q, MAX_SEQLEN_K, TREE_MASK, CAUSAL_OF, OUT, LSE, NUM_ATTEND
};
constexpr int TENSORS[] = {Q, BLOCK_TABLE, ROWS, SEQ_LENS, CU_SEQLENS_Q, TREE_MASK, CAUSAL_OF, OUT};

// The LSE of a caller who does not want one goes to this scratch buffer of the thread.
View discarded_lse(int64_t T, int64_t H) {
    thread_local std::vector<float> scratch;
    if (scratch.size() < static_cast<size_t>(T * H)) scratch.resize(static_cast<size_t>(T * H));
    return {reinterpret_cast<char*>(scratch.data()), {H * 4, 4, 0}};
}

// The rules that join several tensors, next to those of each (checks.py): checks.attention has them in words.
bool keeps_contract(const Binding& b, const Tensor* t, int64_t max_q) {
    const Tensor &q = t[Q], &k = b.tensors[BOUND_K];
    Sizes sizes;
    sizes.of[OF_D] = b.attention.D, sizes.of[OF_DV] = b.attention.Dv, sizes.of[OF_MAX_SEQLEN_Q] = max_q;
    if (!keeps_rules(ATTENTION, t, NUM_ATTEND, b.tensors, k, sizes)) return false;
    bool is_quantised = k.code != 2 && k.code != 4;
    if (!is_quantised && q.bits != 64 && !same_type(q, k)) return false;
    if (!t[ROWS].is_given && sizes.of[OF_A] < sizes.of[OF_B]) return false;
    return sizes.of[OF_H] && sizes.of[OF_H] % b.attention.K == 0;
}

int32_t entry(const Tensor& t, int64_t i) { return reinterpret_cast<const int32_t*>(t.data)[i]; }

// The rules of checks.table_values for all that a kernel follows: memory on the CPU can be read without waiting for a
// device, so a call never reads or writes outside of its tensors, as their shapes and strides
// tell. The entry of a hole is -1.
// O(sequences + pages).
bool names_what_is_there(const Binding& b, const Tensor* t, int64_t max_q, int64_t max_k) {
    const Tensor &table = t[BLOCK_TABLE], &rows = t[ROWS], &causal = t[CAUSAL_OF];
    int64_t B = t[SEQ_LENS].shape[0], S = b.attention.S, frames = b.tensors[BOUND_K].shape[0];
    const Tensor& starts = t[CU_SEQLENS_Q];
    if (entry(starts, 0) != 0 || entry(starts, B) > t[Q].shape[0]) return false;
    for (int64_t i = 0; i < B; i++) {
        int64_t queries = int64_t{entry(starts, i + 1)} - entry(starts, i), length = entry(t[SEQ_LENS], i);
        if (queries < 0 || queries > max_q) return false;
        if (!queries) continue;
        int64_t row = rows.is_given ? entry(rows, i * rows.strides[0]) : i, pages = (length + S - 1) / S;
        bool is_causal = causal.is_given ? causal.data[i * causal.strides[0]] : b.attention.causal;
        bool is_short = is_causal && length > 0 && length < queries;  // queries before the first token
        if (length < 0 || is_short || length > max_k || pages > table.shape[1]) return false;
        if (row < 0 || row >= table.shape[0]) return false;
        const int32_t* entries = reinterpret_cast<const int32_t*>(table.data) + row * table.strides[0];
        bool is_outside = false;
        for (int64_t page = 0; page < pages; page++) is_outside |= (entries[page] >= frames) | (entries[page] < -1);
        if (is_outside) return false;
    }
    return true;
}

// torch.empty_like(like)
py::object same_tensor(PyObject* like) {
    static PyObject* const empty_like = py::object(py::module_::import("torch").attr("empty_like")).release().ptr();
    PyObject* made = PyObject_CallOneArg(empty_like, like);
    if (!made) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(made);
}

void compute(const Binding& b, const Server& server, const Tensor* t, const Tensor& out, const Tensor& lse) {
    Attention a = b.attention;
    const Tensor& q = t[Q];
    const auto scales_of = [&](int bound, View& view, float& factor) {  // one for all becomes a factor
        if (b.tensors[bound].dims) view = view_of(b.tensors[bound]);
        else if (b.tensors[bound].is_given) factor *= *reinterpret_cast<const float*>(b.tensors[bound].data);
    };
    scales_of(BOUND_K_SCALE, a.k_scale, a.scale), scales_of(BOUND_V_SCALE, a.v_scale, a.v_factor = 1.0f);
    a.q_type = dtype_of(q), a.B = t[SEQ_LENS].shape[0], a.H = q.shape[1];
    a.q = view_of(q), a.out = view_of(out), a.table = view_of(t[BLOCK_TABLE]), a.rows = view_of(t[ROWS]);
    a.tree = view_of(t[TREE_MASK]), a.causal_of = view_of(t[CAUSAL_OF]);
    a.seq_lens = reinterpret_cast<const int32_t*>(t[SEQ_LENS].data);
    a.cu_seqlens_q = reinterpret_cast<const int32_t*>(t[CU_SEQLENS_Q].data);
    int threads = threads_of(server);
    py::gil_scoped_release released;
    a.lse = lse.is_given ? view_of(lse) : discarded_lse(q.shape[0], a.H);
    run_attention(*server.isa, a, threads);
}

py::object attend(PyObject* const* x) {
    Binding& b = binding_of(*x++);
    prefetch(b, x, NUM_ATTEND);
    Tensor t[NUM_ATTEND], made_out, made_lse;
    bool is_checked = !PyBool_Check(x[LSE]), is_read = is_checked || !is_observed(b, x[Q], x[OUT]);
    for (int i : TENSORS) is_read = is_read && read_tensor(x[i], t[i], is_checked);
    is_read = is_read && t[Q].is_given && t[BLOCK_TABLE].is_given && t[SEQ_LENS].is_given && t[CU_SEQLENS_Q].is_given;
    if (is_checked && !is_read) throw py::type_error("these are not the checked arguments of an attention call");
    int64_t max_q, max_k;
    if (!is_read || !read_integer(x[MAX_SEQLEN_Q], max_q) || !read_integer(x[MAX_SEQLEN_K], max_k)) return py::none();
    if (!is_checked && !(is_unchanged(b) && keeps_contract(b, t, max_q))) return py::none();
    if (t[Q].device_type == CPU_DEVICE && !names_what_is_there(b, t, max_q, max_k)) return py::none();
    const Tensor& q = t[Q];
    int64_t T = q.shape[0], H = q.shape[1];
    int64_t given = int64_t{t[TREE_MASK].is_given} << 16 | int64_t{t[CAUSAL_OF].is_given} << 17;
    int64_t kind = H << 20 | given | int64_t{q.code} << 8 | q.bits;
    Server server = b.server;  // a copy: another thread may set another kernel meanwhile
    if (!is_checked && server.kind != kind) return py::int_(kind);
    bool with_lse = x[LSE] == Py_True;
    bool is_like_q = q.shape[2] == b.attention.Dv && q.strides[2] == 1 && q.strides[1] == q.shape[2] &&
        q.strides[0] == H * q.shape[2];  // then torch makes `out` faster
    py::object out = py::reinterpret_borrow<py::object>(x[OUT]), lse = py::reinterpret_borrow<py::object>(x[LSE]);
    if (!t[OUT].is_given)
        out = is_like_q ? same_tensor(x[Q]) : new_tensor(x[Q], py::make_tuple(T, H, b.attention.Dv), false);
    if (!is_checked) lse = with_lse ? new_tensor(x[Q], py::make_tuple(T, H), true) : py::none();
    if (server.serve) {
        PyObject* arguments[NUM_ATTEND];
        std::copy_n(x, NUM_ATTEND, arguments), arguments[OUT] = out.ptr(), arguments[LSE] = lse.ptr();
        PyObject* none = PyObject_Vectorcall(server.serve.ptr(), arguments, NUM_ATTEND, nullptr);
        if (!none) throw py::error_already_set();
        Py_DECREF(none);
    } else {
        if (!read_tensor(out.ptr(), made_out, is_checked) || !read_tensor(lse.ptr(), made_lse, is_checked))
            throw std::runtime_error("torch made no plain tensor for the results");
        compute(b, server, t, made_out, made_lse);
    }
    return with_lse ? py::make_tuple(out, lse) : out;
}

py::object bind_attention(py::object k, py::object v, py::object k_scale, py::object v_scale, py::object calibration,
    double scale, bool causal, std::optional<int64_t> window, std::optional<int64_t> right, double softcap,
    py::object sinks, py::object alibi_slopes, std::optional<int64_t> split_tokens) {
    py::object capsule = new_binding({k, v, k_scale, v_scale, calibration, sinks, alibi_slopes});
    if (!capsule) return py::none();
    Binding& b = binding_of(capsule);
    Attention& a = b.attention;
    const Tensor* t = b.tensors;
    a.K = t[BOUND_K].shape[2], a.S = t[BOUND_K].shape[1];
    a.D = stored_dim(t[BOUND_K], false), a.Dv = stored_dim(t[BOUND_V], true);
    a.k_type = stored_type(t[BOUND_K], false), a.v_type = stored_type(t[BOUND_V], true);
    a.rotated = a.v_type == Dtype::c4, a.calibration = view_of(t[BOUND_CALIBRATION]);
    a.k = view_of(t[BOUND_K]), a.v = view_of(t[BOUND_V]);
    a.sinks = view_of(t[BOUND_SINKS]), a.slopes = view_of(t[BOUND_SLOPES]);
    a.scale = static_cast<float>(scale), a.softcap = static_cast<float>(softcap), a.causal = causal;
    a.window = window.value_or(0) < FARTHEST ? window.value_or(0) : 0;
    a.right = std::min(right.value_or(FARTHEST), FARTHEST);
    a.split_tokens = std::min(split_tokens.value_or(0), FARTHEST);
    return capsule;
}

}  // namespace

void define_attention(py::module_& m) {
    m.def("bind_attention", bind_attention, "Bind a checked layer and options; None if the operator must serve.");
    define_fast<attend, 1 + NUM_ATTEND>(m, "attend", "Attend: results, the kind that has no kernel yet, or None.");
}

}  // namespace pagedkv
