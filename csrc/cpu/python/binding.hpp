// A bound call: a layer and its options, checked and described once, and the kernel that serves it.
//
// attend and write (attention.cpp, moves.cpp) take a binding and the arguments that change from call to call. They
// return
//
//     the results    if the call keeps the contract, nothing of torch observes operators, and the kernel is set
//     an int         if only the kernel is missing: the kind of the call. Python chooses one: set_kernel(kind, ...)
//     None           else: the call takes torch's operator, whose checks (pagedkv/kernels/checks.py) have the words
//
// A **kind** is what the choice of a kernel depends on besides the binding itself: dtypes, the number of heads, whether
// there is a tree mask. cpu.py makes a binding for each call of an operator; such a call is checked already, and attend
// and write ask nothing. Caches are cold when a call comes, as each layer's kernel has swept them: the lines of memory
// that a call touches are what it costs.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <vector>

#include "call.hpp"
#include "tensors.hpp"

namespace pagedkv {

namespace py = pybind11;

enum { BOUND_K, BOUND_V, BOUND_K_SCALE, BOUND_V_SCALE, BOUND_CALIBRATION, BOUND_SINKS, BOUND_SLOPES, NUM_BOUND };
enum { BOUND_COS = BOUND_SINKS, BOUND_SIN };

// The kernel that serves calls of a kind: an instruction set of this extension, or a Python callable.
struct Server {
    int64_t kind = -1;
    const Isa* isa = nullptr;  // null where `serve` serves
    int threads = 0;           // 0: as many as torch's at each call
    py::object serve;          // takes the arguments of attend or write, with the results' tensors; or null
};

struct Binding {
    Server server;
    Attention attention{};  // what does not change from call to call
    Write write_k{}, write_v{};
    py::object objects[NUM_BOUND];
    Tensor tensors[NUM_BOUND];
};

// The rule for one tensor of a call, as pagedkv/kernels/checks.py has it: Python gives the rules at import.
struct Rule {
    int at;  // which argument of the call; past them, which tensor of the binding
    uint64_t kinds;  // a bit for each dtype; 0: the dtype of the first argument
    int dims, sizes[MOST_DIMS];
    bool at_least[MOST_DIMS], is_optional, has_rows, is_written;
};
enum { OF_T, OF_H, OF_K, OF_D, OF_DV, OF_B, OF_B_1, OF_A, OF_P, OF_MAX_SEQLEN_Q, NUM_SIZES };
enum Operation { ATTENTION, WRITE, MERGE, NUM_OPERATIONS };

// The sizes that are known before a call: -1 for a letter that the first tensor with it sets.
struct Sizes {
    int64_t of[NUM_SIZES];
    Sizes() { std::fill_n(of, +NUM_SIZES, -1); }
};

// Whether each of `count` arguments, and the bound tensors that have a rule, keep their rules, on the device of `on`.
bool keeps_rules(Operation, const Tensor* arguments, int count, const Tensor* bound, const Tensor& on, Sizes&);

const Isa& best_isa();                       // of this processor
const Isa& isa_of(const std::string& name);  // raises ValueError if this processor has no such instruction set

Binding& binding_of(py::handle capsule);
// A capsule around a new binding of these tensors; null if one cannot be described or lies on another device.
py::object new_binding(const py::object (&tensors)[NUM_BOUND]);

// True if a call must go through torch's dispatcher: a mode, a transform, a trace or the profiler is active;
// PAGEDKV_DEBUG asks for checks of values; gradients are enabled and one of the two new tensors or of the bound ones
// requires one; or a new one is a negative view, which the dispatcher writes out before an operator sees it.
bool is_observed(const Binding& b, PyObject* first, PyObject* second);
bool is_observed(PyObject* const* tensors, int count);  // of a call without a binding

bool names_a_kernel();  // whether a variable chooses a kernel, an instruction set or a number of threads

// like.new_empty(shape[, dtype=float32])
py::object new_tensor(PyObject* like, py::object shape, bool is_float32);

void prefetch(const Binding& b, PyObject* const* arguments, int count);
bool is_unchanged(const Binding& b);  // its tensors are plain, and have the memory and shapes that they had
int threads_of(const Server& server);
bool read_integer(PyObject* x, int64_t& to);  // false if `x` is no int, or too large

// Makes a function of CPython's calling convention from one that throws.
template <py::object (*RUN)(PyObject* const*), int COUNT>
PyObject* entry(PyObject*, PyObject* const* x, Py_ssize_t count) {
    try {
        if (count != COUNT) throw py::type_error("this function takes " + std::to_string(COUNT) + " arguments");
        return RUN(x).release().ptr();
    } catch (py::error_already_set& raised) {
        raised.restore();
    } catch (const py::builtin_exception& raised) {
        raised.set_error();
    } catch (const std::exception& failure) {  // memory or threads ran out
        PyErr_SetString(PyExc_RuntimeError, failure.what());
    }
    return nullptr;
}

// Adds RUN to the module as a function of CPython's fast calling convention.
template <py::object (*RUN)(PyObject* const*), int COUNT>
void define_fast(py::module_& m, const char* name, const char* doc) {
    static PyMethodDef method{name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(entry<RUN, COUNT>)),
                              METH_FASTCALL, doc};
    m.add_object(name, py::reinterpret_steal<py::object>(PyCFunction_New(&method, nullptr)));
}

constexpr int64_t MOST_THREADS = 4096;  // as pagedkv/debug.py has it
inline bool read_threads(PyObject* x, int64_t& to) { return read_integer(x, to) && to >= 1 && to <= MOST_THREADS; }

inline const Isa& isa_at(PyObject* name) {
    const char* text = PyUnicode_AsUTF8(name);
    if (!text) throw py::error_already_set();
    return isa_of(text);
}

inline bool is_float(const Tensor& t) { return t.code == 4 || (t.code == 2 && t.bits <= 32); }

// Compute without the GIL. Returns True, a reference to which may be taken only while the GIL is held.
template <class F>
py::object done(const F& compute) {
    {
        py::gil_scoped_release released;
        compute();
    }
    return py::reinterpret_borrow<py::object>(Py_True);
}

void define_bindings(py::module_& m);
void define_attention(py::module_& m);
void define_moves(py::module_& m);
void define_linear(py::module_& m);
void define_recurrent(py::module_& m);

}  // namespace pagedkv
