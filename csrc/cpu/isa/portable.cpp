// Any processor: vectors of four floats, as the compiler makes them.
#define PAGEDKV_ISA portable_isa
#define PAGEDKV_LINEAR_ISA portable_linear
#define PAGEDKV_RECURRENT_ISA portable_recurrent
#define PAGEDKV_NAME "portable"
#define PAGEDKV_SUPPORTED true
#include "instruction_set.inc"
