// The laws of run_team (csrc/cpu/team.hpp), as a program: test_threads.py compiles and runs it. It links against no
// OpenMP, so our own team serves. Each law prints its name when it has held.
#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "team.hpp"

using pagedkv::run_team;

static void require(bool holds, const char* what) {
    if (holds) return;
    std::printf("broken: %s\n", what), std::fflush(stdout);
    _exit(1);
}

static std::set<std::string> threads_of_process() {
    std::set<std::string> names;
    DIR* folder = opendir("/proc/self/task");
    while (dirent* entry = readdir(folder))
        if (entry->d_name[0] != '.') names.insert(entry->d_name);
    closedir(folder);
    return names;
}

// Take `parts` from a counter, and return how many threads have begun.
static int call(int threads, int parts) {
    std::vector<int> done(parts);
    std::vector<std::atomic<int>> begun(threads);
    for (auto& count : begun) count = 0;
    std::atomic<int> next{0};
    run_team(threads, [&](int thread) {
        begun[thread]++;
        for (int i; (i = next++) < parts;) done[i]++;
    });
    int sum = 0;
    for (int count : done) require(count == 1, "each part of the work is done once");
    for (auto& count : begun) require(count <= 1, "each number begins at most once"), sum += count;
    require(begun[0] == 1, "the caller works");
    return sum;
}

static void many(int calls) {
    for (int i = 0; i < calls; i++) {
        call(1 + i % 6, 1 + i % 50);
        if (i % 64 == 0) usleep(300);  // the threads fall asleep
    }
}

static std::atomic<int> is_stopped{0};
static std::atomic<bool> may_go_on{false};
static void stop(int) {
    is_stopped++;
    while (!may_go_on) {}
}

// A signal handler holds two threads of the team, as a system would that gives them no CPU.
static void absent_threads() {
    std::vector<std::atomic<bool>> is_here(3);
    std::vector<pthread_t> ids(3);
    for (auto& here : is_here) here = false;
    run_team(3, [&](int thread) {
        ids[thread] = pthread_self(), is_here[thread] = true;
        while (!thread && !(is_here[1] && is_here[2])) usleep(100);
    });
    usleep(200000);  // they sleep: a thread that is held while it has a lock would hold the caller, too
    signal(SIGUSR1, stop);
    for (int i : {1, 2}) pthread_kill(ids[i], SIGUSR1);
    while (is_stopped < 2) usleep(100);
    for (int i = 0; i < 1000; i++) require(call(3, 40) == 1, "only the caller begins while the others are held");
    may_go_on = true;
    int most = 0;
    for (int i = 0; i < 100000 && most < 3; i++) usleep(10), most = std::max(most, call(3, 40));
    require(most > 1, "the others begin when they can");
}

int main(int, char** arguments) {
    many(20000), std::puts("parts");
    const auto before = threads_of_process();
    many(1000);
    require(before == threads_of_process() && before.size() >= 6, "threads are started once");
    std::puts("threads");
    absent_threads(), std::puts("absent threads");
    std::thread first(many, 3000), second(many, 3000);
    many(3000), first.join(), second.join();
    for (int i = 0; i < 5000 && threads_of_process().size() > before.size(); i++) usleep(1000);
    require(threads_of_process() == before, "a team ends with its caller");
    std::puts("callers");
    std::fflush(stdout);
    if (std::strcmp(arguments[1], "fork")) return 0;
    pid_t child = fork();
    if (!child) {
        many(1000);
        require(threads_of_process().size() == 6, "a child starts its own team, once");
        std::exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    require(status == 0, "a forked child computes");
    many(1000), std::puts("fork");
}
