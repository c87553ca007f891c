// Copies of runs of bytes: see runs.cpp.
#pragma once

#include <cstdint>

namespace pagedkv {

typedef uint64_t Words __attribute__((vector_size(16)));

// A copy of `count` runs of `bytes` each, piece by piece.
// sums: 16 bytes for the checksum of each run, which then has 241 bytes or more; nullptr for none.
class Copy {
public:
    static constexpr int64_t PIECE = 256 << 10;

    Copy(char* const* to, const char* const* from, int64_t count, int64_t bytes, char* sums);

    bool is_done() const { return !bytes_left(); }
    int64_t bytes_left() const { return (count - run) * bytes - done; }

    // Copy the next PIECE bytes, or those up to the end of the run, and return how many. Another thread may go on.
    int64_t piece();

private:
    char* const* const to;
    const char* const* const from;
    const int64_t count, bytes;
    char* const sums;
    int64_t run = 0, done = 0;  // done: bytes of this run
    Words mixed[4];  // the sums of this run so far
};

}  // namespace pagedkv
