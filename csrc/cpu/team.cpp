// See team.hpp. This file links against no OpenMP runtime: it looks one up among the libraries of the process.
#include "team.hpp"

#include <dlfcn.h>
#include <pthread.h>
#if defined(__linux__)
#include <link.h>
#endif

#include <atomic>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

namespace pagedkv {
namespace {

typedef void (*Parallel)(void (*)(void*), void*, unsigned threads, unsigned flags);

#if defined(__linux__)

bool is_named(const char* path, const char* prefix) {
    const char* name = std::strrchr(path, '/');
    return !std::strncmp(name ? name + 1 : path, prefix, std::strlen(prefix));
}

// Find GOMP_parallel in a library or in the libraries that it was linked with. LLVM's and Intel's runtimes offer GNU's
// entry point, too.
int take(dl_phdr_info* library, void* found) {
    void* handle = dlopen(library->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
    void* parallel = handle ? dlsym(handle, "GOMP_parallel") : nullptr;
    std::memcpy(found, &parallel, sizeof parallel);
    return parallel != nullptr;
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
Parallel find() {
    Parallel parallel = nullptr;
    if (!dl_iterate_phdr(of_torch, &parallel)) {
        dl_iterate_phdr(of_any, &parallel);
    } else if (void* first = dlsym(RTLD_DEFAULT, "GOMP_parallel")) {
        std::memcpy(&parallel, &first, sizeof parallel);
    }
    return parallel;
}

#else

Parallel find() { return nullptr; }

#endif

std::atomic<bool> forked{false};
const int fork_handler = pthread_atfork(nullptr, nullptr, [] { forked = true; });

Parallel openmp() {
    static const Parallel once = find();
    return forked ? nullptr : once;
}

struct Shared {
    const std::function<void(int)>& work;
    std::atomic<int> next{0};
};

}  // namespace

void run_team(int threads, const std::function<void(int)>& work) {
    if (threads <= 1) return work(0);
    if (Parallel parallel = openmp()) {
        Shared shared{work};
        parallel(
            [](void* data) {
                Shared* s = static_cast<Shared*>(data);
                s->work(s->next++);
            },
            &shared, static_cast<unsigned>(threads), 0);
        return;
    }
    std::vector<std::thread> others;
    others.reserve(static_cast<size_t>(threads));
    try {
        for (int i = 1; i < threads; i++) others.emplace_back(work, i);
    } catch (const std::system_error&) {}  // the system gives no more threads
    work(0);
    for (std::thread& other : others) other.join();
}

const char* team_runtime() { return openmp() ? "OpenMP" : "threads"; }

}  // namespace pagedkv
