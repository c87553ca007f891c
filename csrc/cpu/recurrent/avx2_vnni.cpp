#define PAGEDKV_RECURRENT
#include "../isa/avx2_vnni.cpp"
