#define PAGEDKV_STREAM
#include "../isa/avx2_vnni.cpp"
