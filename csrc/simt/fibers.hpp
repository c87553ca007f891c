// Fibers: a stack each, and a switch that saves what a call must save. It knows nothing of CUDA.
//
// On x86-64 the switch is 16 instructions; elsewhere ucontext does it, ten times slower. AddressSanitizer is told of every switch.
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

    // A fresh stack frame at `entry`, which must never return.
    void prepare(void (*entry)());

    // Runs `next` until something switches back to *this.
    void switch_to(Fiber& next);

    static constexpr size_t STACK = 128 << 10;

private:
    std::unique_ptr<char[]> stack_;
#ifdef SIMT_OWN_SWITCH
    void* pointer_ = nullptr;
#else
    ucontext_t context_;
#endif
    const void* bottom_ = nullptr;  // of the stack, for AddressSanitizer; of the host thread's own once it has been left
    size_t size_ = 0;
    friend void fiber_begins();
};

// The first thing an entry does.
void fiber_begins();

}  // namespace simt
