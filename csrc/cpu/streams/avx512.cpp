#define PAGEDKV_STREAM
#include "../isa/avx512.cpp"
