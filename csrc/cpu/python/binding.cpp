// See binding.hpp.
#include "binding.hpp"

#include <algorithm>
#include <utility>

#include "torch_state.hpp"

namespace pagedkv {
namespace {

PyTypeObject* binding_type = nullptr;

// `seen` outlives the call: it points to shape and strides of its own.
void keep_description(const Tensor& t, Tensor& seen) {
    seen = t;
    std::copy(t.shape, t.shape + t.dims, seen.own), std::copy(t.strides, t.strides + t.dims, seen.own + MOST_DIMS);
    seen.shape = seen.own, seen.strides = seen.own + MOST_DIMS;
}

void dealloc(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    Binding& b = binding_of(self);
    for (Server& server : b.servers) Py_CLEAR(server.serve);
    for (Bound& tensor : b.tensors) Py_CLEAR(tensor.object);
    type->tp_free(self), Py_DECREF(type);
}

// add_server(kind, isa, threads, serve): an instruction set's name, or None and a callable. The oldest of too many is
// forgotten.
PyObject* add_server(PyObject* self, PyObject* const* x, Py_ssize_t count) {
    int64_t kind, threads;
    if (count != 4 || !read_integer(x[0], kind) || !read_integer(x[2], threads))
        return PyErr_Clear(), type_error("add_server takes a kind, a name, a number of threads and a callable");
    bool is_ours = x[3] == Py_None;
    const Isa* isa = is_ours ? isa_of(x[1]) : nullptr;
    if (is_ours && !isa) return nullptr;
    Binding& b = binding_of(self);
    Server added{kind, isa, static_cast<int>(threads), is_ours ? nullptr : Py_NewRef(x[3])};
    std::swap(b.servers[b.next_server], added);
    b.num_servers = std::max(b.num_servers, ++b.next_server), b.next_server %= Binding::MOST_SERVERS;
    Py_XDECREF(added.serve);  // this may run any code: only now that the table is in order
    Py_RETURN_NONE;
}

PyMethodDef binding_methods[] = {
    {"attend", fast_call(attend_bound), METH_FASTCALL, "Attend: results, the kind that has no kernel yet, or None."},
    {"attend_checked", fast_call(attend_checked), METH_FASTCALL, "Attend: a call that Python has checked."},
    {"write", fast_call(write_bound), METH_FASTCALL, "Store: True, the kind that has no kernel yet, or None."},
    {"write_checked", fast_call(write_checked), METH_FASTCALL, "Store: a call that Python has checked."},
    {"add_server", fast_call(add_server), METH_FASTCALL, "Register the kernel that serves calls of a kind."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_doc, const_cast<char*>("A layer and options that were checked once, and the kernels that serve them.")},
    {Py_tp_methods, binding_methods},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {0, nullptr},
};

PyType_Spec spec = {"pagedkv.kernels._cpu.Binding", sizeof(Binding), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};

}  // namespace

Binding& binding_of(PyObject* self) { return *reinterpret_cast<Binding*>(self); }

void prefetch(const Binding& b, const void* call, size_t bytes) {
    const auto fetch = [](const void* from, size_t size) {
        for (size_t at = 0; at < size; at += 64) __builtin_prefetch(static_cast<const char*>(from) + at);
    };
    fetch(call, bytes), fetch(b.servers, sizeof b.servers[0]);
    for (const Bound& tensor : b.tensors)
        if (tensor.object) fetch(&tensor.seen, sizeof tensor.seen);
}

Binding* new_binding(Op op, PyObject* const* tensors) {
    Tensor seen[Binding::MOST_TENSORS];
    for (int i = 0; i < Binding::MOST_TENSORS; i++) {
        bool is_pool = i == BOUND_K || i == BOUND_V;
        if (tensors[i] == Py_None && is_pool) return nullptr;
        if (tensors[i] == Py_None) continue;
        if (!read_tensor(tensors[i], seen[i], true) || !is_beside(seen[i], seen[0])) return nullptr;
        if (is_pool && seen[i].dims != 4) return nullptr;
    }
    if (!binding_type) binding_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
    PyObject* self = binding_type ? binding_type->tp_alloc(binding_type, 0) : nullptr;  // all zeros
    if (!self) return nullptr;
    Binding& b = binding_of(self);
    b.op = op;
    for (int i = 0; i < Binding::MOST_TENSORS; i++)
        if (tensors[i] != Py_None) b.tensors[i].object = Py_NewRef(tensors[i]), keep_description(seen[i],
            b.tensors[i].seen);
    return &b;
}

bool is_unchanged(const Binding& b) {
    for (const Bound& tensor : b.tensors) {
        if (!tensor.object) continue;
        Tensor now;
        const Tensor& seen = tensor.seen;
        if (!read_tensor(tensor.object, now, false) || now.address() != seen.address()
            || now.dims != seen.dims) return false;
        if (now.code != seen.code || now.bits != seen.bits || !is_beside(now, seen)) return false;
        for (int i = 0; i < now.dims; i++)
            if (now.shape[i] != seen.own[i] || now.strides[i] != seen.own[MOST_DIMS + i]) return false;
    }
    return true;
}

const Server* server_of(const Binding& b, int64_t kind) {
    for (int i = 0; i < b.num_servers; i++)
        if (b.servers[i].kind == kind) return &b.servers[i];
    return nullptr;
}

View bound_view(const Binding& b, int i) { return b.tensors[i].object ? view_of(b.tensors[i].seen) : View{}; }

bool is_int(const Tensor& t, int bits, int dims, const Tensor& on) {
    return t.code == 0 && t.bits == bits && t.dims == dims && is_beside(t, on);
}

bool is_float32(const Tensor& t, int dims, const Tensor& on) { return t.code == 2 && t.bits == 32 && t.dims == dims
    && is_beside(t, on); }

bool is_beside(const Tensor& t, const Tensor& on) { return t.device_type == on.device_type
    && t.device_id == on.device_id; }

bool has_unit_stride(const Tensor& t) { return t.shape[t.dims - 1] <= 1 || t.strides[t.dims - 1] == 1; }

bool has_own_elements(const Tensor& t) {
    int order[MOST_DIMS], count = 0;  // dims of more than one element, by stride
    for (int i = 0; i < t.dims; i++) {
        if (!t.shape[i]) return true;
        int at = count;
        for (; t.shape[i] > 1 && at > 0 && t.strides[order[at - 1]] > t.strides[i]; at--) order[at] = order[at - 1];
        if (t.shape[i] > 1) order[at] = i, count++;
    }
    int64_t span = 1;
    for (int i = 0; i < count; i++) {
        if (t.strides[order[i]] < span) return false;
        span += t.strides[order[i]] * (t.shape[order[i]] - 1);
    }
    return true;
}

int64_t head_dim_of(const Tensor& t) { return t.shape[t.dims - 1] * (t.code == 1 ? 2 : 1); }

}  // namespace pagedkv
