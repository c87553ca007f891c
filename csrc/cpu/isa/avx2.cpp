// AVX2 with FMA and F16C: x86 from 2013 on.
#if defined(__AVX2__)
#define PAGEDKV_AVX2
#define PAGEDKV_ISA avx2_isa
#define PAGEDKV_LINEAR_ISA avx2_linear
#define PAGEDKV_RECURRENT_ISA avx2_recurrent
#define PAGEDKV_STREAM_UNIT avx2_stream
#define PAGEDKV_NAME "avx2"
#define PAGEDKV_SUPPORTED \
    (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
#include "instruction_set.inc"
#endif
