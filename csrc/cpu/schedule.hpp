// From a call to units of work, and from units to threads: see schedule.cpp.
#pragma once

#include "call.hpp"

namespace pagedkv {

void run_attention(const Isa& isa, const Attention& a, int threads);
void run_write(const Isa& isa, const Write& w, int64_t tokens, int threads);
void run_gather(const Isa& isa, const Gather& g, int64_t rows, int threads);
void run_merge(const Isa& isa, const States& s, int threads);
void run_linear(const Isa& isa, const Linear& l, int threads);
void run_add_normed(const Isa& isa, const AddNormed& a);
void run_norm_rotate(const Isa& isa, const NormRotate& h, int threads);
void run_delta(const Isa& isa, const DeltaRule& d, int64_t tokens, int threads);
void run_conv(const Isa& isa, const CausalConv& c, int64_t tokens, int threads);
void run_copies(
    char* frames, int64_t stride, int64_t bytes, const char* copies, int64_t copies_stride, int64_t count, int threads);
uint64_t run_read(const Isa& isa, const char* base, const int64_t* offsets, int64_t count, int64_t bytes, int threads);

}  // namespace pagedkv
