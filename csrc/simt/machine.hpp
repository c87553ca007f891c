// The state of a launch: threads, what each waits for, the block's shared memory. Shared by the files of the emulator, not by kernels.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "clocks.hpp"
#include "fibers.hpp"
#include "simt.hpp"

namespace simt {

struct Operands {  // of multiply_add, one lane's
    const uint32_t* a;
    uint32_t b[2];
    float* d;
    bool half;
};

void multiply_fragments(Operands* const (&lanes)[32]);
void check_global(const void* at, uint32_t bytes, const char* what);  // a fault unless it may be touched, at a multiple of `bytes`
void check_shared(uint32_t at, uint32_t bytes, const char* what);

struct Copy {
    uint32_t to;
    const void* from;
    uint32_t bytes;
    bool present;
};

struct Meeting {  // of lanes of a warp; complete when `arrived` == `mask`
    const char* kind;
    uint32_t mask, arrived;
    void* lanes[32];
};

struct Thread {
    Fiber fiber;
    std::string waits_for;  // empty: it can run, or is done
    bool done = false;
    bool waited = false;  // for the grid before
    std::vector<Copy> open;                // issued, not committed
    std::deque<std::vector<Copy>> groups;  // committed, oldest first
};

struct Barrier {
    uint32_t expected = 0;
    std::vector<uint32_t> arrived;
};

struct Bulk {  // a copy that counts itself off
    uint32_t to;
    const void* from;
    uint32_t bytes;
};

struct Mbarrier {
    uint32_t at, arrivals, pending, parity = 0;  // parity: of the phase that is not over
    int64_t missing = 0;  // bytes expected and not landed
    uint32_t owner;       // who initialised it
    bool fenced = false;
    std::vector<Bulk> under_way;
    std::vector<uint32_t> waiting;
};

struct Run {  // of bytes in global memory
    const char* start;
    uint64_t bytes;
};

struct Machine {
    std::vector<std::unique_ptr<Thread>> threads;
    std::vector<std::vector<Meeting>> meetings;  // of each warp
    Barrier barriers[16];
    std::vector<Mbarrier> mbarriers;
    std::vector<Run> wrote, early;  // by this launch; by the one before, which may still run
    std::vector<uint32_t> runnable;
    std::vector<unsigned char> shared;
    Clocks clocks;
    Fiber host;
    uint32_t current = 0, block = 0, blocks = 0, num_done = 0;
    uint64_t random = 1;
    void (*kernel)(const void*) = nullptr;
    const void* params = nullptr;
    std::string fault;

    uint32_t draw(uint32_t below);
    void run_block(uint32_t index, uint32_t shared_bytes);
    void wait(std::string why);                         // until wake()
    void wake(uint32_t thread);
    void object(const Clash& clash);                    // a fault, if it is one
    [[noreturn]] void stop(const std::string& what);    // a fault of the current thread
    void leave();                                       // the current thread runs no more
    void next(Thread& from);
};

extern Machine machine;

}  // namespace simt
