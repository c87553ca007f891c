// AVX-512 F, BW, DQ and VL: servers from 2017 on.
#if defined(__AVX512F__)
#define PAGEDKV_AVX512
#define PAGEDKV_ISA avx512_isa
#define PAGEDKV_LINEAR_ISA avx512_linear
#define PAGEDKV_RECURRENT_ISA avx512_recurrent
#define PAGEDKV_STREAM_UNIT avx512_stream
#define PAGEDKV_NAME "avx512"
#define PAGEDKV_SUPPORTED                                                                                             \
    (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && \
        __builtin_cpu_supports("avx512vl"))
#include "instruction_set.inc"
#endif
