#define PAGEDKV_LINEAR
#include "../isa/portable.cpp"
