#define PAGEDKV_LINEAR
#include "../isa/avx512_bf16.cpp"
