// pagedkv.kernels._cpu: pointers, strides and sizes come in as integers, so nothing here depends on torch. pagedkv/kernels/cpu.py is the
// only caller; it trusts arguments that pagedkv/kernels/checks.py has seen.
//
// A tensor is a tuple (address, stride, stride, ...), strides in bytes; an absent one is ().
#include <pybind11/pybind11.h>

#include <cstring>

#include "calls.hpp"
#include "isas.hpp"
#include "schedule.hpp"
#include "team.hpp"

namespace py = pybind11;

namespace pagedkv {

const Isa* const ISAS[] = {
#if defined(__x86_64__)
    &avx512_bf16_isa, &avx512_isa, &avx2_isa,
#endif
    &portable_isa, nullptr,
};

const Isa* isa_named(const char* name) {
    for (const Isa* const* isa = ISAS; name && *isa; isa++)
        if (!std::strcmp(name, (*isa)->name) && (*isa)->supported()) return *isa;
    return nullptr;
}

namespace {

const Isa& named(const std::string& name) {
    if (const Isa* isa = isa_named(name.c_str())) return *isa;
    throw py::value_error("this processor has no " + name);
}

View view(const py::tuple& tensor) {
    View v;
    if (tensor.empty()) return v;
    v.data = reinterpret_cast<char*>(tensor[0].cast<uintptr_t>());
    for (size_t i = 1; i < tensor.size(); i++) v.stride[i - 1] = tensor[i].cast<int64_t>();
    return v;
}

py::tuple sets() {
    py::list names;
    for (const Isa* const* isa = ISAS; *isa; isa++)
        if ((*isa)->supported()) names.append((*isa)->name);
    return py::tuple(names);
}

// sizes: T K D S new_type kv_type scale_per_token_head half interleaved; angles: cos sin positions, () where half is 0
void write(const std::string& isa, int threads, const py::tuple& sizes, const py::tuple& fresh, const py::tuple& pool, const py::tuple& scale,
           const py::tuple& slots, const py::tuple& angles) {
    const auto size = [&](size_t i) { return sizes[i].cast<int64_t>(); };
    Write w{};
    w.K = size(1), w.D = size(2), w.S = size(3);
    w.new_type = static_cast<Dtype>(size(4)), w.kv_type = static_cast<Dtype>(size(5)), w.scale_per_token_head = size(6) != 0;
    w.fresh = view(fresh), w.pool = view(pool), w.scale = view(scale);
    View at = view(slots);
    w.slots = at.data, w.slots_stride = at.stride[0];
    w.half = size(7), w.interleaved = size(8) != 0;
    const auto angle = [&](size_t i) { return view(angles[i].cast<py::tuple>()); };
    if (w.half) w.cos = angle(0), w.sin = angle(1), w.positions = angle(2);
    const Isa& set = named(isa);
    int64_t tokens = size(0);
    py::gil_scoped_release released;
    run_write(set, w, tokens, threads);
}

void copy(const py::tuple& storage, int64_t bytes, const py::tuple& copies, int64_t count, int threads) {
    View frames = view(storage), pairs = view(copies);
    py::gil_scoped_release released;
    run_copies(frames.data, frames.stride[0], bytes, pairs.data, pairs.stride[0], count, threads);
}

uint64_t read(const std::string& isa, int threads, uintptr_t base, uintptr_t offsets, int64_t count, int64_t bytes) {
    const Isa& set = named(isa);
    py::gil_scoped_release released;
    return run_read(set, reinterpret_cast<const char*>(base), reinterpret_cast<const int64_t*>(offsets), count, bytes, threads);
}

}  // namespace
}  // namespace pagedkv

PYBIND11_MODULE(_cpu, m) {
    m.doc() = "CPU kernels over raw pointers and strides; see pagedkv/kernels/cpu.py.";
    m.def("sets", pagedkv::sets, "Names of the instruction sets that were compiled and that this processor has, best first.");
    m.def("runtime", pagedkv::team_runtime, "Where threads come from: \"OpenMP\" (the process's own runtime) or \"threads\".");
    if (PyModule_AddFunctions(m.ptr(), pagedkv::call_methods)) throw py::error_already_set();
    m.def("write", pagedkv::write);
    m.def("copy", pagedkv::copy);
    m.def("read", pagedkv::read, "Load and xor `count` runs of `bytes`: the ceiling that benchmarks compare with.");
}
