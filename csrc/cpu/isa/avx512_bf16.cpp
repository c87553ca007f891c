// AVX-512 with bfloat16 dot products, VNNI and VBMI: Sapphire Rapids, Zen 4 and later.
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__) && defined(__AVX512VNNI__)
#define PAGEDKV_AVX512
#define PAGEDKV_BF16_DOT
#define PAGEDKV_ISA avx512_bf16_isa
#define PAGEDKV_LINEAR_ISA avx512_bf16_linear
#define PAGEDKV_RECURRENT_ISA avx512_bf16_recurrent
#define PAGEDKV_STREAM_UNIT avx512_bf16_stream
#define PAGEDKV_NAME "avx512_bf16"
#define PAGEDKV_SUPPORTED                                                                                             \
    (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && \
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16") &&                                 \
        __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni"))
#include "instruction_set.inc"
#endif
