// From Python objects to a Write, to copies of frames and to two States that become one; known.hpp remembers those that were checked.
//
//     write(the fields of a WriteCall, isa, threads)      a checked call                    copy(storage, copies, threads)
//     write_again(those fields, backend, registry)        True, or None if it is not known  copy_again(storage, copies, backend, registry)
//     write_at_once(the same)                             None also if something watches    copy_at_once(the same)
//     remember_write(the same, isa, threads, None)                                          remember_copy(the same, isa, threads, None)
//
// Where other kernels serve writes, (..., "", 0, a callable that takes the fields) is remembered instead, as in calls.cpp.
//
//     merge, merge_again, merge_at_once, remember_merge: likewise, of (out_a, lse_a, out_b, lse_b); they return the new (out, lse)
//
// Which frames are copied is looked at each time: a wrong one would be written anywhere.
#include "calls.hpp"

#include <algorithm>

#include "known.hpp"
#include "schedule.hpp"

namespace pagedkv {
namespace {

// The arguments, in the order of the operator (pagedkv/kernels/ops.py).
enum { K_NEW, V_NEW, K, V, K_SCALE, V_SCALE, SLOTS, POSITIONS, COS, SIN, INTERLEAVED };
enum { STORAGE, COPIES };
enum { OUT_A, LSE_A, OUT_B, LSE_B };
constexpr int OF_WRITE = INTERLEAVED + 1, OF_COPY = COPIES + 1, OF_MERGE = LSE_B + 1;
constexpr Py_ssize_t CHOICE = 2, SERVER = 2;  // backend and registry; isa and threads, and of who remembers a callable or None

struct Moved {
    Tensor at[SIN + 1];
    bool has[SIN + 1] = {};
    bool interleaved = false;
};

bool take(PyObject* const* x, int tensors, Moved& m, bool any_class = false) {
    for (int i = 0; i < tensors; i++) {
        m.has[i] = x[i] != Py_None;
        if (m.has[i] && !read_tensor(x[i], m.at[i], any_class)) return false;
    }
    if (tensors <= SIN) return std::all_of(m.has, m.has + tensors, [](bool has) { return has; });
    if (!PyBool_Check(x[INTERLEAVED])) return false;
    m.interleaved = x[INTERLEAVED] == Py_True;
    return m.has[K_NEW] && m.has[V_NEW] && m.has[K] && m.has[V] && m.has[SLOTS];
}

bool sign(const Moved& m, int tensors, PyObject* backend, Signature& s) {
    for (int i = 0; i < tensors; i++) {
        if (m.has[i]) s.put(m.at[i]);
        else s.put(int64_t{-1});
    }
    s.put(int64_t{m.interleaved});
    return s.put_choice(backend);
}

View view(const Moved& m, int i) { return m.has[i] ? view_of(m.at[i]) : View{}; }

Write write_of(const Moved& m, bool is_v) {
    Write w{};
    const Tensor &fresh = m.at[is_v ? V_NEW : K_NEW], &pool = m.at[is_v ? V : K];
    int scale = is_v ? V_SCALE : K_SCALE;
    w.new_type = dtype_of(fresh), w.kv_type = dtype_of(pool);
    w.K = fresh.shape[1], w.D = fresh.shape[2], w.S = pool.shape[1];
    w.fresh = view_of(fresh), w.pool = view_of(pool), w.scale = view(m, scale);
    w.scale_per_token_head = m.has[scale] && m.at[scale].dims == 3;
    View slots = view(m, SLOTS);
    w.slots = slots.data, w.slots_stride = slots.stride[0];
    if (is_v || !m.has[COS]) return w;
    w.half = m.at[COS].shape[1], w.interleaved = m.interleaved;
    w.cos = view(m, COS), w.sin = view(m, SIN), w.positions = view(m, POSITIONS);
    return w;
}

bool run(const Moved& m, const Isa& isa, int threads) {
    Write k = write_of(m, false), v = write_of(m, true);
    int64_t tokens = m.at[K_NEW].shape[0];
    return released([&] { run_write(isa, k, tokens, threads), run_write(isa, v, tokens, threads); });
}

bool run_copy(const Moved& m, int threads) {
    const Tensor &storage = m.at[STORAGE], &copies = m.at[COPIES];
    int64_t bytes = storage.bytes();
    for (int i = 1; i < storage.dims; i++) bytes *= storage.shape[i];
    View frames = view_of(storage), pairs = view_of(copies);
    return released([&] { run_copies(frames.data, frames.stride[0], bytes, pairs.data, pairs.stride[0], copies.shape[0], threads); });
}

// (out, lse), made like out_a. Null, with an exception set, if torch cannot make them or memory ran out.
PyObject* merged(PyObject* const* x, const Moved& m, const Isa& isa, int threads, bool any_class) {
    const int64_t* shape = m.at[OUT_A].shape;
    PyObject* out = fresh(x[OUT_A], Py_BuildValue("(LLL)", shape[0], shape[1], shape[2]), false);
    PyObject* lse = out ? fresh(x[LSE_A], Py_BuildValue("(LL)", shape[0], shape[1]), false) : nullptr;
    Tensor new_out, new_lse;
    bool well = lse && read_tensor(out, new_out, any_class) && read_tensor(lse, new_lse, any_class);
    if (!well && !PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "torch made no plain tensor for the results");
    if (well) {
        States s{dtype_of(m.at[OUT_A]), shape[0], shape[1], shape[2], view(m, OUT_A), view(m, LSE_A), view(m, OUT_B), view(m, LSE_B),
                 new_out.address(), new_lse.address()};
        well = released([&] { run_merge(isa, s, threads); });
    }
    PyObject* results = well ? PyTuple_Pack(2, out, lse) : nullptr;
    Py_XDECREF(out), Py_XDECREF(lse);
    return results;
}

bool in_range(const Moved& m) {
    View pairs = view_of(m.at[COPIES]);
    for (int64_t i = 0; i < m.at[COPIES].shape[0]; i++) {
        const int32_t* pair = reinterpret_cast<const int32_t*>(pairs.data + i * pairs.stride[0]);
        for (int side = 0; side < 2; side++)
            if (pair[side] < 0 || pair[side] >= m.at[STORAGE].shape[0]) return false;
    }
    return true;
}

// What serves these `tensors` and what follows them; null, and no exception, if that is not known.
Server known_server(PyObject* const* x, int fields, int tensors, Moved& m, Op op) {
    Signature s(op);
    if (take(x, tensors, m) && sign(m, tensors, x[fields], s)) return server_of(s, x[fields + 1]);
    PyErr_Clear();
    return {nullptr, 0, nullptr};
}

PyObject* remember(PyObject* const* x, int fields, int tensors, Op op) {
    Moved m;
    Signature s(op);
    int64_t threads;
    PyObject* serve = x[fields + CHOICE + SERVER] == Py_None ? nullptr : x[fields + CHOICE + SERVER];
    if (!whole(x[fields + CHOICE + 1], threads)) return refused("a number of threads is an int");
    const Isa* isa = serve ? nullptr : isa_of(x[fields + CHOICE]);
    if (!isa && !serve) return nullptr;
    if (take(x, tensors, m) && sign(m, tensors, x[fields], s)) keep(s, x[fields + 1], {isa, static_cast<int>(threads), serve});
    PyErr_Clear();
    Py_RETURN_NONE;
}

PyObject* done(bool well) { return well ? Py_NewRef(Py_True) : nullptr; }

PyObject* write(PyObject*, PyObject* const* x, Py_ssize_t count) {
    Moved m;
    int64_t threads;
    if (count != OF_WRITE + SERVER || !whole(x[OF_WRITE + 1], threads)) return refused("write takes a call's fields, a name and a number");
    const Isa* isa = isa_of(x[OF_WRITE]);
    if (!isa) return nullptr;
    if (!take(x, SIN + 1, m, true)) return PyErr_Occurred() ? nullptr : refused("these are not the checked fields of a WriteCall");
    return done(run(m, *isa, static_cast<int>(threads)));
}

PyObject* write_again(PyObject*, PyObject* const* x, Py_ssize_t count) {
    Moved m;
    if (count != OF_WRITE + CHOICE) return refused("write_again takes the arguments of the operator, and the registry");
    Server server = known_server(x, OF_WRITE, SIN + 1, m, Op::write);
    if (server.serve) {
        PyObject* nothing = PyObject_Vectorcall(server.serve, x, OF_WRITE, nullptr);
        bool well = nothing != nullptr;
        Py_DECREF(server.serve), Py_XDECREF(nothing);
        return done(well);
    }
    if (!server.isa || server.threads < 1) return PyErr_Occurred() ? nullptr : Py_NewRef(Py_None);
    return done(run(m, *server.isa, server.threads));
}

PyObject* write_at_once(PyObject* self, PyObject* const* x, Py_ssize_t count) {
    if (count != OF_WRITE + CHOICE) return refused("write_at_once takes the arguments of the operator, and the registry");
    PyObject* const wanting[] = {x[K_NEW], x[V_NEW], x[K], x[V], x[K_SCALE], x[V_SCALE], x[COS], x[SIN]};
    return nobody_watches(wanting, 8) ? write_again(self, x, count) : Py_NewRef(Py_None);
}

PyObject* remember_write(PyObject*, PyObject* const* x, Py_ssize_t count) {
    if (count != OF_WRITE + CHOICE + SERVER + 1) return refused("remember_write takes what write_again does, a name, a number and a server");
    return remember(x, OF_WRITE, SIN + 1, Op::write);
}

PyObject* copy(PyObject*, PyObject* const* x, Py_ssize_t count) {
    Moved m;
    int64_t threads;
    if (count != OF_COPY + 1 || !whole(x[OF_COPY], threads)) return refused("copy takes two tensors and a number of threads");
    if (!take(x, OF_COPY, m, true)) return PyErr_Occurred() ? nullptr : refused("these are not a storage and its copies");
    return done(run_copy(m, static_cast<int>(threads)));
}

PyObject* copy_again(PyObject*, PyObject* const* x, Py_ssize_t count) {
    Moved m;
    if (count != OF_COPY + CHOICE) return refused("copy_again takes the arguments of the operator, and the registry");
    Server server = known_server(x, OF_COPY, OF_COPY, m, Op::copy);
    if (!server.isa || server.threads < 1 || !in_range(m)) return PyErr_Occurred() ? nullptr : Py_NewRef(Py_None);
    return done(run_copy(m, server.threads));
}

PyObject* copy_at_once(PyObject* self, PyObject* const* x, Py_ssize_t count) {
    if (count != OF_COPY + CHOICE) return refused("copy_at_once takes the arguments of the operator, and the registry");
    return nobody_watches(x, 1) ? copy_again(self, x, count) : Py_NewRef(Py_None);
}

PyObject* remember_copy(PyObject*, PyObject* const* x, Py_ssize_t count) {
    if (count != OF_COPY + CHOICE + SERVER + 1) return refused("remember_copy takes what copy_again does, a name, a number and a server");
    return remember(x, OF_COPY, OF_COPY, Op::copy);
}

PyObject* merge(PyObject*, PyObject* const* x, Py_ssize_t count) {
    Moved m;
    int64_t threads;
    if (count != OF_MERGE + SERVER || !whole(x[OF_MERGE + 1], threads)) return refused("merge takes two states, a name and a number of threads");
    const Isa* isa = isa_of(x[OF_MERGE]);
    if (!isa) return nullptr;
    if (!take(x, OF_MERGE, m, true)) return PyErr_Occurred() ? nullptr : refused("these are not two checked states");
    return merged(x, m, *isa, static_cast<int>(threads), true);
}

PyObject* merge_again(PyObject*, PyObject* const* x, Py_ssize_t count) {
    Moved m;
    if (count != OF_MERGE + CHOICE) return refused("merge_again takes the arguments of the operator, None and the registry");
    Server server = known_server(x, OF_MERGE, OF_MERGE, m, Op::merge);
    if (!server.isa || server.threads < 1) return PyErr_Occurred() ? nullptr : Py_NewRef(Py_None);
    return merged(x, m, *server.isa, server.threads, false);
}

PyObject* merge_at_once(PyObject* self, PyObject* const* x, Py_ssize_t count) {
    if (count != OF_MERGE + CHOICE) return refused("merge_at_once takes the arguments of the operator, None and the registry");
    return nobody_watches(x, OF_MERGE) ? merge_again(self, x, count) : Py_NewRef(Py_None);
}

PyObject* remember_merge(PyObject*, PyObject* const* x, Py_ssize_t count) {
    if (count != OF_MERGE + CHOICE + SERVER + 1) return refused("remember_merge takes what merge_again does, a name, a number and a server");
    return remember(x, OF_MERGE, OF_MERGE, Op::merge);
}

}  // namespace

PyMethodDef move_methods[] = {
    {"write", fast(write), METH_FASTCALL, "A checked call."},
    {"write_again", fast(write_again), METH_FASTCALL, "True after a write whose signature is remembered, else None."},
    {"write_at_once", fast(write_at_once), METH_FASTCALL, "As write_again, unless one of those who watch says so."},
    {"remember_write", fast(remember_write), METH_FASTCALL, "A signature that was checked, and what serves it."},
    {"copy", fast(copy), METH_FASTCALL, "Checked copies between frames that are one run of bytes each."},
    {"copy_again", fast(copy_again), METH_FASTCALL, "True after copies whose signature is remembered, else None."},
    {"copy_at_once", fast(copy_at_once), METH_FASTCALL, "As copy_again, unless one of those who watch says so."},
    {"remember_copy", fast(remember_copy), METH_FASTCALL, "A signature that was checked, and what serves it."},
    {"merge", fast(merge), METH_FASTCALL, "Two checked states as one: out and lse."},
    {"merge_again", fast(merge_again), METH_FASTCALL, "Two states as one, if their signature is remembered, else None."},
    {"merge_at_once", fast(merge_at_once), METH_FASTCALL, "As merge_again, unless one of those who watch says so."},
    {"remember_merge", fast(remember_merge), METH_FASTCALL, "A signature that was checked, and what serves it."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace pagedkv
