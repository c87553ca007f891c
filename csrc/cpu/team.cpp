// See team.hpp. Nothing here is linked against an OpenMP runtime: it is looked up among the libraries of the process.
#include "team.hpp"

#include <dlfcn.h>
#if defined(__linux__)
#include <link.h>
#endif

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

namespace pagedkv {
namespace {

typedef void (*Parallel)(void (*)(void*), void*, unsigned threads, unsigned flags);

#if defined(__linux__)

int look(dl_phdr_info* library, size_t, void* found) {
    const char* name = std::strrchr(library->dlpi_name, '/');
    name = name ? name + 1 : library->dlpi_name;
    if (std::strncmp(name, "libgomp", 7) && std::strncmp(name, "libomp", 6) && std::strncmp(name, "libiomp5", 8)) return 0;
    void* handle = dlopen(library->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
    void* parallel = handle ? dlsym(handle, "GOMP_parallel") : nullptr;  // LLVM's and Intel's runtimes offer GNU's entry too
    std::memcpy(found, &parallel, sizeof parallel);
    return parallel != nullptr;
}

Parallel find() {
    Parallel parallel = nullptr;
    dl_iterate_phdr(look, &parallel);
    return parallel;
}

#else

Parallel find() { return nullptr; }

#endif

Parallel openmp() {
    static const Parallel once = find();
    return once;
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
        parallel([](void* data) { Shared* s = static_cast<Shared*>(data); s->work(s->next++); }, &shared, static_cast<unsigned>(threads), 0);
        return;
    }
    std::vector<std::thread> others;
    for (int i = 1; i < threads; i++) others.emplace_back(work, i);
    work(0);
    for (std::thread& other : others) other.join();
}

const char* team_runtime() { return openmp() ? "OpenMP" : "threads"; }

}  // namespace pagedkv
