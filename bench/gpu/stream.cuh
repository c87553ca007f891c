// Warps in a closed loop copy runs of 4 KB at random places to shared memory, as decode does, and read a word of each.
// A CTA reads its `own` runs, then chunks of `chunk` runs, which it claims from a counter until all are read. With a
// chunk of 0 it ends after its own runs: all shares are equal.
//
// Grid: any number of CTAs of WARPS warps. Shared memory: WARPS * DEPTH * 4 KB, DEPTH runs under way for each warp.
// order: places of the runs, in runs. counter: 0 before the launch. told: [CTAs, 2], the SM and the cycles of each CTA.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    stream(const char* pool, const unsigned* order, unsigned* counter, unsigned long long* told, unsigned runs,
           unsigned own, unsigned chunk) {
    extern __shared__ __align__(128) char tiles[];
    __shared__ unsigned claimed;
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const unsigned mine = static_cast<unsigned>(__cvta_generic_to_shared(tiles)) + warp * DEPTH * 4096 + lane * 16;
    const unsigned long long began = clock64();
    unsigned long long once;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    unsigned first = blockIdx.x * own, end = min(first + own, runs);
    while (first < end) {
        // Warp w reads the runs first + w, first + w + WARPS, and so on.
        const unsigned count = end - first > warp ? (end - first - warp + WARPS - 1) / WARPS : 0;
        for (unsigned i = 0; i < count + DEPTH - 1; ++i) {
            const char* from = pool + lane * 16 + (i < count ? order[first + warp + i * WARPS] * 4096ull : 0);
#pragma unroll
            for (unsigned at = 0; at < 4096 && i < count; at += 512)
                asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(
                                 mine + i % DEPTH * 4096 + at), "l"(from + at), "l"(once) : "memory");
            asm volatile("cp.async.commit_group;" ::: "memory");
            if (i + 1 < DEPTH) continue;
            unsigned word;
            asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 1) : "memory");
            __syncwarp();
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(mine + (i + 1 - DEPTH) % DEPTH * 4096));
            __syncwarp();
        }
        if (chunk == 0) break;
        __syncthreads();
        if (threadIdx.x == 0) claimed = atomicAdd(counter, chunk);
        __syncthreads();
        first = gridDim.x * own + claimed, end = min(first + chunk, runs);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("{ .reg .u32 sm; mov.u32 sm, %smid; cvt.u64.u32 %0, sm; }" : "=l"(told[2 * blockIdx.x]));
        told[2 * blockIdx.x + 1] = clock64() - began;
    }
}
