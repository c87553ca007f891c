// The module pagedkv.kernels._cpu. It does not depend on torch's headers: tensors.cpp reads tensors through DLPack. Its
// callers are pagedkv/kernels/cpu.py, with calls that pagedkv/kernels/checks.py has checked, and bound.py. Calls with
// tensors: attention.cpp, moves.cpp.
#include <pybind11/pybind11.h>

#include <algorithm>

#include "binding.hpp"
#include "isa/isas.hpp"
#include "schedule.hpp"
#include "team.hpp"

namespace pagedkv {

const Isa* const ISAS[] = {
#if defined(__x86_64__) && !defined(PAGEDKV_WITHOUT_AVX512_BF16)
    &avx512_bf16_isa,
#endif
#if defined(__x86_64__) && !defined(PAGEDKV_WITHOUT_AVX512)
    &avx512_isa,
#endif
#if defined(__x86_64__) && !defined(PAGEDKV_WITHOUT_AVX2_VNNI)
    &avx2_vnni_isa,
#endif
#if defined(__x86_64__) && !defined(PAGEDKV_WITHOUT_AVX2)
    &avx2_isa,
#endif
#if defined(__aarch64__) && defined(__linux__) && !defined(PAGEDKV_WITHOUT_NEON_BF16)
    &neon_bf16_isa,
#endif
#if defined(__aarch64__) && defined(__linux__) && !defined(PAGEDKV_WITHOUT_NEON)
    &neon_isa,
#endif
    &portable_isa, nullptr,
};

const Isa& best_isa() {
    auto is_supported = [](const Isa* isa) { return isa->supported(); };
    static const Isa* const best = *std::find_if(std::begin(ISAS), std::end(ISAS), is_supported);
    return *best;
}

const Isa& isa_of(const std::string& name) {
    for (const Isa* const* isa = ISAS; *isa; isa++)
        if (name == (*isa)->name && (*isa)->supported()) return **isa;
    throw py::value_error("this processor has no " + name);
}

namespace {

py::tuple sets() {
    py::list names;
    for (const Isa* const* isa = ISAS; *isa; isa++)
        if ((*isa)->supported()) names.append((*isa)->name);
    return py::tuple(names);
}

uint64_t read(const std::string& isa, int threads, uintptr_t base, uintptr_t offsets, int64_t count, int64_t bytes) {
    const Isa& set = isa_of(isa);
    py::gil_scoped_release released;
    return run_read(set, reinterpret_cast<const char*>(base), reinterpret_cast<const int64_t*>(offsets), count, bytes,
        threads);
}

}  // namespace
}  // namespace pagedkv

PYBIND11_MODULE(_cpu, m) {
    m.doc() = "CPU kernels over raw pointers and strides; see pagedkv/kernels/cpu.py.";
    m.def("sets", pagedkv::sets,
        "Return the names of the compiled instruction sets that this processor has, best first.");
    m.def("use_own_team", pagedkv::use_own_team,
        "Have the calls of this thread run on our own threads (True) or torch's. Returns what was chosen before.");
    pagedkv::define_bindings(m), pagedkv::define_attention(m), pagedkv::define_moves(m);
    pagedkv::define_linear(m), pagedkv::define_recurrent(m);
    m.def("read", pagedkv::read, "Load and xor `count` runs of `bytes`: the ceiling that benchmarks compare with.");
}
