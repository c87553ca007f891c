#define PAGEDKV_RECURRENT
#include "../isa/avx512_bf16.cpp"
