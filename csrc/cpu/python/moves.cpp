// From Python objects to a Write, to copies of frames and to two States that become one.
//
//     bind_write(k, v, k_scale, v_scale, cos, sin, interleaved)             -> Binding, or None
//     Binding.write(k_new, v_new, slots, positions)                         `positions` is None if keys are not turned
//     Binding.write_checked(k_new, v_new, slots, positions, isa, threads)   calls that Python has checked
//     copy(storage, copies, threads)
//     merge(out_a, lse_a, out_b, lse_b, isa, threads)                       returns the new (out, lse)
#include <algorithm>

#include "binding.hpp"
#include "schedule.hpp"
#include "torch_state.hpp"

namespace pagedkv {
namespace {

enum { K_NEW, V_NEW, SLOTS, POSITIONS, NUM_WRITE };
enum { OUT_A, LSE_A, OUT_B, LSE_B, NUM_STATES };
enum { STORAGE, COPIES, NUM_COPY };

// Tensors of a call, by index; some may be None.
struct Tensors {
    Tensor at[4];
    bool has[4] = {};
    View view(int i) const { return has[i] ? view_of(at[i]) : View{}; }
    bool read(PyObject* const* x, int count, bool any_class) {
        for (int i = 0; i < count; i++)
            if ((has[i] = x[i] != Py_None) && !read_tensor(x[i], at[i], any_class)) return false;
        return true;
    }
    bool has_all(int count) const { return std::all_of(has, has + count, [](bool is_given) { return is_given; }); }
};

Write write_into(const Binding& b, int pool, int scale) {
    const Tensor& into = b.tensors[pool].seen;
    Write w{};
    w.kv_type = dtype_of(into), w.K = into.shape[2], w.D = head_dim_of(into), w.S = into.shape[1];
    w.pool = view_of(into), w.scale = bound_view(b, scale);
    w.scale_per_token_head = b.tensors[scale].object && b.tensors[scale].seen.dims == 3;
    return w;
}

void put_tokens(Write& w, const Tensor& tokens, View slots) {
    w.new_type = dtype_of(tokens), w.fresh = view_of(tokens), w.slots = slots.data, w.slots_stride = slots.stride[0];
}

bool is_floating(const Tensor& t) { return t.code == 2 || t.code == 4 || t.code == 10 || t.code == 12; }

// The rules of checks.write in pagedkv/kernels/checks.py for all that may change from call to call.
bool keeps_contract(const Binding& b, const Tensors& t) {
    const Tensor &k_new = t.at[K_NEW], &v_new = t.at[V_NEW], &k = b.tensors[BOUND_K].seen;
    if (k_new.dims != 3 || v_new.dims != 3 || !is_floating(k_new) || !is_floating(v_new)) return false;
    if (!is_beside(k_new, k) || !is_beside(v_new, k)) return false;
    if (!has_unit_stride(k_new) || !has_unit_stride(v_new)) return false;
    int64_t T = k_new.shape[0];
    if (k_new.shape[1] != b.write_k.K || k_new.shape[2] != b.write_k.D) return false;
    if (v_new.shape[0] != T || v_new.shape[1] != b.write_v.K || v_new.shape[2] != b.write_v.D) return false;
    if (!is_int(t.at[SLOTS], 64, 1, k) || t.at[SLOTS].shape[0] != T) return false;
    if (!b.tensors[BOUND_COS].object) return !t.has[POSITIONS];
    return t.has[POSITIONS] && is_int(t.at[POSITIONS], 64, 1, k) && t.at[POSITIONS].shape[0] == T;
}

bool compute(const Binding& b, const Isa& isa, int threads, const Tensors& t) {
    Write k = b.write_k, v = b.write_v;
    put_tokens(k, t.at[K_NEW], t.view(SLOTS)), put_tokens(v, t.at[V_NEW], t.view(SLOTS));
    k.positions = t.view(POSITIONS);
    int64_t tokens = t.at[K_NEW].shape[0];
    return run_unlocked([&] { run_write(isa, k, tokens, threads), run_write(isa, v, tokens, threads); });
}

// bind_write(...): see above. None if the operator must serve every call.
PyObject* bind_write(PyObject*, PyObject* const* x, Py_ssize_t count) {
    if (count != 7) return type_error("bind_write takes six tensors and a bool");
    Binding* b = PyBool_Check(x[6]) ? new_binding(Op::write, x) : nullptr;
    if (!b) return PyErr_Clear(), Py_NewRef(Py_None);
    b->write_k = write_into(*b, BOUND_K, BOUND_K_SCALE), b->write_v = write_into(*b, BOUND_V, BOUND_V_SCALE);
    const Bound& cos = b->tensors[BOUND_COS];
    b->write_k.half = cos.object ? cos.seen.shape[1] : 0, b->write_k.interleaved = x[6] == Py_True;
    b->write_k.cos = bound_view(*b, BOUND_COS), b->write_k.sin = bound_view(*b, BOUND_SIN);
    return reinterpret_cast<PyObject*>(b);
}

PyObject* copy(PyObject*, PyObject* const* x, Py_ssize_t count) {
    Tensors t;
    int64_t threads;
    if (count != NUM_COPY + 1 || !read_integer(x[NUM_COPY], threads))
        return type_error("copy takes two tensors and a number of threads");
    if (!t.read(x, NUM_COPY, true) || !t.has_all(NUM_COPY)) return type_error("these are not a storage and its copies");
    const Tensor &storage = t.at[STORAGE], &copies = t.at[COPIES];
    int64_t bytes = storage.bytes();
    for (int i = 1; i < storage.dims; i++) bytes *= storage.shape[i];
    View frames = view_of(storage), pairs = view_of(copies);
    int64_t step = frames.stride[0], pair = pairs.stride[0], most = copies.shape[0];
    bool is_done = run_unlocked([&] {
        run_copies(frames.data, step, bytes, pairs.data, pair, most, static_cast<int>(threads));
    });
    return is_done ? Py_NewRef(Py_None) : nullptr;
}

PyObject* merge(PyObject*, PyObject* const* x, Py_ssize_t count) {
    Tensors t;
    Tensor new_out, new_lse;
    int64_t threads;
    if (count != NUM_STATES + 2 || !read_integer(x[NUM_STATES + 1], threads))
        return type_error("merge takes two states, a name and a number of threads");
    const Isa* isa = isa_of(x[NUM_STATES]);
    if (!isa) return nullptr;
    if (!t.read(x, NUM_STATES, true) || !t.has_all(NUM_STATES)) return type_error("these are not two checked states");
    const int64_t* shape = t.at[OUT_A].shape;
    PyObject* out = new_tensor(x[OUT_A], Py_BuildValue("(LLL)", shape[0], shape[1], shape[2]), false);
    PyObject* lse = out ? new_tensor(x[LSE_A], Py_BuildValue("(LL)", shape[0], shape[1]), false) : nullptr;
    bool is_done = lse && read_tensor(out, new_out, true) && read_tensor(lse, new_lse, true);
    if (!is_done && !PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "torch made no tensor for the results");
    if (is_done) {
        States s{dtype_of(t.at[OUT_A]), shape[0], shape[1], shape[2],
                 t.view(OUT_A), t.view(LSE_A), t.view(OUT_B), t.view(LSE_B),
                 new_out.address(), new_lse.address()};
        is_done = run_unlocked([&] { run_merge(*isa, s, static_cast<int>(threads)); });
    }
    PyObject* results = is_done ? PyTuple_Pack(2, out, lse) : nullptr;
    Py_XDECREF(out), Py_XDECREF(lse);
    return results;
}

}  // namespace

PyObject* write_bound(PyObject* self, PyObject* const* x, Py_ssize_t count) {
    Tensors t;
    Binding& b = binding_of(self);
    if (count != NUM_WRITE || b.op != Op::write) return type_error("write takes the four arguments of a bound write");
    prefetch(b, &b.write_k, 2 * sizeof b.write_k);
    for (int i = 0; i < NUM_WRITE; i++) __builtin_prefetch(x[i]);
    PyObject* floats[2 + Binding::MOST_TENSORS] = {x[K_NEW], x[V_NEW]};
    for (int i = 0; i < Binding::MOST_TENSORS; i++) __builtin_prefetch(floats[2 + i] = b.tensors[i].object);
    bool is_observed_call = is_observed(floats, 2 + Binding::MOST_TENSORS, 2);
    bool is_read = !is_observed_call && t.read(x, NUM_WRITE, false) && t.has_all(POSITIONS);
    if (!is_read || !is_unchanged(b) || !keeps_contract(b, t)) return PyErr_Clear(), Py_NewRef(Py_None);
    const Tensor &k_new = t.at[K_NEW], &v_new = t.at[V_NEW];
    int64_t kind = int64_t{k_new.code} << 24 | int64_t{k_new.bits} << 16 | int64_t{v_new.code} << 8 | v_new.bits;
    const Server* found = server_of(b, kind);
    if (!found) return PyLong_FromLongLong(kind);
    Server server = *found;  // another thread may replace it meanwhile
    Py_XINCREF(server.serve);
    PyObject* none = server.serve ? PyObject_Vectorcall(server.serve, x, NUM_WRITE, nullptr) : nullptr;
    int threads = server.threads || server.serve ? server.threads : torch_threads();
    bool is_done = server.serve ? none != nullptr : threads > 0 && compute(b, *server.isa, threads, t);
    Py_XDECREF(none), Py_XDECREF(server.serve);
    return is_done ? Py_NewRef(Py_True) : nullptr;
}

PyObject* write_checked(PyObject* self, PyObject* const* x, Py_ssize_t count) {
    Tensors t;
    int64_t threads;
    Binding& b = binding_of(self);
    if (count != NUM_WRITE + 2 || b.op != Op::write || !read_integer(x[NUM_WRITE + 1], threads))
        return type_error("write_checked takes six arguments of a checked write");
    const Isa* isa = isa_of(x[NUM_WRITE]);
    if (!isa) return nullptr;
    if (!t.read(x, NUM_WRITE, true) || !t.has_all(POSITIONS))
        return type_error("these are not the checked arguments of a write");
    return compute(b, *isa, static_cast<int>(threads), t) ? Py_NewRef(Py_None) : nullptr;
}

PyMethodDef move_methods[] = {
    {"bind_write", fast_call(bind_write), METH_FASTCALL,
        "Bind a checked layer and rope; None if the operator must serve."},
    {"copy", fast_call(copy), METH_FASTCALL, "Copy between frames that are one run of bytes each: a checked call."},
    {"merge", fast_call(merge), METH_FASTCALL, "Return out and LSE of two checked states."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace pagedkv
