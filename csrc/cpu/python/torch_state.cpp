// See torch_state.hpp.
#include "torch_state.hpp"

#include <cstdlib>
#include <cstring>

#include "isa/isas.hpp"

#if defined(__APPLE__)
#include <crt_externs.h>
#define environ (*_NSGetEnviron())
#else
extern char** environ;
#endif

namespace pagedkv {
namespace {

PyObject *observers = nullptr, *num_threads = nullptr, *grad_enabled = nullptr, *float32 = nullptr;
PyObject *requires_grad = nullptr, *is_neg = nullptr, *new_empty = nullptr, *dtype = nullptr;

// The truth of an answer, which is released. True, with no exception set, also if there is none: then the call takes
// the long way.
bool is_true(PyObject* answer) {
    int truth = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    if (truth < 0) PyErr_Clear();
    return truth != 0;
}

bool is_tensor(PyObject* x) { return x && x != Py_None; }

// register_torch(torch.Tensor, torch.float32, by_table, torch.get_num_threads, torch.is_grad_enabled, observers)
PyObject* register_torch(PyObject*, PyObject* const* x, Py_ssize_t count) {
    if (count != 6 || !PyTuple_Check(x[5]))
        return type_error("register_torch takes two types, a bool, two functions and a tuple");
    if (!register_tensor_type(x[0], x[2] == Py_True)) return nullptr;
    requires_grad = PyUnicode_InternFromString("requires_grad"), is_neg = PyUnicode_InternFromString("is_neg");
    new_empty = PyUnicode_InternFromString("new_empty"), dtype = PyUnicode_InternFromString("dtype");
    float32 = Py_NewRef(x[1]), num_threads = Py_NewRef(x[3]);
    grad_enabled = Py_NewRef(x[4]), observers = Py_NewRef(x[5]);
    Py_RETURN_NONE;
}

// The PAGEDKV_* variables as one string of bytes, None if it is too long. os.environ takes a microsecond for each.
PyObject* environment(PyObject*, PyObject* const*, Py_ssize_t) {
    char text[1024];
    size_t length = 0;
    for (char** variable = environ; variable && *variable; variable++) {
        if (std::strncmp(*variable, "PAGEDKV_", 8)) continue;
        size_t size = std::strlen(*variable) + 1;
        if (length + size > sizeof text) Py_RETURN_NONE;
        std::memcpy(text + length, *variable, size), length += size;
    }
    return PyBytes_FromStringAndSize(text, static_cast<Py_ssize_t>(length));
}

}  // namespace

bool is_observed(PyObject* const* tensors, int count, int count_new) {
    const char* level = std::getenv("PAGEDKV_DEBUG");
    if (!observers || (level && std::strcmp(level, "0"))) return true;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(observers); i++)
        if (is_true(PyObject_CallNoArgs(PyTuple_GET_ITEM(observers, i)))) return true;
    for (int i = 0; i < count_new; i++)
        if (is_tensor(tensors[i]) && is_true(PyObject_CallMethodNoArgs(tensors[i], is_neg))) return true;
    bool gradients = is_true(PyObject_CallNoArgs(grad_enabled));
    for (int i = 0; gradients && i < count; i++)
        if (is_tensor(tensors[i]) && is_true(PyObject_GetAttr(tensors[i], requires_grad))) return true;
    return false;
}

int torch_threads() {
    PyObject* count = PyObject_CallNoArgs(num_threads);
    int threads = count ? static_cast<int>(PyLong_AsLong(count)) : -1;
    Py_XDECREF(count);
    return threads;
}

bool read_integer(PyObject* x, int64_t& to) {
    return PyLong_CheckExact(x) && ((to = PyLong_AsLongLong(x)) != -1 || !PyErr_Occurred());
}

bool read_number(PyObject* x, double& to) {
    if (PyFloat_CheckExact(x)) return to = PyFloat_AS_DOUBLE(x), true;
    return PyLong_CheckExact(x) && ((to = PyLong_AsDouble(x)) != -1.0 || !PyErr_Occurred());
}

bool read_optional(PyObject* x, int64_t& to) { return x == Py_None ? (to = 0, true) : read_integer(x, to) && to > 0; }

PyObject* type_error(const char* text) { return PyErr_SetString(PyExc_TypeError, text), nullptr; }

const Isa* isa_of(PyObject* name) {
    const char* text = PyUnicode_Check(name) ? PyUnicode_AsUTF8(name) : nullptr;
    const Isa* isa = text ? isa_named(text) : nullptr;
    if (!isa && !PyErr_Occurred()) type_error("this processor has no such instruction set");
    return isa;
}

Dtype dtype_of(const Tensor& t) {
    if (t.code == 2) return t.bits == 32 ? Dtype::f32 : Dtype::f16;
    if (t.code == 4) return Dtype::bf16;
    return t.code == 10 ? Dtype::e4m3 : t.code == 12 ? Dtype::e5m2 : t.code == 0 ? Dtype::i8 : Dtype::i4;
}

View view_of(const Tensor& t) {
    View v;
    v.data = t.address();
    for (int d = 0; d < t.dims && d < 3; d++) v.stride[d] = t.strides[d] * t.bytes();
    return v;
}

PyObject* new_tensor(PyObject* like, PyObject* shape, bool is_float32) {
    if (!shape) return nullptr;
    PyObject* arguments[] = {like, shape, float32};
    PyObject* keywords = is_float32 ? PyTuple_Pack(1, dtype) : nullptr;
    PyObject* made = is_float32 && !keywords ? nullptr : PyObject_VectorcallMethod(new_empty, arguments, 2, keywords);
    Py_XDECREF(keywords), Py_DECREF(shape);
    return made;
}

PyMethodDef state_methods[] = {
    {"register_torch", fast_call(register_torch), METH_FASTCALL,
     "Register torch's types and callbacks: how to read a tensor, how many threads to use, what observes operators."},
    {"environment", fast_call(environment), METH_FASTCALL, "Return the PAGEDKV_* variables as one string of bytes."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace pagedkv
