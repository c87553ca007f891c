// See tensors.hpp.
#include "tensors.hpp"

#include <cstring>

namespace pagedkv {
namespace {

struct Version {
    uint32_t major, minor;
};

// DLPack's DLPackExchangeAPI; of its functions one is used here.
struct Table {
    Version version;
    void* older;
    void *allocate, *own, *make;
    int (*describe)(void* tensor, Described* out);
    void* stream;
};

PyTypeObject* tensor_type = nullptr;
const Table* table = nullptr;

struct Kind {
    const char* name;
    uint8_t code, bits;
};

// The dtypes that a call may have, by torch's names and DLPack's numbers.
const Kind KINDS[] = {
    {"torch.float32", 2, 32},      {"torch.bfloat16", 4, 16},    {"torch.float16", 2, 16},
    {"torch.float8_e4m3fn", 10, 8},
    {"torch.float8_e5m2", 12, 8}, {"torch.int8", 0, 8},         {"torch.uint8", 1, 8},    {"torch.int32", 0, 32},
    {"torch.int64", 0, 64},       {"torch.bool", 6, 8},
};

// A reference to a Python object, released at the end of its scope.
struct Owned {
    PyObject* object;
    explicit Owned(PyObject* object) : object(object) {}
    Owned(const Owned&) = delete;
    ~Owned() { Py_XDECREF(object); }
};

bool integers(PyObject* tuple, int64_t* to) {
    Py_ssize_t count = tuple && PyTuple_Check(tuple) ? PyTuple_GET_SIZE(tuple) : MOST_DIMS + 1;
    for (Py_ssize_t i = 0; i < count && count <= MOST_DIMS; i++) to[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i));
    return count <= MOST_DIMS && !PyErr_Occurred();
}

bool ask(PyObject* x, Tensor& t) {
    Owned shape(PyObject_GetAttrString(x, "shape")), strides(PyObject_CallMethod(x, "stride", nullptr));
    Owned data(PyObject_CallMethod(x, "data_ptr", nullptr)), dtype(PyObject_GetAttrString(x, "dtype"));
    Owned device(PyObject_GetAttrString(x, "device"));
    Owned type(device.object ? PyObject_GetAttrString(device.object, "type") : nullptr);
    Owned name(dtype.object ? PyObject_Str(dtype.object) : nullptr);
    if (!data.object || !name.object || !type.object) return false;
    if (!integers(shape.object, t.own) || !integers(strides.object, t.own + MOST_DIMS)) return false;
    if (PyUnicode_CompareWithASCIIString(type.object, "cpu")) return false;
    t.data = PyLong_AsVoidPtr(data.object), t.byte_offset = 0, t.lanes = 1;
    t.device_type = 1, t.device_id = 0, t.dims = static_cast<int32_t>(PyTuple_GET_SIZE(shape.object));
    t.shape = t.own, t.strides = t.own + MOST_DIMS;
    for (const Kind& kind : KINDS) {
        if (PyUnicode_CompareWithASCIIString(name.object, kind.name)) continue;
        t.code = kind.code, t.bits = kind.bits;
        return !PyErr_Occurred();
    }
    return false;
}

}  // namespace

bool register_tensor_type(PyObject* type, bool by_table) {
    if (!PyType_Check(type)) return PyErr_SetString(PyExc_TypeError, "torch.Tensor is a type"), false;
    Py_INCREF(type);
    tensor_type = reinterpret_cast<PyTypeObject*>(type), table = nullptr;
    Owned capsule(by_table ? PyObject_GetAttrString(type, "__dlpack_c_exchange_api__") : nullptr);
    if (capsule.object) {
        const Table* found = static_cast<const Table*>(PyCapsule_GetPointer(capsule.object, "dlpack_exchange_api"));
        if (found && found->version.major == 1) table = found;
    }
    PyErr_Clear();
    return true;
}

bool read_tensor(PyObject* x, Tensor& tensor, bool any_class) {
    bool plain = Py_TYPE(x) == tensor_type;
    if (!plain && !any_class) return false;
    bool described = plain && table ? table->describe(x, &tensor) == 0 : ask(x, tensor);
    if (!described) PyErr_Clear();
    bool empty = false;
    for (int i = 0; described && i < tensor.dims; i++) empty |= !tensor.shape[i];
    return described && tensor.dims <= MOST_DIMS && tensor.lanes == 1 && (tensor.data || empty);
}

}  // namespace pagedkv
