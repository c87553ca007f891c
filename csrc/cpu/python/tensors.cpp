// See tensors.hpp.
#include "tensors.hpp"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>

namespace py = pybind11;

namespace pagedkv {
namespace {

// DLPack's DLTensor, and its DLPackExchangeAPI, of whose functions one is used here.
struct Described {
    void* data;
    int32_t device_type, device_id, dims;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};
struct Table {
    uint32_t major, minor;
    void *older, *allocate, *own, *make;
    int (*describe)(void* tensor, Described* out);
    void* stream;
};

PyTypeObject* tensor_type = nullptr;
const Table* table = nullptr;

// The dtypes that a call may have, by torch's names and DLPack's numbers.
const struct { const char* name; uint8_t code, bits; } KINDS[] = {
    {"torch.float32", 2, 32}, {"torch.bfloat16", 4, 16}, {"torch.float16", 2, 16}, {"torch.float8_e4m3fn", 10, 8},
    {"torch.float8_e5m2", 12, 8}, {"torch.int8", 0, 8}, {"torch.uint8", 1, 8}, {"torch.int32", 0, 32},
    {"torch.int64", 0, 64}, {"torch.bool", 6, 8}, {"torch.float64", 2, 64},
};

uint64_t bit_of(uint8_t code, uint8_t bits) {
    return code < 16 ? uint64_t{1} << (4 * code + (bits >= 16) + (bits >= 32) + (bits >= 64)) : 0;
}

bool describe(PyObject* x, Tensor& t) {
    Described d;
    if (table->describe(x, &d)) return PyErr_Clear(), false;
    if (d.dims > MOST_DIMS || d.lanes != 1) return false;
    std::copy_n(d.shape, d.dims, t.shape), std::copy_n(d.strides, d.dims, t.strides);
    t.data = d.data ? static_cast<char*>(d.data) + d.byte_offset : nullptr;
    t.device_type = d.device_type, t.device_id = d.device_id, t.dims = d.dims, t.code = d.code, t.bits = d.bits;
    return true;
}

bool read_attributes(py::handle x, Tensor& t) {
    try {
        auto shape = py::cast<std::vector<int64_t>>(x.attr("shape"));
        auto strides = py::cast<std::vector<int64_t>>(x.attr("stride")());
        std::string device = py::str(x.attr("device")), dtype = py::str(x.attr("dtype"));
        if (shape.size() > MOST_DIMS || device != "cpu") return false;
        std::copy(shape.begin(), shape.end(), t.shape), std::copy(strides.begin(), strides.end(), t.strides);
        t.data = reinterpret_cast<char*>(py::cast<uintptr_t>(x.attr("data_ptr")()));
        t.device_type = 1, t.dims = static_cast<int32_t>(shape.size());
        for (const auto& kind : KINDS)
            if (dtype == kind.name) return t.code = kind.code, t.bits = kind.bits, true;
    } catch (const std::exception&) {  // an attribute is missing, or of another type
    }
    return false;
}

}  // namespace

void register_tensor_type(PyObject* type, bool by_table) {
    tensor_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(type)), table = nullptr;
    py::object capsule = by_table ? py::getattr(type, "__dlpack_c_exchange_api__", py::none()) : py::none();
    if (capsule.is_none()) return;
    const auto* found = static_cast<const Table*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (found && found->major == 1) table = found;
    PyErr_Clear();
}

bool read_tensor(PyObject* x, Tensor& t, bool any_class) {
    std::memset(&t, 0, sizeof t);  // so that equal tensors are equal in each byte
    if (x == Py_None) return true;
    bool is_plain = Py_TYPE(x) == tensor_type;
    if (!is_plain && !any_class) return false;
    bool is_empty = false;
    t.is_given = is_plain && table ? describe(x, t) : read_attributes(x, t);
    for (int i = 0; i < t.dims; i++) is_empty |= !t.shape[i];
    return t.is_given && (t.data || is_empty);
}

Dtype dtype_of(const Tensor& t) {
    if (t.code == 2) return t.bits == 32 ? Dtype::f32 : Dtype::f16;
    if (t.code == 4) return Dtype::bf16;
    return t.code == 10 ? Dtype::e4m3 : t.code == 12 ? Dtype::e5m2 : t.code == 0 ? Dtype::i8 : Dtype::i4;
}

Dtype stored_type(const Tensor& t, bool is_value) {
    return t.code != 1 ? dtype_of(t) : is_value ? Dtype::c4 : Dtype::i5;
}

View view_of(const Tensor& t) {
    int64_t bytes = t.bits / 8;
    return {t.data, {t.strides[0] * bytes, t.strides[1] * bytes, t.strides[2] * bytes}};
}

uint64_t kind_named(const std::string& name) {
    for (const auto& kind : KINDS)
        if (kind.name + 6 == name) return bit_of(kind.code, kind.bits);  // without "torch."
    throw py::value_error("no call has the dtype " + name);
}

uint64_t kind_of(const Tensor& t) { return bit_of(t.code, t.bits); }

bool same_type(const Tensor& a, const Tensor& b) { return a.code == b.code && a.bits == b.bits; }

bool is_beside(const Tensor& t, const Tensor& on) {
    return t.device_type == on.device_type && t.device_id == on.device_id;
}

bool has_unit_stride(const Tensor& t) { return t.shape[t.dims - 1] <= 1 || t.strides[t.dims - 1] == 1; }

bool has_own_elements(const Tensor& t) {
    std::pair<int64_t, int64_t> steps[MOST_DIMS] = {};  // (stride, elements beyond the first) of each dim
    for (int i = 0; i < t.dims; i++) {
        if (!t.shape[i]) return true;
        if (t.shape[i] > 1) steps[i] = {t.strides[i], t.shape[i] - 1};
    }
    std::sort(steps, steps + MOST_DIMS);
    int64_t span = 1;
    for (const auto& [stride, others] : steps) {
        if (others && stride < span) return false;
        span += stride * others;
    }
    return true;
}

int64_t stored_dim(const Tensor& t, bool is_value) {
    int64_t length = t.shape[t.dims - 1];
    return t.code != 1 ? length : is_value ? length * 2 : length * 8 / 5;
}

}  // namespace pagedkv
