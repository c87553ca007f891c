// A layer of a decode step on many threads, counted on any machine: test_threads.py compiles and runs it. The threads
// are real, but only that of the least simulated time goes on, so times are the same in each run. Costs, in ns, were
// measured on a Zen 3: an add to a line of another core 58.7, to an own one 6.7; to norm an element 1;
// to fold a row 94.
// A thread reads 5 GB/s, so 64 read 300. No line: waking threads, and their meeting at the end of a call.
//
// Prints for each number of threads and shape of attention a line: threads, sequences, keys, atomic adds to lines that
// several threads add to, microseconds of the longest chain, calls of the team, bytes of the layer.
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <system_error>
#include <thread>
#include <unordered_set>
#include <utility>
#include <vector>

namespace simulated {

constexpr double OTHERS_LINE = 58.7, OWN_LINE = 6.7, NORM = 1.0, FOLD = 94.0, BYTE = 1 / 5.0;  // ns

struct Line {
    int last = -1;
    double free = 0;
    std::set<std::thread::id> threads;
    long adds = 0;
};

// The time of each thread of the team's call.
class Clock {
    std::mutex lock;
    std::vector<std::condition_variable> turns{256};
    std::vector<double> times;
    std::map<uintptr_t, Line> lines;
    int missing = 0, next = -1;

    void choose() {  // with the lock
        next = -1;
        for (int i = 0; i < static_cast<int>(times.size()); i++)
            if (times[i] >= 0 && (next < 0 || times[i] < times[next])) next = i;
        if (next >= 0) turns[next].notify_one();
    }
    void wait(std::unique_lock<std::mutex>& held) {
        choose();
        turns[self].wait(held, [&] { return next == self; });
    }

public:
    static inline thread_local int self = -1;
    double longest = 0;
    long shared_adds = 0;

    void begin(int threads) { times.assign(threads, 0), missing = threads, next = -1; }
    void enter(int thread) {
        std::unique_lock<std::mutex> held(lock);
        self = thread;
        if (!--missing) choose();
        turns[self].wait(held, [&] { return !missing && next == self; });
    }
    void spend(double ns) {
        std::unique_lock<std::mutex> held(lock);
        times[self] += ns;
        wait(held);
    }
    void add(const void* at) {
        std::unique_lock<std::mutex> held(lock);
        Line& line = lines[reinterpret_cast<uintptr_t>(at) / 64];
        line.adds++, line.threads.insert(std::this_thread::get_id());
        if (self < 0) return;  // of the team itself
        times[self] = std::max(times[self], line.free) + (line.last == self ? OWN_LINE : OTHERS_LINE);
        line.free = times[self], line.last = self;
        wait(held);
    }
    void leave() {
        std::unique_lock<std::mutex> held(lock);
        double time = times[self];
        longest_of_call = std::max(longest_of_call, time), times[self] = -1, self = -1;
        choose();
    }
    void end() {
        longest += longest_of_call, longest_of_call = 0;
        for (const auto& [at, line] : lines)
            if (line.threads.size() > 1) shared_adds += line.adds;
        lines.clear();
    }

private:
    double longest_of_call = 0;
};
Clock& now = *new Clock;  // threads of the team use it until the process has ended

}  // namespace simulated

namespace std {
template <class T>
class counted {
    std::atomic<T> x;
    std::atomic<T>& add() { return simulated::now.add(this), x; }

public:
    counted(T value = T()) : x(value) {}
    operator T() const { return x; }
    T load(memory_order order) const { return x.load(order); }
    void store(T value, memory_order order) { x.store(value, order); }
    T operator=(T value) { return x = value; }
    T fetch_add(T value) { return add().fetch_add(value); }
    T operator++() { return ++add(); }
    T operator++(int) { return add()++; }
    T operator--() { return --add(); }
    T operator&=(T value) { return add() &= value; }
    T operator^=(T value) { return add() ^= value; }
    bool compare_exchange_strong(T& old, T value) { return add().compare_exchange_strong(old, value); }
    bool compare_exchange_weak(T& old, T value) { return add().compare_exchange_weak(old, value); }
};
namespace this_thread {
inline void counted_yield() { simulated::now.spend(100); }
}  // namespace this_thread
}  // namespace std

#define atomic counted
#define yield counted_yield
#include "team.cpp"
namespace pagedkv {
static int calls = 0;
static void run_simulated(int threads, const Work& work) {
    calls++;
    simulated::now.begin(threads);
    run_team(threads, [&](int thread) {
        simulated::now.enter(thread);
        work(thread);
        simulated::now.leave();
    });
    simulated::now.end();
}
void help_to_copy(int, int64_t) {}
}  // namespace pagedkv
#define run_team run_simulated
#include "schedule.cpp"

namespace {

using namespace pagedkv;
using simulated::now;

void attend(const Attention& a, const Unit& u, const Scratch&, char*) {
    int64_t keys = std::min<int64_t>(u.c1 * u.chunk, a.seq_lens[u.b]) - u.c0 * u.chunk;
    now.spend(simulated::BYTE * static_cast<double>(keys * (u.k1 - u.k0) * (a.D + a.Dv) * 2));
}
void merge(const Attention& a, const Unit& u, int64_t, int64_t parts, const Scratch&, char*) {
    now.spend(simulated::FOLD * static_cast<double>(parts * (u.k1 - u.k0) * (u.i1 - u.i0) * (a.H / a.K)));
}
void take(const Linear& l, int64_t first, int64_t end, char*, char*) {
    if (l.norm) now.spend(simulated::NORM * static_cast<double>((end - first) * l.K));
}
void rows(const Linear& l, int64_t first, int64_t end, char*) {
    int64_t matrices = l.mode == Linear::SILU ? 2 : 1;
    now.spend(simulated::BYTE * static_cast<double>((end - first) * matrices * l.K * 2));
}

const LinearIsa linear_isa{take, rows, nullptr, nullptr};
const Isa isa{"simulated", nullptr, attend, merge, nullptr, nullptr, nullptr, nullptr, linear_isa};

// The shape of Qwen3-0.6B, in bfloat16.
void layer(int sequences, int keys, int threads) {
    const auto linear = [&](Linear::Mode mode, int64_t N, int64_t K, bool is_normed) {
        Linear l{};
        l.mode = mode, l.T = sequences, l.N = N, l.K = K, l.norm = is_normed ? "" : nullptr;
        l.type = l.norm_type = l.out_type = l.weight_type = Dtype::bf16;
        run_linear(isa, l, threads);
    };
    std::vector<int32_t> lengths(sequences, keys), starts;
    for (int i = 0; i <= sequences; i++) starts.push_back(i);
    Attention a{};
    a.q_type = a.kv_type = Dtype::bf16, a.B = sequences, a.H = 16, a.K = 8, a.D = a.Dv = 128, a.S = 16, a.causal = true;
    a.seq_lens = lengths.data(), a.cu_seqlens_q = starts.data();
    linear(Linear::STORE, 4096, 1024, true);
    run_attention(isa, a, threads);
    linear(Linear::ADD, 1024, 2048, false);
    linear(Linear::SILU, 3072, 1024, true);
    linear(Linear::ADD, 1024, 3072, false);
}

}  // namespace

int main(int count, char** arguments) {
    for (int i = 1; i < count; i++)
        for (auto [sequences, keys] : {std::pair{1, 2048}, {1, 8192}, {1, 65536}, {8, 2048}, {12, 1000}, {32, 1000}}) {
            now.shared_adds = 0, now.longest = 0, calls = 0;
            layer(sequences, keys, std::atoi(arguments[i]));
            int64_t bytes = 2 * 1024 * (4096 + 2048 + 6144 + 3072) + int64_t{sequences} * keys * 8 * 256 * 2;
            std::printf("%s %d %d %ld %.1f %d %ld\n", arguments[i], sequences, keys, now.shared_adds,
                now.longest / 1000, calls, static_cast<long>(bytes));
        }
}
