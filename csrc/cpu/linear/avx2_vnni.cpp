#define PAGEDKV_LINEAR
#include "../isa/avx2_vnni.cpp"
