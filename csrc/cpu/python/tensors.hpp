// A Python tensor as this extension sees one: address, shape and strides, read without torch's headers.
//
// torch offers DLPack's table of C functions (`Tensor.__dlpack_c_exchange_api__`, a stable ABI), one of which describes
// a tensor in a few nanoseconds. In a torch without it (before 2.10) the attributes of the tensor are read, which takes
// a microsecond each.
#pragma once

#include <Python.h>

#include <cstdint>

namespace pagedkv {

constexpr int MOST_DIMS = 4;

// The layout is DLPack's DLTensor.
struct Described {
    void* data;
    int32_t device_type, device_id, dims;
    uint8_t code, bits;  // of an element: DLPack's kind of number, and how many bits of it
    uint16_t lanes;
    int64_t *shape, *strides;  // strides in elements
    uint64_t byte_offset;
};

struct Tensor : Described {
    int64_t own[2 * MOST_DIMS];  // shape and strides, where the attributes were asked
    int64_t bytes() const { return bits / 8; }
    char* address() const { return static_cast<char*>(data) + byte_offset; }
};

// `type` is torch.Tensor; `by_table` false asks for attributes even where there is a table. False, with an exception
// set, if it is no type.
bool register_tensor_type(PyObject* type, bool by_table);

// False if `x` has more than MOST_DIMS dims or cannot be described (sparse, a fake, ...), or is not exactly a
// torch.Tensor while `any_class` is false. No exception is set.
bool read_tensor(PyObject* x, Tensor& tensor, bool any_class);

}  // namespace pagedkv
