// The machine, one function per instruction. All PTX of csrc/cuda is in this file.
//
// Two headers declare the same functions. This one is inline PTX and includes no CUDA header, so a kernel compiles in
// milliseconds with NVRTC or nvcc; 16-bit floats are plain bits in u16 and u32. The other one, csrc/simt/ptx_twin.hpp,
// runs on a host. -DSIMT_HOST chooses it, so the emulator executes the same kernel sources.
//
// Shared memory is addressed by 32-bit numbers (the .shared window), global memory by pointers. sm_80 and later.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

struct alignas(16) Words4 {
    u32 x, y, z, w;
};

template <int BYTES> struct UnitOf;
template <> struct UnitOf<16> { using type = Words4; };
template <> struct UnitOf<8> { using type = u64; };
template <> struct UnitOf<4> { using type = u32; };
template <> struct UnitOf<2> { using type = u16; };
template <> struct UnitOf<1> { using type = u8; };

#define MINUS_INFINITY ptx::as_float(0xff800000u)

#ifdef SIMT_HOST
#include "ptx_twin.hpp"
#else

#ifdef __CUDA_ARCH__
#define CUDA_ARCH __CUDA_ARCH__
#else
#define CUDA_ARCH 0
#endif
#define DEVICE static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
#define NOINLINE static __device__ __noinline__
#define KERNEL(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)

namespace ptx {

// The position of a thread in the grid, barriers and fences.

DEVICE u32 thread_index() { return threadIdx.x; }
DEVICE u32 block_index() { return blockIdx.x; }
DEVICE u32 num_blocks() { return gridDim.x; }
DEVICE void sync_block() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }
DEVICE void sync_team(u32 id, u32 threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DEVICE void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
// Raise a counter to `least` if it is smaller, add 1, and return the sum. One thread's atomics at one place keep order.
DEVICE u64 count_up(u64* at, u64 least) {
    atomicMax(at, least);
    return atomicAdd(at, u64{1}) + 1;
}

// Exchange between the 32 lanes of a warp; all lanes take part.

template <class T> DEVICE T shuffle(T x, u32 lane) { return __shfl_sync(~0u, x, lane); }
template <class T> DEVICE T shuffle_xor(T x, u32 bits) { return __shfl_xor_sync(~0u, x, bits); }
template <class T> DEVICE T shuffle_up(T x, u32 by) { return __shfl_up_sync(~0u, x, by); }
DEVICE u32 ballot(bool x) { return __ballot_sync(~0u, x); }

// Memory.

template <class T> DEVICE T read(const T* at) { return *at; }
template <class T> DEVICE void write(T* at, T x) { *at = x; }

DEVICE u32 shared_base() {
    extern __shared__ __align__(128) u8 shared[];
    return static_cast<u32>(__cvta_generic_to_shared(shared));
}
DEVICE void shared_write(u32 at, u16 x) { asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"(x) : "memory"); }
DEVICE void shared_write(u32 at, u32 x) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(x) : "memory"); }
DEVICE void shared_write(u32 at, u64 x) { asm volatile("st.shared.u64 [%0], %1;" ::"r"(at), "l"(x) : "memory"); }
DEVICE void shared_write(u32 at, float x) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory"); }
DEVICE void shared_write(u32 at, const Words4& x) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
                 ::"r"(at), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
template <class T> DEVICE T shared_read(u32 at);
#define SHARED_READ(T, TYPE, LETTER, REGISTER)                                              \
    template <> DEVICE_MEMBER T shared_read<T>(u32 at) {                                    \
        REGISTER x;                                                                         \
        asm volatile("ld.shared." TYPE " %0, [%1];" : "=" LETTER(x) : "r"(at) : "memory");  \
        return static_cast<T>(x);                                                           \
    }
SHARED_READ(u8, "u8", "h", u16)
SHARED_READ(u16, "u16", "h", u16)
SHARED_READ(u32, "u32", "r", u32)
SHARED_READ(u64, "u64", "l", u64)
SHARED_READ(float, "f32", "f", float)
#undef SHARED_READ
template <> DEVICE_MEMBER Words4 shared_read<Words4>(u32 at) {
    Words4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(at) : "memory");
    return x;
}

// Asynchronous copies of BYTES (16, 8 or 4) from global to shared memory. If not `present`, zeros land and global
// memory is not read; a copy that knows of no absence takes fewer instructions.

// ONCE: this launch reads the 16 bytes once, so the L2 cache drops them first and keeps tables and partial states.
DEVICE u64 dropped_first() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
template <int BYTES, bool ONCE = false> DEVICE void copy_async(u32 to, const void* from) {
    if constexpr (BYTES == 16 && ONCE) {
        asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;"
                     ::"r"(to), "l"(from), "l"(dropped_first()) : "memory");
    } else if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
    }
}
template <int BYTES, bool ONCE = false> DEVICE void copy_async(u32 to, const void* from, bool present) {
    if constexpr (BYTES == 16 && ONCE) {
        asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;"
                     ::"r"(to), "l"(from), "r"(present ? 16 : 0), "l"(dropped_first()) : "memory");
    } else if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                     ::"r"(to), "l"(from), "r"(present ? 16 : 0) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                     ::"r"(to), "l"(from), "n"(BYTES), "r"(present ? BYTES : 0) : "memory");
    }
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// Tensor cores. Load four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
// Multiply and add: D += A B of 16 x 8 x 16.

DEVICE void load_matrices(u32 (&m)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(at) : "memory");
}
DEVICE void load_matrices_transposed(u32 (&m)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(at) : "memory");
}
// Transpose an 8 x 8 matrix of 16-bit elements. Lane l has elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4.
DEVICE u32 transposed(u32 x) {
    u32 y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
template <bool HALF> DEVICE void multiply_add(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (HALF) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

// Arithmetic and conversions. `low` is the element with the lower index, in the lower half of the word.

template <bool HALF> DEVICE u32 pack(float low, float high) {
    u32 x;
    if constexpr (HALF) {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
    }
    return x;
}
template <bool HALF> DEVICE u32 fused2(u32 a, u32 b, u32 c) {
    u32 x;
    if constexpr (HALF) {
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(c));
    } else {
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(c));
    }
    return x;
}
// Compare two pairs of float16: set all bits of a half where a >= b, none elsewhere.
DEVICE u32 at_least2(u32 a, u32 b) {
    u32 x;
    asm("set.ge.u32.f16x2 %0, %1, %2;" : "=r"(x) : "r"(a), "r"(b));
    return x;
}
DEVICE u32 count_bits(u32 x) { return static_cast<u32>(__popc(x)); }
DEVICE u32 permute(u32 a, u32 b, u32 bytes) { return __byte_perm(a, b, bytes); }
DEVICE float half_to_float(u16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}
DEVICE float as_float(u32 x) { return __uint_as_float(x); }
DEVICE u32 as_bits(float x) { return __float_as_uint(x); }
DEVICE float exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float log2(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float tanh(float x) { return tanhf(x); }
DEVICE float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE float times(float a, float b) { return __fmul_rn(a, b); }  // never contracted into an fma with its neighbours
DEVICE float plus(float a, float b) { return __fadd_rn(a, b); }
DEVICE float divide(float a, float b) { return __fdiv_rn(a, b); }
DEVICE float root(float x) { return __fsqrt_rn(x); }
DEVICE float larger(float a, float b) { return fmaxf(a, b); }
DEVICE i32 to_integer(float x) { return __float2int_rn(x); }  // half to even; NaN is 0

// Convert two floats to bytes of an 8-bit float; a value out of range becomes the largest finite one. The instruction
// exists from sm_89 on.
constexpr bool CONVERTS_FP8 = CUDA_ARCH >= 890;
template <bool E5M2> DEVICE u32 pack_bytes(float low, float high) {
    u16 x = 0;
#if CUDA_ARCH >= 890
    if constexpr (E5M2) {
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(x) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(x) : "f"(high), "f"(low));
    }
#endif
    return x;
}

// Widen the two e4m3 in the upper or lower half of a word to float16; a NaN stays NaN. From sm_89 on. The instruction
// reads either half of a register, so the upper one takes no shift.
template <bool UPPER> DEVICE u32 widen_e4m3(u32 word) {
    u32 x = 0;
#if CUDA_ARCH >= 890
    if constexpr (UPPER) {
        asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, high; }" : "=r"(x) : "r"(word));
    } else {
        asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low; }" : "=r"(x) : "r"(word));
    }
#endif
    return x;
}

}  // namespace ptx
#endif
