#define PAGEDKV_STREAM
#include "../isa/avx2.cpp"
