#define PAGEDKV_LINEAR
#include "../isa/avx2.cpp"
