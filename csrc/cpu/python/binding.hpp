// A bound call: a layer and its options, checked and described once, and the kernels that serve it.
//
// Binding.attend and Binding.write (attention.cpp, moves.cpp) take the arguments that change from call to call and
// return
//
//     the results    if the call keeps the contract, nothing of torch observes operators, and a kernel is registered
//     an int         if only the kernel is missing: the kind. Python chooses a kernel and calls add_server(kind, ...)
//     None           else: the call takes torch's operator, whose checks (pagedkv/kernels/checks.py) have the words
//
// A **kind** is what the choice of a kernel depends on besides the binding itself: dtypes, the number of heads, whether
// there is a tree mask. The tensors of the binding are described anew in each call: a layer whose memory moved (set_,
// resize_) is served by the operator. Caches are cold when a call comes, as each layer's kernel has swept them: the
// lines of memory that a call touches are what it costs.
#pragma once

#include <Python.h>

#include "contract.hpp"
#include "tensors.hpp"

namespace pagedkv {

enum class Op { attention, write };

// A tensor that the binding keeps alive, or null; and its description when it was bound.
struct Bound {
    PyObject* object;
    Tensor seen;
};

// The kernel that computes calls of a kind: an instruction set of this extension, or a Python callable.
struct Server {
    int64_t kind;
    const Isa* isa;   // null where `serve` serves
    int threads;      // 0: as many as torch's at each call
    PyObject* serve;  // takes the arguments of attend or write, the results made; or null
};

struct Binding {
    PyObject_HEAD
    static constexpr int MOST_TENSORS = 6, MOST_SERVERS = 8;
    Op op;
    // attention: k, v, k_scale, v_scale, sinks, alibi_slopes; write: k, v, k_scale, v_scale, cos, sin
    Bound tensors[MOST_TENSORS];
    Server servers[MOST_SERVERS];
    int num_servers, next_server;
    Attention attention;          // all that does not change from call to call
    Write write_k, write_v;
};

enum { BOUND_K, BOUND_V, BOUND_K_SCALE, BOUND_V_SCALE, BOUND_SINKS, BOUND_SLOPES, BOUND_COS = BOUND_SINKS, BOUND_SIN };

// A binding that holds the six tensors; null, perhaps without an exception, if one cannot be described or lies on
// another device.
Binding* new_binding(Op op, PyObject* const* tensors);

Binding& binding_of(PyObject* self);
// the lines of `b` that every call reads, and those of its `call`
void prefetch(const Binding& b, const void* call, size_t bytes);
// its tensors are plain, and have the memory and shapes that they had
bool is_unchanged(const Binding& b);
const Server* server_of(const Binding& b, int64_t kind);    // null if there is none yet
View bound_view(const Binding& b, int i);

// Facts of a tensor that the contract asks for.
bool is_int(const Tensor& t, int bits, int dims, const Tensor& on);   // signed, on the device of `on`
bool is_float32(const Tensor& t, int dims, const Tensor& on);
bool is_beside(const Tensor& t, const Tensor& on);                     // on the same device
bool has_unit_stride(const Tensor& t);                                // its last dim is contiguous
// no two of its elements share memory, as far as strides tell
bool has_own_elements(const Tensor& t);
int64_t head_dim_of(const Tensor& t);                                 // elements in the last dim: two int4 in a byte

extern PyMethodDef attention_methods[], move_methods[];
PyObject* attend_bound(PyObject* self, PyObject* const* arguments, Py_ssize_t count);
PyObject* attend_checked(PyObject* self, PyObject* const* arguments, Py_ssize_t count);
PyObject* write_bound(PyObject* self, PyObject* const* arguments, Py_ssize_t count);
PyObject* write_checked(PyObject* self, PyObject* const* arguments, Py_ssize_t count);

}  // namespace pagedkv
