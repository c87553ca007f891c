// Who touched which bytes of shared memory, and what is ordered before what: the emulator's race detector.
//
//     clock[i][j]   the latest moment of thread j that thread i knows of. A moment of i ends when i passes a barrier.
//     a write of j at moment m is ordered before i   iff   clock[i][j] >= m (or i == j); a barrier makes all who meet know what any knows
//
// Kept for every two bytes: the last write, and the last read of each warp. So a race is found whatever order the fibers ran in, unless two
// lanes of one warp read and only the earlier read races. Complexity: an access O(bytes / 2 * warps), a meeting of n threads O(n * threads).
#pragma once

#include <cstdint>
#include <vector>

namespace simt {

enum class State : uint8_t { UNWRITTEN, IN_FLIGHT, WRITTEN };

struct Clash {
    const char* what = nullptr;  // nullptr: no objection
    uint32_t other = 0;          // the thread in question
};

class Clocks {
public:
    void begin_block(uint32_t threads, uint32_t shared_bytes);
    void meet(const std::vector<uint32_t>& threads);

    Clash read(uint32_t thread, uint32_t at, uint32_t bytes);
    Clash write(uint32_t thread, uint32_t at, uint32_t bytes, State becomes);

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
    bool knows(uint32_t thread, uint32_t other, uint32_t moment) const { return thread == other || clock_[thread][other] >= moment; }

    uint32_t threads_ = 0, warps_ = 0;
    std::vector<std::vector<uint32_t>> clock_;
    std::vector<uint32_t> joined_;
    std::vector<Cell> cells_;
    std::vector<Reader> readers_;
};

}  // namespace simt
