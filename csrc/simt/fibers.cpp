// The switch between fibers. See fibers.hpp.
#include "fibers.hpp"

#include <cstdint>

#ifdef SIMT_OWN_SWITCH
extern "C" void simt_switch(void** save, void* load);
asm(R"(
.text
.hidden simt_switch
.globl simt_switch
.type simt_switch, @function
simt_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size simt_switch, .-simt_switch
)");
#endif

namespace simt {

namespace {
Fiber* previous = nullptr;  // the fiber that the last switch left
}

void fiber_begins() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &previous->bottom_, &previous->size_);
#endif
}

void Fiber::prepare(void (*entry)()) {
    if (!stack_) stack_.reset(new char[STACK]);
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(stack_.get(), STACK);  // stack frames of an abandoned fiber are gone
#endif
    bottom_ = stack_.get();
    size_ = STACK;
#ifdef SIMT_OWN_SWITCH
    auto top = reinterpret_cast<uintptr_t>(stack_.get() + STACK) & ~uintptr_t{15};
    auto* frame = reinterpret_cast<void**>(top - 16);
    *frame = reinterpret_cast<void*>(entry);  // `ret` jumps here; the stack is then as after a call
    pointer_ = frame - 6;
#else
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack_.get();
    context_.uc_stack.ss_size = STACK;
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
#endif
}

void Fiber::switch_to(Fiber& next) {
    previous = this;
#if defined(__SANITIZE_ADDRESS__)
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, next.bottom_, next.size_);
#endif
#ifdef SIMT_OWN_SWITCH
    simt_switch(&pointer_, next.pointer_);
#else
    swapcontext(&context_, &next.context_);
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake, &previous->bottom_, &previous->size_);
#endif
}

}  // namespace simt
