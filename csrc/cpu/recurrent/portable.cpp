#define PAGEDKV_RECURRENT
#include "../isa/portable.cpp"
