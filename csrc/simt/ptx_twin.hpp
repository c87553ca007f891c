// The functions of csrc/cuda/ptx.cuh for the host, by calls of the emulator. This file knows no kernel.
//
// The emulator converts 16-bit floats by integer arithmetic of its own, round to nearest even, so that a mistake in a
// kernel's bit operations is not repeated here.
#pragma once

#include <cmath>
#include <cstring>

#include "simt.hpp"

#define CUDA_ARCH SIMT_ARCH
#define DEVICE static inline
#define DEVICE_MEMBER inline
#define NOINLINE static __attribute__((noinline))
#define __grid_constant__
#ifndef SIMT_ARCH
#define SIMT_ARCH 900  // the architecture whose instructions exist
#endif
#define KERNEL(threads, blocks)                                                                    \
    static_assert((threads) % 32 == 0 && (blocks) > 0, "whole warps");                             \
    extern "C" void

namespace ptx {

DEVICE u32 thread_index() { return simt::thread_index(); }
DEVICE u32 block_index() { return simt::block_index(); }
DEVICE u32 num_blocks() { return simt::num_blocks(); }
DEVICE void sync_block() { simt::sync_block(); }
DEVICE void sync_warp() { simt::sync_warp(~0u); }
DEVICE void sync_team(u32 id, u32 threads) { simt::sync_team(id, threads); }
DEVICE void fence() {}
DEVICE u64 count_up(u64* at, u64 least) { return simt::count_up(at, least); }

template <class T> DEVICE u64 bits_of(T x) {
    u64 bits = 0;
    std::memcpy(&bits, &x, sizeof x);
    return bits;
}
template <class T> DEVICE T from_bits(u64 bits) {
    T x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}
template <class T> DEVICE T shuffle(T x, u32 lane) { return from_bits<T>(simt::shuffle(~0u, bits_of(x), lane & 31)); }
template <class T> DEVICE T shuffle_xor(T x, u32 bits) { return shuffle(x, (simt::thread_index() & 31) ^ bits); }
template <class T> DEVICE T shuffle_up(T x, u32 by) {
    const u32 lane = simt::thread_index() & 31;
    return shuffle(x, lane >= by ? lane - by : lane);
}
DEVICE u32 ballot(bool x) { return simt::ballot(~0u, x); }

template <class T> DEVICE T read(const T* at) {
    T x;
    simt::global_read(&x, at, sizeof x);
    return x;
}
template <class T> DEVICE void write(T* at, T x) { simt::global_write(at, &x, sizeof x); }

DEVICE u32 shared_base() { return 0; }
template <class T> DEVICE void shared_write(u32 at, T x) { simt::shared_write(at, &x, sizeof x); }
template <class T> DEVICE T shared_read(u32 at) {
    T x;
    simt::shared_read(&x, at, sizeof x);
    return x;
}
template <int BYTES, bool ONCE = false> DEVICE void copy_async(u32 to, const void* from, bool present = true) {
    simt::copy_async(to, from, BYTES, present);
}
DEVICE void copy_commit() { simt::copy_commit(); }
template <int PENDING> DEVICE void copy_wait() { simt::copy_wait(PENDING); }

DEVICE void load_matrices(u32 (&m)[4], u32 at) { simt::load_matrices(m, at, false); }
DEVICE void load_matrices_transposed(u32 (&m)[4], u32 at) { simt::load_matrices(m, at, true); }
DEVICE u32 transposed(u32 x) {
    const u32 lane = simt::thread_index() & 31, row = lane / 4, column = 2 * (lane & 3);
    const u32 low = shuffle(x, 4 * column + row / 2), high = shuffle(x, 4 * (column + 1) + row / 2);
    return (low >> 16 * (row & 1) & 0xffff) | (high >> 16 * (row & 1)) << 16;
}
template <bool HALF> DEVICE void multiply_add(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    simt::multiply_add(d, a, b0, b1, HALF);
}

template <bool HALF> DEVICE u32 pack(float low, float high) {
    return simt::from_float(low, HALF) | static_cast<u32>(simt::from_float(high, HALF)) << 16;
}
template <bool HALF> DEVICE u32 fused2(u32 a, u32 b, u32 c) {
    float r[2];
    // Products and sums are exact in double, except for one rounding that matters only in the last place of a tie.
    for (int i = 0; i < 2; ++i) {
        const auto at = [&](u32 x) { return static_cast<double>(simt::to_float(static_cast<u16>(x >> 16 * i), HALF)); };
        r[i] = static_cast<float>(at(a) * at(b) + at(c));
    }
    return pack<HALF>(r[0], r[1]);
}
DEVICE u32 at_least2(u32 a, u32 b) {
    u32 x = 0;
    for (int i = 0; i < 2; ++i) {
        const auto at = [&](u32 y) { return simt::to_float(static_cast<u16>(y >> 16 * i), true); };
        x |= at(a) >= at(b) ? 0xffffu << 16 * i : 0;
    }
    return x;
}
DEVICE u32 count_bits(u32 x) { return static_cast<u32>(__builtin_popcount(x)); }
DEVICE u32 permute(u32 a, u32 b, u32 bytes) {
    const u64 both = a | static_cast<u64>(b) << 32;
    u32 x = 0;
    for (int i = 0; i < 4; ++i) x |= static_cast<u32>(both >> 8 * (bytes >> 4 * i & 7) & 0xff) << 8 * i;
    return x;
}
DEVICE float half_to_float(u16 x) { return simt::to_float(x, true); }
DEVICE float as_float(u32 x) { return from_bits<float>(x); }
DEVICE u32 as_bits(float x) { return static_cast<u32>(bits_of(x)); }
DEVICE float exp2(float x) { return ::exp2f(x); }
DEVICE float log2(float x) { return ::log2f(x); }
DEVICE float tanh(float x) { return ::tanhf(x); }
DEVICE float fused(float a, float b, float c) { return ::fmaf(a, b, c); }
DEVICE float times(float a, float b) { return a * b; }
DEVICE float plus(float a, float b) { return a + b; }
DEVICE float divide(float a, float b) { return a / b; }
DEVICE float root(float x) { return ::sqrtf(x); }
DEVICE i32 to_integer(float x) {
    return x != x ? 0 : static_cast<i32>(::lrintf(::fmaxf(::fminf(x, 2147483520.0f), -2147483648.0f)));
}

constexpr bool CONVERTS_FP8 = SIMT_ARCH >= 890;
template <bool E5M2> DEVICE u32 pack_bytes(float low, float high) {
    return simt::nearest_byte(low, E5M2) | simt::nearest_byte(high, E5M2) << 8;
}
template <bool UPPER> DEVICE u32 widen_e4m3(u32 word) {
    const u32 bytes = word >> (UPPER ? 16 : 0);
    const auto half = [&](int i) { return simt::from_float(simt::of_e4m3(bytes >> 8 * i & 0xff), true); };
    return half(0) | static_cast<u32>(half(1)) << 16;
}
DEVICE float larger(float a, float b) { return ::fmaxf(a, b); }

}  // namespace ptx
