#define PAGEDKV_RECURRENT
#include "../isa/neon_bf16.cpp"
