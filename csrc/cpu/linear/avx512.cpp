#define PAGEDKV_LINEAR
#include "../isa/avx512.cpp"
