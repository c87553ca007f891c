#define PAGEDKV_RECURRENT
#include "../isa/neon.cpp"
