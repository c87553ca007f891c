// Who touched which bytes of shared memory, and what is ordered before what: the emulator's race detector.
//
//     clock[i][j]   the latest moment of thread j that thread i knows of. A moment of i ends when i passes a barrier.
//     a write of j at moment m is ordered before i   iff   clock[i][j] >= m (or i == j); a barrier makes all who meet know what any knows
//
// An mbarrier is a thread of these clocks, too: who arrives tells it what he knows, and what its copies bring is written by it. When a phase
// ends, what it knows is kept, and who waits for the phase learns that. Copies that go round the threads' own path (the async proxy) must come
// after a fence: `fenced` is a clock as `clock` is, of the moments that lie before a fence which i knows of.
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
    static constexpr uint32_t MOST_BARRIERS = 64;

    void begin_block(uint32_t threads, uint32_t shared_bytes);
    void meet(const std::vector<uint32_t>& threads);
    void fence(uint32_t thread);                            // all that `thread` knows of comes before copies issued later
    void arrive(uint32_t thread, uint32_t barrier);         // `barrier` knows what `thread` does
    void end_phase(uint32_t barrier);
    void learn(uint32_t thread, uint32_t barrier);          // what was known when its last phase ended
    uint32_t of_barrier(uint32_t barrier) const { return threads_ + barrier; }  // as a thread

    Clash read(uint32_t thread, uint32_t at, uint32_t bytes);
    Clash write(uint32_t thread, uint32_t at, uint32_t bytes, State becomes);
    Clash issue(uint32_t thread, uint32_t barrier, uint32_t at, uint32_t bytes);  // of a copy that counts itself off at `barrier`
    void land(uint32_t barrier, uint32_t at, uint32_t bytes);

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
    void join(std::vector<std::vector<uint32_t>>& clock, const std::vector<uint32_t>& threads);

    std::vector<std::vector<uint32_t>> clock_, fenced_, ended_;
    std::vector<uint32_t> joined_;
    std::vector<Cell> cells_;
    std::vector<Reader> readers_;
};

}  // namespace simt
