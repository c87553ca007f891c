// See known.hpp.
#include "known.hpp"

#include <memory>
#include <vector>

#include "isa/isas.hpp"

#if defined(__APPLE__)
#include <crt_externs.h>
#define environ (*_NSGetEnviron())
#else
extern char** environ;
#endif

namespace pagedkv {
namespace {

constexpr uint64_t PLACES = 256;

struct Known {
    std::vector<int64_t> words;
    std::string variables;
    PyObject* registry;  // kept alive, so its address stays its own
    Server server;  // its `serve` is kept alive, too
    bool is(const Signature& s, PyObject* asked) const {
        return registry == asked && words.size() == static_cast<size_t>(s.count) && variables.size() == s.length &&
               !std::memcmp(words.data(), s.words, 8 * words.size()) && !std::memcmp(variables.data(), s.variables, s.length);
    }
};

std::unique_ptr<Known> known[PLACES];
PyObject *watchers = nullptr, *num_threads = nullptr, *grad_enabled = nullptr, *wants_gradient = nullptr, *is_negative = nullptr;
PyObject *fresh_name = nullptr, *dtype_name = nullptr, *float32 = nullptr;

std::unique_ptr<Known>& place_of(const Signature& s) {
    uint64_t h = 0;
    for (int i = 0; i < s.count; i++) h = (h ^ static_cast<uint64_t>(s.words[i])) * 0x9e3779b97f4a7c15u, h ^= h >> 29;
    return known[h % PLACES];
}

int torch_threads() {
    PyObject* count = PyObject_CallNoArgs(num_threads);
    int threads = count ? static_cast<int>(PyLong_AsLong(count)) : -1;
    Py_XDECREF(count);
    return threads;
}

// The answer to a question; yes, with no exception set, also if asking failed.
bool says_yes(PyObject* x) {
    int yes = x ? PyObject_IsTrue(x) : -1;
    Py_XDECREF(x);
    if (yes < 0) PyErr_Clear();
    return yes != 0;
}

}  // namespace

bool Signature::put_choice(PyObject* backend) {
    bool automatic = backend == Py_None || (PyUnicode_Check(backend) && !PyUnicode_CompareWithASCIIString(backend, "auto"));
    put(int64_t{automatic});
    if (!automatic) {
        Py_ssize_t size = 0;
        const char* name = PyUnicode_Check(backend) ? PyUnicode_AsUTF8AndSize(backend, &size) : nullptr;
        if (!name || static_cast<size_t>(size) >= sizeof variables) return false;
        std::memcpy(variables, name, size + 1), length = size + 1;
    }
    for (char** variable = environ; variable && *variable; variable++) {
        if (std::strncmp(*variable, "PAGEDKV_", 8)) continue;
        size_t size = std::strlen(*variable) + 1;
        if (length + size > sizeof variables) return false;
        std::memcpy(variables + length, *variable, size), length += size;
    }
    return true;
}

Server server_of(const Signature& s, PyObject* registry) {
    const Known* found = place_of(s).get();
    if (!found || !found->is(s, registry)) return {nullptr, 0, nullptr};
    Server server = found->server;  // not `found`, which another thread may replace meanwhile
    Py_XINCREF(server.serve);
    if (server.isa && !server.threads) server.threads = torch_threads();
    return server;
}

void keep(const Signature& s, PyObject* registry, const Server& server) noexcept {
    std::unique_ptr<Known> one;
    try {
        one.reset(new Known{{s.words, s.words + s.count}, {s.variables, s.length}, registry, server});
    } catch (const std::bad_alloc&) {
        return;
    }
    Py_INCREF(registry), Py_XINCREF(server.serve);
    one.swap(place_of(s));
    if (one) Py_XDECREF(one->server.serve), Py_DECREF(one->registry);  // which may run anything: only when the place is in order
}

bool nobody_watches(PyObject* const* floats, int count) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(watchers); i++)
        if (says_yes(PyObject_CallNoArgs(PyTuple_GET_ITEM(watchers, i)))) return false;
    bool gradients = says_yes(PyObject_CallNoArgs(grad_enabled));
    for (int i = 0; i < count; i++) {
        if (floats[i] == Py_None) continue;
        if (says_yes(PyObject_CallMethodNoArgs(floats[i], is_negative))) return false;
        if (gradients && says_yes(PyObject_GetAttr(floats[i], wants_gradient))) return false;
    }
    return true;
}

bool whole(PyObject* x, int64_t& to) { return PyLong_CheckExact(x) && ((to = PyLong_AsLongLong(x)) != -1 || !PyErr_Occurred()); }

bool number(PyObject* x, double& to) {
    if (PyFloat_CheckExact(x)) return to = PyFloat_AS_DOUBLE(x), true;
    return PyLong_CheckExact(x) && ((to = PyLong_AsDouble(x)) != -1.0 || !PyErr_Occurred());
}

bool optional(PyObject* x, int64_t& to) { return x == Py_None ? (to = 0, true) : whole(x, to) && to > 0; }

PyObject* refused(const char* text) { return PyErr_SetString(PyExc_TypeError, text), nullptr; }

const Isa* isa_of(PyObject* name) {
    const char* text = PyUnicode_AsUTF8(name);
    const Isa* isa = text ? isa_named(text) : nullptr;
    if (!isa) refused("this processor has no such instruction set");
    return isa;
}

Dtype dtype_of(const Tensor& t) {
    if (t.code == 2) return t.bits == 32 ? Dtype::f32 : Dtype::f16;
    return t.code == 4 ? Dtype::bf16 : t.code == 10 ? Dtype::e4m3 : t.code == 12 ? Dtype::e5m2 : t.code == 0 ? Dtype::i8 : Dtype::i4;
}

View view_of(const Tensor& t) {
    View v;
    v.data = t.address();
    for (int d = 0; d < t.dims && d < 3; d++) v.stride[d] = t.strides[d] * t.bytes();
    return v;
}

PyObject* fresh(PyObject* like, PyObject* shape, bool is_float32) {
    if (!shape) return nullptr;
    PyObject* arguments[] = {like, shape, float32};
    PyObject* keywords = is_float32 ? PyTuple_Pack(1, dtype_name) : nullptr;
    PyObject* made = is_float32 && !keywords ? nullptr : PyObject_VectorcallMethod(fresh_name, arguments, 2, keywords);
    Py_XDECREF(keywords), Py_DECREF(shape);
    return made;
}

PyObject* meet(PyObject*, PyObject* const* x, Py_ssize_t count) {
    if (count != 6 || !PyTuple_Check(x[5])) return refused("meet takes Tensor, float32, a bool, get_num_threads, is_grad_enabled and a tuple");
    if (!meet_tensors(x[0], x[2] == Py_True)) return nullptr;
    fresh_name = PyUnicode_InternFromString("new_empty"), dtype_name = PyUnicode_InternFromString("dtype");
    wants_gradient = PyUnicode_InternFromString("requires_grad"), is_negative = PyUnicode_InternFromString("is_neg");
    float32 = Py_NewRef(x[1]), num_threads = Py_NewRef(x[3]), grad_enabled = Py_NewRef(x[4]), watchers = Py_NewRef(x[5]);
    Py_RETURN_NONE;
}

}  // namespace pagedkv
