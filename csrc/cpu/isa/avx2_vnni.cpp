// AVX2 with AVX-VNNI: Intel desktops from 2021 on.
#if defined(__AVXVNNI__)
#define PAGEDKV_AVX2
#define PAGEDKV_AVX_VNNI
#define PAGEDKV_ISA avx2_vnni_isa
#define PAGEDKV_LINEAR_ISA avx2_vnni_linear
#define PAGEDKV_RECURRENT_ISA avx2_vnni_recurrent
#define PAGEDKV_STREAM_UNIT avx2_vnni_stream
#define PAGEDKV_NAME "avx2_vnni"
#define PAGEDKV_SUPPORTED                                                                                       \
    (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&       \
        __builtin_cpu_supports("avxvnni"))
#include "instruction_set.inc"
#endif
