// The state of a launch: the threads, what each of them waits for, and the block's shared memory. The files of the
// emulator share this header; kernels do not include it.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "clocks.hpp"
#include "fibers.hpp"
#include "simt.hpp"

namespace simt {

struct Operands {  // one lane's operands of multiply_add
    const uint32_t* a;
    uint32_t b[2];
    float* d;
    bool half;
};

void multiply_fragments(Operands* const (&lanes)[32]);
// Stop with a fault unless the current thread may access these bytes and their address is a multiple of `bytes`. `what`
// is the verb of the fault: "reads", "writes", "copies".
void check_global(const void* at, uint32_t bytes, const char* what);
void check_shared(uint32_t at, uint32_t bytes, const char* what);

struct Copy {
    uint32_t to;
    const void* from;
    uint32_t bytes;
    bool present;
};

struct Collective {  // a shuffle, vote or matrix instruction of a warp; complete when `arrived` == `mask`
    const char* kind;
    uint32_t mask, arrived;
    void* lanes[32];
};

struct Thread {
    Fiber fiber;
    std::string waits_for;  // empty: the thread can run, or is done
    bool done = false;
    std::vector<Copy> open;                // issued, not committed
    std::deque<std::vector<Copy>> groups;  // committed, oldest first
};

struct Barrier {
    uint32_t expected = 0;
    std::vector<uint32_t> arrived;
};

struct Machine {
    std::vector<std::unique_ptr<Thread>> threads;
    std::vector<std::vector<Collective>> collectives;  // incomplete ones of each warp
    Barrier barriers[16];
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
    void wait(std::string why);                         // suspend the current thread until wake()
    void wake(uint32_t thread);
    void check(const Race& race);                       // stop with a fault if there is a race
    [[noreturn]] void stop(const std::string& what);    // end the launch with a fault of the current thread
    void leave();                                       // end the current thread
    void next(Thread& from);                            // switch to another thread that can run
};

extern Machine machine;

}  // namespace simt
