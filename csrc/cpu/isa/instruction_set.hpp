// One instruction set's kernels: this file is compiled once per set, with that set's flags. The source that includes it defines
//
//     PAGEDKV_ISA, PAGEDKV_NAME   its `Isa`              PAGEDKV_SUPPORTED   does this processor have it?
//     PAGEDKV_AVX512 / PAGEDKV_AVX2 / PAGEDKV_BF16_DOT   what it may use
//
// Everything lies in an anonymous namespace and nothing of the standard library is used: no function of this source can be taken by the
// linker for another's.
#include "contract.hpp"

#if defined(PAGEDKV_AVX512) || defined(PAGEDKV_AVX2)
#include <immintrin.h>
#endif

namespace pagedkv {
namespace {

#include "vectors.hpp"
#include "elements.hpp"
#if defined(PAGEDKV_AVX512)
#include "operands.hpp"
#endif
#include "modes.hpp"
#if defined(PAGEDKV_AVX512)
#include "packed.hpp"
#endif
#include "attend.hpp"
#if defined(PAGEDKV_AVX512)
#include "stream.hpp"
#endif
#include "write.hpp"
#include "merge.hpp"
#include "probe.hpp"

#if defined(PAGEDKV_BF16_DOT)

// bfloat16 arithmetic serves queries in bfloat16 over what is bfloat16 exactly; all else is computed in float32.
bool in_pairs(const Attention& a) { return a.q_type == Dtype::bf16 && a.kv_type != Dtype::f32 && a.kv_type != Dtype::f16; }

void attend(const Attention& a, const Unit& u, const Room& room, char* memory) {
    if (stream_unit(a, u, room, memory)) return;
    in_pairs(a) ? walk_unit<Brain>(a, u, room, memory) : walk_unit<Floats>(a, u, room, memory);
}

#else

void attend(const Attention& a, const Unit& u, const Room& room, char* memory) {
#if defined(PAGEDKV_AVX512)
    if (stream_unit(a, u, room, memory)) return;
#endif
    walk_unit<Floats>(a, u, room, memory);
}

#endif

void merge(const Attention& a, const Unit& first, int64_t parts, const Room& room, char* memory) {
    merge_units(a, first, parts, room, memory);
}

bool supported() { return PAGEDKV_SUPPORTED; }

}  // namespace

extern const Isa PAGEDKV_ISA = {PAGEDKV_NAME, supported, attend, merge, write_tokens, merge_rows, read_runs};

}  // namespace pagedkv
