// Questions of the entry points to torch and Python: does a part of torch observe operators, how many threads to use,
// new tensors for results. And arguments of plain types as numbers. This file knows no operation and no kernel.
#pragma once

#include <Python.h>

#include <cstdint>
#include <exception>
#include <string>

#include "contract.hpp"
#include "tensors.hpp"

namespace pagedkv {

// True if a call must go through torch's dispatcher: a mode, a transform, a trace or the profiler is active;
// PAGEDKV_DEBUG asks for checks of values; gradients are enabled and one of `tensors` requires one; or one of the first
// `count_new` is a negative view, which the dispatcher writes out before an operator sees it. Null and None are no
// tensors.
bool is_observed(PyObject* const* tensors, int count, int count_new);

int torch_threads();  // torch.get_num_threads(); -1, with an exception set, if it raised

// The number in an argument that torch would hand over unchanged. False if the type is another; then an exception may
// be set.
bool read_integer(PyObject* x, int64_t& to);
bool read_number(PyObject* x, double& to);
bool read_optional(PyObject* x, int64_t& to);  // a positive integer; 0 for None

PyObject* type_error(const char* text);  // sets a TypeError and returns null
// null, with a TypeError set, if this processor has no instruction set of that name
const Isa* isa_of(PyObject* name);

Dtype dtype_of(const Tensor& t);
View view_of(const Tensor& t);  // of its first three dims

// like.new_empty(shape[, dtype=float32]). Steals `shape`; null stays null.
PyObject* new_tensor(PyObject* like, PyObject* shape, bool is_float32);

// Runs `work` without the interpreter's lock. False, with an exception set, where memory or threads ran out.
template <class F>
bool run_unlocked(const F& work) {
    std::string why;
    PyThreadState* state = PyEval_SaveThread();
    try {
        work();
    } catch (const std::exception& failure) {
        why = failure.what();
    }
    PyEval_RestoreThread(state);
    if (!why.empty()) PyErr_SetString(PyExc_RuntimeError, why.c_str());
    return why.empty();
}

typedef PyObject* (*FastCall)(PyObject* self, PyObject* const* arguments, Py_ssize_t count);
inline PyCFunction fast_call(FastCall function) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

extern PyMethodDef state_methods[];  // register_torch, environment

}  // namespace pagedkv
