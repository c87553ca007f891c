// See spread.hpp.
#include "moves/spread.hpp"

#include <pthread.h>
#if defined(__linux__)
#include <sched.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <new>
#include <thread>

namespace pagedkv {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr double OF_TEAMS = 0.7;  // teams aim to end after this part of the time, because they pause
constexpr int64_t MOST = 1 << 20;  // bytes between two units of work

struct Offer {
    Copy& copy;
    const double seconds_per_byte;
};

std::mutex turn;  // a thread that holds it may use the offer, and copy
Offer* offer = nullptr;

struct alignas(64) Notice {
    std::atomic<int> wanted{0};  // the threads that a team must have to help; 0: nothing is offered
    std::atomic<bool> has_come{false};  // whether a team that can help has seen the offer
    std::atomic<Clock::rep> due{0};  // of the next bytes, in the clock's ticks
};
Notice notice;  // all threads read it before each unit

// A child process has neither the thread whose copy is offered, nor the one that holds the lock.
const int fork_handler = pthread_atfork(nullptr, nullptr, [] {
    new (&turn) std::mutex;
    offer = nullptr, notice.wanted = 0;
});

int num_cpus() {
#if defined(__linux__)
    cpu_set_t set;
    if (!sched_getaffinity(0, sizeof set, &set)) return CPU_COUNT(&set);
#endif
    return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

Clock::duration of(double seconds) { return std::chrono::duration_cast<Clock::duration>(Seconds(seconds)); }

// Offer a copy, and return whether no other one is offered.
bool try_to_offer(Offer& mine) {
    std::lock_guard<std::mutex> held(turn);
    if (offer) return false;
    offer = &mine;
    notice.has_come = false, notice.due = Clock::now().time_since_epoch().count(), notice.wanted = num_cpus();
    return true;
}

// Take the offer back, and return true, unless teams have come and have time left.
bool take_back(bool is_late) {
    std::lock_guard<std::mutex> held(turn);
    if (!offer->copy.is_done() && notice.has_come && !is_late) return false;
    offer = nullptr, notice.wanted = 0;
    return true;
}

}  // namespace

void copy_spread(Copy& copy, double seconds) {
    Clock::time_point now = Clock::now(), end = now + of(seconds);
    Offer mine{copy, OF_TEAMS * seconds / static_cast<double>(std::max<int64_t>(copy.bytes_left(), 1))};
    if (seconds > 0 && try_to_offer(mine)) {
        std::this_thread::sleep_until(now + (end - now) / 4);
        while (!take_back(Clock::now() >= end)) std::this_thread::sleep_until(end);
    }
    while (!copy.is_done()) copy.piece();
}

void help_to_copy(int threads, int64_t left) {
    int least = notice.wanted.load(std::memory_order_relaxed);
    int64_t most = std::min(MOST, left / 4);
    if (!least || threads < least || most < Copy::PIECE) return;
    if (!notice.has_come.load(std::memory_order_relaxed)) notice.has_come = true;
    auto is_due = [] { return Clock::now().time_since_epoch().count() >= notice.due.load(std::memory_order_relaxed); };
    if (!is_due()) return;
    std::unique_lock<std::mutex> held(turn, std::try_to_lock);
    if (!held || !offer) return;
    for (int64_t all = 0; all < most && !offer->copy.is_done() && is_due();) {
        int64_t bytes = 0;
        while (bytes < Copy::PIECE && !offer->copy.is_done()) bytes += offer->copy.piece();
        all += bytes;
        notice.due += of(offer->seconds_per_byte * static_cast<double>(bytes)).count();
    }
}

}  // namespace pagedkv
