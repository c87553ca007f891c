// Fibers: each has a stack of its own; a switch saves the registers that a function call preserves. This file knows
// nothing of CUDA.
//
// On x86-64 a switch is 16 instructions; elsewhere ucontext switches, ten times slower. Every switch is announced to
// AddressSanitizer.
#pragma once

#include <cstddef>
#include <memory>

#if defined(__x86_64__)
#define SIMT_OWN_SWITCH 1
#else
#include <ucontext.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace simt {

class Fiber {
public:
    Fiber() = default;
    Fiber(const Fiber&) = delete;

    // Set the fiber to begin at `entry`, with a fresh stack. `entry` must never return.
    void prepare(void (*entry)());

    // Run `next`, until a fiber switches back to *this.
    void switch_to(Fiber& next);

    static constexpr size_t STACK = 128 << 10;

private:
    std::unique_ptr<char[]> stack_;
#ifdef SIMT_OWN_SWITCH
    void* pointer_ = nullptr;
#else
    ucontext_t context_;
#endif
    // The bottom of the stack, for AddressSanitizer. The host's fiber learns that of the host thread at its first
    // switch.
    const void* bottom_ = nullptr;
    size_t size_ = 0;
    friend void fiber_begins();
};

// Finish the switch into a new fiber; an entry calls it first.
void fiber_begins();

}  // namespace simt
