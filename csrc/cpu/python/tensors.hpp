// A Python tensor as this extension sees one: address, shape and strides, read without torch's headers.
//
// torch offers DLPack's table of C functions (`Tensor.__dlpack_c_exchange_api__`, a stable ABI), one of which describes
// a tensor in a few nanoseconds. In a torch without it (before 2.10) the attributes of the tensor are read, which takes
// a microsecond each.
#pragma once

#include <Python.h>

#include <cstdint>
#include <string>

#include "call.hpp"

namespace pagedkv {

constexpr int MOST_DIMS = 4;
constexpr int CPU_DEVICE = 1;  // DLPack's number

struct Tensor {
    char* data;
    int64_t shape[MOST_DIMS], strides[MOST_DIMS];  // strides in elements; 0 past the last dim
    int32_t device_type, device_id, dims;
    uint8_t code, bits;  // of an element: DLPack's kind of number (0 int, 2 float, 4 bfloat, 6 bool), and its bits
    bool is_given;       // false for None: then all is 0
};

// `type` is torch.Tensor; `by_table` false reads attributes even where there is a table.
void register_tensor_type(PyObject* type, bool by_table);

// Describes a tensor, or None. False if `x` has more than MOST_DIMS dims or cannot be described (sparse, a fake, ...),
// or is not exactly a torch.Tensor while `any_class` is false. No exception is set.
bool read_tensor(PyObject* x, Tensor& tensor, bool any_class);

Dtype dtype_of(const Tensor& t);  // uint8: int4 weights
Dtype stored_type(const Tensor& t, bool is_value);  // of K or of V of a layer
View view_of(const Tensor& t);  // of its first three dims

uint64_t kind_named(const std::string& name);  // the bit of a dtype that torch calls by this name
uint64_t kind_of(const Tensor& t);             // the bit of the dtype of `t`; 0 for one that no call may have

// Facts of a tensor that the contract asks for.
bool is_beside(const Tensor& t, const Tensor& on);  // on the same device
bool same_type(const Tensor& a, const Tensor& b);
bool has_unit_stride(const Tensor& t);                                          // its last dim is contiguous
bool has_own_elements(const Tensor& t);  // no two of its elements share memory, as far as strides tell
int64_t stored_dim(const Tensor& t, bool is_value);  // elements in the last dim of K or of V

}  // namespace pagedkv
