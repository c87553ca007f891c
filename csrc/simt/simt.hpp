// A CUDA grid on one host thread: the functions that a kernel may call. This file knows nothing of attention.
//
// Blocks run one after another in random order. A CUDA thread is a fiber; the scheduler picks a random fiber that can
// run, and runs it until it must wait. The emulator faults where a kernel relies on behaviour that CUDA leaves
// undefined:
//
//     shared memory     NaN until written. Each access must be inside the block's memory, aligned, and to bytes that
//                       were written before. A barrier or a wait must order it after the last conflicting access of
//                       another thread (vector clocks, see clocks.hpp).
//     copy_async        lands only when the copying thread waits for it. The target is poisoned as soon as the copy is
//                       issued.
//     collectives       shuffles, votes and matrix instructions need all lanes of the mask. If some are missing, the
//                       fault says where each lane waits.
//     barriers          are named and have counts. If no thread can run, the fault says what each thread waits for.
//     global memory     each access must be inside a registered allocation, and aligned.
//     grids             run one after another.
//
// A fault ends the launch; `simt_launch` returns its text. The emulator does not show the memory model between blocks,
// bank conflicts, or speed.
#pragma once

#include <cstdint>

namespace simt {

uint32_t thread_index();
uint32_t block_index();
uint32_t num_blocks();

void sync_block();
void sync_team(uint32_t id, uint32_t threads);
void sync_warp(uint32_t mask);
uint64_t shuffle(uint32_t mask, uint64_t value, uint32_t source);
uint32_t ballot(uint32_t mask, bool vote);

void global_read(void* to, const void* from, uint32_t bytes);
void global_write(void* to, const void* from, uint32_t bytes);
uint64_t count_up(void* at, uint64_t least);

void shared_read(void* to, uint32_t from, uint32_t bytes);
void shared_write(uint32_t to, const void* from, uint32_t bytes);
void copy_async(uint32_t to, const void* from, uint32_t bytes, bool present);
void copy_commit();
void copy_wait(uint32_t pending);

void load_matrices(uint32_t (&m)[4], uint32_t at, bool transposed);
void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bool half);

float to_float(uint16_t bits, bool half);      // half: float16; else bfloat16
uint16_t from_float(float x, bool half);       // round to nearest even
float of_e4m3(uint32_t byte);
uint32_t nearest_byte(float x, bool e5m2);     // the nearest 8-bit float, saturating; a tie goes to the even code

}  // namespace simt

extern "C" {
// Register an allocation of the device, which kernels may touch.
void simt_allow(const void* start, uint64_t bytes);
// Forget all allocations.
void simt_forbid_all();
// Run kernel(params) on a grid; return nullptr, or the text of the fault.
const char* simt_launch(void (*kernel)(const void*), const void* params, uint32_t blocks, uint32_t threads,
                        uint32_t shared_bytes, uint64_t seed);
}
