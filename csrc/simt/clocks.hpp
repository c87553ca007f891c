// The emulator's race detector: vector clocks over the accesses to shared memory.
//
//     clock[i][j]   the latest moment of thread j that thread i has seen. A moment of i ends when i synchronises
//                   with other threads
//     a write of j at moment m is ordered before i   iff   clock[i][j] >= m (or i == j)
//     a barrier     gives each thread that meets there the maximum of all their clocks
//
// The detector keeps, for every two bytes, the last write, and the last read of each warp. So it finds a race in
// any order of the fibers, except when two lanes of one warp read and only the earlier read races. Complexity: an
// access O(bytes / 2 * warps), a barrier of n threads O(n * threads).
#pragma once

#include <cstdint>
#include <vector>

namespace simt {

enum class State : uint8_t { UNWRITTEN, IN_FLIGHT, WRITTEN };

struct Race {
    const char* what = nullptr;  // nullptr: no race
    uint32_t other = 0;          // the other thread
};

class Clocks {
public:
    void begin_block(uint32_t threads, uint32_t shared_bytes);
    void synchronise(const std::vector<uint32_t>& threads);

    Race read(uint32_t thread, uint32_t at, uint32_t bytes);
    Race write(uint32_t thread, uint32_t at, uint32_t bytes, State becomes);

private:
    struct Cell {
        uint32_t moment;
        uint16_t writer;
        State state;
    };
    struct Reader {
        uint32_t moment;
        uint16_t thread;
    };
    bool has_seen(uint32_t thread, uint32_t other, uint32_t moment) const {
        return thread == other || clock_[thread][other] >= moment;
    }

    uint32_t threads_ = 0, warps_ = 0;
    std::vector<std::vector<uint32_t>> clock_;
    std::vector<uint32_t> joined_;
    std::vector<Cell> cells_;
    std::vector<Reader> readers_;
};

}  // namespace simt
