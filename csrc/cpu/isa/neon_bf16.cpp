// Arm with dot products of bytes and of bfloat16 (BFDOT): Neoverse V1 and N2, Cortex-X2, and later.
#if defined(__linux__) && defined(__ARM_FEATURE_DOTPROD) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include <sys/auxv.h>
#define PAGEDKV_ISA neon_bf16_isa
#define PAGEDKV_LINEAR_ISA neon_bf16_linear
#define PAGEDKV_RECURRENT_ISA neon_bf16_recurrent
#define PAGEDKV_NAME "neon_bf16"
#define PAGEDKV_SUPPORTED (getauxval(AT_HWCAP) >> 20 & getauxval(AT_HWCAP2) >> 14 & 1)  // ASIMDDP, BF16
#include "instruction_set.inc"
#endif
