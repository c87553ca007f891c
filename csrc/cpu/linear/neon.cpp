#define PAGEDKV_LINEAR
#include "../isa/neon.cpp"
