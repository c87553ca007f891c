// Arm with dot products of bytes (SDOT): Neoverse N1, Cortex-A76, and later. Every 64-bit Arm has the rest.
#if defined(__linux__) && defined(__ARM_FEATURE_DOTPROD)
#include <sys/auxv.h>
#define PAGEDKV_ISA neon_isa
#define PAGEDKV_LINEAR_ISA neon_linear
#define PAGEDKV_RECURRENT_ISA neon_recurrent
#define PAGEDKV_NAME "neon"
#define PAGEDKV_SUPPORTED (getauxval(AT_HWCAP) >> 20 & 1)  // HWCAP_ASIMDDP, which old headers lack
#include "instruction_set.inc"
#endif
