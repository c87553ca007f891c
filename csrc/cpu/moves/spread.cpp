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

constexpr double OF_TEAMS = 0.7;  // the part of the time for teams, which compute nothing now and then
constexpr int MOST = 4;  // pieces between two units of work

struct Offer {
    Copy& copy;
    const double seconds_per_byte;
    Clock::time_point due;  // of the next piece
};

std::mutex turn;  // a thread that holds it may use the offer, and copy
Offer* offer = nullptr;
std::atomic<int> wanted{0};  // the threads that a team must have to help; 0: nothing is offered
std::atomic<unsigned> visits{0};  // of threads that could have helped

// A child process has neither the thread whose copy is offered, nor the one that holds the lock.
const int fork_handler = pthread_atfork(nullptr, nullptr, [] {
    new (&turn) std::mutex;
    offer = nullptr, wanted = 0;
});

int num_cpus() {
#if defined(__linux__)
    cpu_set_t set;
    if (!sched_getaffinity(0, sizeof set, &set)) return CPU_COUNT(&set);
#endif
    return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

// Offer a copy, unless another one is offered.
bool is_offered(Offer& mine) {
    std::lock_guard<std::mutex> held(turn);
    if (offer) return false;
    offer = &mine, wanted = num_cpus();
    return true;
}

// Take the offer back, unless teams have come and have time left.
bool is_over(unsigned before, bool is_late) {
    std::lock_guard<std::mutex> held(turn);
    if (!offer->copy.is_done() && visits != before && !is_late) return false;
    offer = nullptr, wanted = 0;
    return true;
}

}  // namespace

void copy_spread(Copy& copy, double seconds) {
    Clock::time_point now = Clock::now(), end = now + std::chrono::duration_cast<Clock::duration>(Seconds(seconds));
    Offer mine{copy, OF_TEAMS * seconds / static_cast<double>(std::max<int64_t>(copy.bytes_left(), 1)), now};
    if (seconds > 0 && is_offered(mine)) {
        unsigned before = visits;
        std::this_thread::sleep_until(now + (end - now) / 2);
        while (!is_over(before, Clock::now() >= end)) std::this_thread::sleep_until(end);
    }
    while (!copy.is_done()) copy.piece();
}

void help_to_copy(int threads) {
    int least = wanted.load(std::memory_order_relaxed);
    if (!least || threads < least) return;
    visits++;
    std::unique_lock<std::mutex> held(turn, std::try_to_lock);
    if (!held || !offer) return;
    for (int i = 0; i < MOST && !offer->copy.is_done() && Clock::now() >= offer->due; i++) {
        Seconds share(offer->seconds_per_byte * static_cast<double>(offer->copy.piece()));
        offer->due += std::chrono::duration_cast<Clock::duration>(share);
    }
}

}  // namespace pagedkv
