#define PAGEDKV_RECURRENT
#include "../isa/avx512.cpp"
