#define PAGEDKV_LINEAR
#include "../isa/neon_bf16.cpp"
