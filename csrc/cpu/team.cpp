// See team.hpp. This file links against no OpenMP runtime: it looks one up among the libraries of the process.
#include "team.hpp"

#include <dlfcn.h>
#include <pthread.h>
#if defined(__linux__)
#include <link.h>
#include <sys/resource.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace pagedkv {
namespace {

// Functions of an OpenMP runtime. LLVM's and Intel's runtimes offer GNU's `GOMP_parallel`, too.
struct OpenMP {
    void (*parallel)(void (*)(void*), void*, unsigned threads, unsigned flags) = nullptr;
    int (*max_threads)() = nullptr;
    int (*thread)() = nullptr;
    // Look them up in a library and in the libraries that it was linked with. Returns whether all are there.
    bool look_up(void* handle) {
        const auto find = [&](auto& to, const char* name) {
            void* found = dlsym(handle, name);
            std::memcpy(&to, &found, sizeof to);
            return found;
        };
        return find(parallel, "GOMP_parallel") && find(max_threads, "omp_get_max_threads") &&
            find(thread, "omp_get_thread_num");
    }
};

#if defined(__linux__)

bool is_named(const char* path, const char* prefix) {
    const char* name = std::strrchr(path, '/');
    return !std::strncmp(name ? name + 1 : path, prefix, std::strlen(prefix));
}

int take(dl_phdr_info* library, void* found) {
    void* handle = dlopen(library->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
    return handle && static_cast<OpenMP*>(found)->look_up(handle);
}

int of_torch(dl_phdr_info* library, size_t, void* found) {
    return is_named(library->dlpi_name, "libtorch_cpu") ? take(library, found) : 0;
}

int of_any(dl_phdr_info* library, size_t, void* found) {
    for (const char* name : {"libgomp", "libomp", "libiomp5"})
        if (is_named(library->dlpi_name, name)) return take(library, found);
    return 0;
}

// A process may hold several runtimes (scikit-learn brings its own). The one to use is torch's, whose threads exist
// already. The loader binds torch's calls to the first runtime that was loaded globally, and otherwise to the runtime
// that torch was linked with.
OpenMP find() {
    OpenMP found, first;
    if (!dl_iterate_phdr(of_torch, &found) && !dl_iterate_phdr(of_any, &found)) return {};
    return first.look_up(RTLD_DEFAULT) ? first : found;
}

#else

OpenMP find() { return {}; }

#endif

using Work = std::function<void(int)>;
using Clock = std::chrono::steady_clock;

constexpr auto AWAKE = std::chrono::microseconds(200);  // of a thread between two calls, if no process took its CPU
constexpr auto JOINING = std::chrono::microseconds(20);  // of the caller, which waits for the last parts of the work
constexpr int CALM = 256;  // calls without such a loss: about a step
constexpr int MOST_THREADS = 4096;  // as pagedkv/debug.py has it

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Where one thread waits for what others change. They call `wake` after the change.
class alignas(64) Waiting {
    std::atomic<bool> asleep{false};
    std::mutex lock;
    std::condition_variable rung;

public:
    // awake: how long to look again and again before it sleeps
    template <typename Condition>
    void until(const Condition& holds, Clock::duration awake) {
        for (Clock::time_point end = Clock::now() + awake; Clock::now() < end; pause())
            if (holds()) return;
        std::unique_lock<std::mutex> held(lock);
        for (asleep = true; !holds(); asleep = true) rung.wait(held);
        asleep = false;
    }
    void wake() {
        if (!asleep) return;
        {
            std::lock_guard<std::mutex> held(lock);
            asleep = false;  // until it runs, further calls need not wake it
        }
        rung.notify_one();
    }
};

// Says how long a thread stays awake before it sleeps: not at all on a busy machine. There the system takes the CPU
// from a thread that has used its share, perhaps in the middle of its work, and the caller waits for that work.
class Patience {
    long losses = 0;  // how often the CPU was taken
    int calm = CALM;

public:
    Clock::duration next() {
#if defined(__linux__)
        rusage used;
        if (!getrusage(RUSAGE_THREAD, &used) && used.ru_nivcsw != losses) losses = used.ru_nivcsw, calm = 0;
#endif
        return calm < CALM ? calm++, Clock::duration::zero() : Clock::duration(AWAKE);
    }
};

// The threads that serve one calling thread. They share this object with it, and the last one deletes it.
class Team : public std::enable_shared_from_this<Team> {
    // The part of a thread in a call. It begins only while it may, and the caller sees whether it has begun. Only these
    // two use its cache line.
    enum Turn { WAITS, MAY_BEGIN, WORKS, IS_LATE, ENDS };
    struct Member : Waiting {
        std::atomic<Turn> turn{WAITS};
    };
    const Work* work = nullptr;
    Waiting caller;
    std::vector<std::unique_ptr<Member>> others;

    void serve(int thread, Member& self) {
        for (Patience patience;;) {
            self.until([&] { return self.turn != WAITS; }, patience.next());
            Turn now = MAY_BEGIN;
            if (self.turn.compare_exchange_strong(now, WORKS)) {
                (*work)(thread);
                self.turn = WAITS;
                caller.wake();
            } else if (now == ENDS) {
                return;
            } else {
                self.turn.compare_exchange_strong(now, WAITS);
            }
        }
    }

    // Start threads until there are as many as asked, or the system gives no more.
    int start(int threads) {
        threads = std::min(threads, MOST_THREADS);
        while (static_cast<int>(others.size()) + 1 < threads) {
            others.push_back(std::make_unique<Member>());
            int thread = static_cast<int>(others.size());
            try {
                std::thread([team = shared_from_this(), thread, self = others.back().get()] {
                    team->serve(thread, *self);
                }).detach();
            } catch (const std::system_error&) {
                others.pop_back();
                return thread;
            }
        }
        return threads;
    }

    void set(int count, Turn turn) {
        for (int i = 0; i < count; i++) others[i]->turn = turn, others[i]->wake();
    }

public:
    void run(int threads, const Work& given) {
        threads = start(threads);
        work = &given;
        set(threads - 1, MAY_BEGIN);
        given(0);
        for (int i = 0; i + 1 < threads; i++) {
            std::atomic<Turn>& turn = others[i]->turn;
            Turn now = turn;
            if (now == WAITS || (now == MAY_BEGIN && turn.compare_exchange_strong(now, IS_LATE))) continue;
            caller.until([&] { return turn == WAITS; }, JOINING);
        }
    }
    void end() { set(static_cast<int>(others.size()), ENDS); }
};

// The team of a calling thread. A child process has none of its threads: it starts others.
struct Owner {
    std::shared_ptr<Team> team;
    ~Owner() {
        if (team) team->end();
    }
};
thread_local Owner owner;
thread_local bool prefers_own = false;

std::atomic<bool> forked{false};
const int fork_handler = pthread_atfork(nullptr, nullptr, [] {
    forked = true;
    owner.team.reset();
});

OpenMP openmp() {
    static const OpenMP once = find();
    return forked ? OpenMP() : once;
}

struct Shared {
    const Work& work;
    const int threads;
    int (*const thread)();
};

}  // namespace

void run_team(int threads, const Work& work) {
    if (threads <= 1) return work(0);
    if (OpenMP runtime = prefers_own ? OpenMP() : openmp(); runtime.parallel) {
        // Always as many threads as torch's loops have. When a team shrinks, OpenMP ends threads and must start others.
        int all = std::max(threads, runtime.max_threads());
        Shared shared{work, threads, runtime.thread};
        runtime.parallel(
            [](void* data) {
                Shared* s = static_cast<Shared*>(data);
                if (int thread = s->thread(); thread < s->threads) s->work(thread);
            },
            &shared, static_cast<unsigned>(all), 0);
        return;
    }
    if (!owner.team) owner.team = std::make_shared<Team>();
    owner.team->run(threads, work);
}

bool use_own_team(bool own) { return std::exchange(prefers_own, own); }

}  // namespace pagedkv
