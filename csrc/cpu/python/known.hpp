// The memory of calls that were checked, by signature; and what calls.cpp and moves.cpp ask of Python.
//
// Whether a call keeps the contract and which kernel serves it depend on its **signature** alone, as long as PAGEDKV_DEBUG does not ask for
// values to be looked at: dtype, device, shape and strides of each tensor, options, backend, the registry and the PAGEDKV_* variables. So
// Python checks the first call of a signature and has it remembered; all that follow are computed at once. What differs in anything is not
// known and goes Python's way. Signatures are compared whole: a hash only says where to look. One to a place: the later forgets the earlier.
//
// All this is written for caches that are cold, as they are after each kernel: what counts is how many lines of memory a call touches.
#pragma once

#include <Python.h>

#include <cstdint>
#include <cstring>
#include <exception>
#include <string>

#include "contract.hpp"
#include "tensors.hpp"

namespace pagedkv {

enum class Op : int64_t { attention, write, copy, merge };

struct Signature {
    static constexpr int ROOM = 192;  // 14 tensors of 1 + 2 * MOST_DIMS words, and what follows them
    int64_t words[ROOM];
    int count = 0;
    char variables[512];
    size_t length = 0;
    explicit Signature(Op op) { put(static_cast<int64_t>(op)); }
    void put(int64_t x) { words[count++] = x; }
    void put(double x) { std::memcpy(words + count++, &x, sizeof x); }
    void put(const Tensor& t) {
        put(int64_t{t.code} | int64_t{t.bits} << 8 | int64_t{t.dims} << 16 | int64_t{t.device_type} << 24 | int64_t{t.device_id} << 40);
        for (int i = 0; i < t.dims; i++) put(t.shape[i]), put(t.strides[i]);
    }
    bool put_choice(PyObject* backend);  // and the variables; false if there is no saying what it chooses
};

struct Server {
    const Isa* isa;  // null if the signature is not known, or `serve` serves it
    int threads;
    PyObject* serve;  // takes a call's fields; owned by who asked. Null where these kernels serve
};

Server server_of(const Signature& s, PyObject* registry);

// threads 0: as many as torch's at each call. Without memory for it, the signature stays unknown: the call that it was of went well.
void keep(const Signature& s, PyObject* registry, const Server& server) noexcept;

// False if something of torch's wants to see operators, or one of these (None or a tensor) wants a gradient or is a view whose numbers are
// the negatives of those in memory (the imaginary part of a conjugate), which the dispatcher writes out before an operator sees it.
bool nobody_watches(PyObject* const* floats, int count);

// Arguments of the plain types that torch hands over unchanged; false otherwise, and an exception may be set.
bool whole(PyObject* x, int64_t& to);
bool number(PyObject* x, double& to);
bool optional(PyObject* x, int64_t& to);  // a positive number; 0 for None

PyObject* refused(const char* text);  // null, and a TypeError
const Isa* isa_of(PyObject* name);     // null, and a TypeError, if this processor has none of that name

Dtype dtype_of(const Tensor& t);
View view_of(const Tensor& t);  // of its first three dims

// Runs `work` without the interpreter's lock. False with an exception set where memory or threads ran out.
template <class F>
bool released(const F& work) {
    std::string why;
    PyThreadState* held = PyEval_SaveThread();
    try {
        work();
    } catch (const std::exception& failure) {
        why = failure.what();
    }
    PyEval_RestoreThread(held);
    if (!why.empty()) PyErr_SetString(PyExc_RuntimeError, why.c_str());
    return why.empty();
}

typedef PyObject* (*Fast)(PyObject* self, PyObject* const* arguments, Py_ssize_t count);
inline PyCFunction fast(Fast function) { return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)); }

PyObject* fresh(PyObject* like, PyObject* shape, bool is_float32);  // like.new_empty(shape[, dtype=float32]); takes `shape`, null or not

// meet(torch.Tensor, torch.float32, by_table, torch.get_num_threads, torch.is_grad_enabled, watchers)
PyObject* meet(PyObject* self, PyObject* const* arguments, Py_ssize_t count);

}  // namespace pagedkv
