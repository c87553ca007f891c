#define PAGEDKV_STREAM
#include "../isa/avx512_bf16.cpp"
