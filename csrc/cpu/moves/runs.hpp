// Copies of runs of bytes: see runs.cpp.
#pragma once

#include <cstdint>

namespace pagedkv {

void copy_run(char* to, const char* from, int64_t bytes);

// bytes: 241 or more. checksum: the 16 bytes of the digest.
void copy_summed(char* to, const char* from, int64_t bytes, char* checksum);

}  // namespace pagedkv
