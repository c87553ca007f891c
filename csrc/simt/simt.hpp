// A CUDA grid on one host thread: what a kernel may ask of it. It knows nothing of attention.
//
// Blocks run one after another in random order. A CUDA thread is a fiber; of those that can run, a random one runs until it must wait.
// Everything that is left undefined on a device is made to hurt here, at the line that leaves it so:
//
//     shared memory     NaN until written. Every access is checked: inside the block's memory, aligned, written before; and ordered by a
//                       barrier or a wait after the last access of another thread that conflicts with it (vector clocks, see clocks.hpp).
//     copy_async        nothing lands before the wait of the thread that copies; what was there is poisoned at once.
//     copy_bulk         nothing lands before somebody waits at its mbarrier and all have arrived; then copies land in random order until as many
//                       bytes have as were expected. Seen by those who waited. What the block touched there before must be fenced.
//     collectives       a warp meets for shuffles, votes, matrices: all lanes of the mask or a fault that says where each one waits.
//     barriers          named, with counts; when nobody can run, a fault names who waits for what.
//     global memory     only inside registered allocations, aligned.
//     grids             run one after another; what the one before wrote may not be touched before wait_for_last_grid if this one begins early,
//                       and all threads of that one must have waited when they end.
//
// A fault ends the launch; its text is what `simt_launch` returns. Not shown: the memory model between blocks, bank conflicts, speed.
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

void wait_for_last_grid();
void global_read(void* to, const void* from, uint32_t bytes);
void global_write(void* to, const void* from, uint32_t bytes);
uint32_t atomic_add(uint32_t* at, uint32_t value);

void shared_read(void* to, uint32_t from, uint32_t bytes);
void shared_write(uint32_t to, const void* from, uint32_t bytes);
void copy_async(uint32_t to, const void* from, uint32_t bytes, bool present);
void copy_commit();
void copy_wait(uint32_t pending);

void barrier_init(uint32_t at, uint32_t arrivals);
void fence_async(bool of_barriers);
void barrier_arrive(uint32_t at, uint32_t expected_bytes);
void barrier_wait(uint32_t at, uint32_t parity);
void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier);

void load_matrices(uint32_t (&m)[4], uint32_t at, bool transposed);
void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bool half);

float to_float(uint16_t bits, bool half);      // of float16, or bfloat16
uint16_t from_float(float x, bool half);       // round to nearest even
uint32_t nearest_byte(float x, bool e5m2);     // of the 8-bit floats, saturating; a tie goes to the even one

}  // namespace simt

extern "C" {
void simt_allow(const void* start, uint64_t bytes);  // an allocation of the device
void simt_forbid_all();
// What the launch wrote, run by run; false past the last.
bool simt_wrote(uint64_t number, const void** start, uint64_t* bytes);
// The next launch begins early, after one that wrote these bytes (and others of further calls).
void simt_begin_early(const void* start, uint64_t bytes);
// Runs kernel(params) on a grid; returns nullptr, or the fault.
const char* simt_launch(void (*kernel)(const void*), const void* params, uint32_t blocks, uint32_t threads, uint32_t shared_bytes, uint64_t seed);
}
