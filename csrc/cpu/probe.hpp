// read: the ceiling that benchmarks compare with. Runs of bytes are loaded and xored, nothing else: as fast as this thread can read memory.
//
// Included by each instruction set's source inside its own anonymous namespace.

inline uint64_t read_runs(const char* base, const int64_t* offsets, int64_t count, int64_t bytes) {
    typedef uint64_t wide __attribute__((vector_size(64)));
    wide sums[4] = {};
    for (int64_t i = 0; i < count; i++) {
        const char* run = base + offsets[i];
        for (int64_t at = 0; at + 256 <= bytes; at += 256) {
            unroll<4>(EACH(j) {
                wide x;
                __builtin_memcpy(&x, run + at + 64 * j, 64);
                sums[j] ^= x;
            });
        }
    }
    wide sum = (sums[0] ^ sums[1]) ^ (sums[2] ^ sums[3]);
    uint64_t folded = 0;
    for (int j = 0; j < 8; j++) folded ^= sum[j];
    return folded;
}
