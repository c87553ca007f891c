#define PAGEDKV_RECURRENT
#include "../isa/avx2.cpp"
