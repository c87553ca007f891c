// mbarriers, and the bulk copies that are counted at them. See simt.hpp.
//
//     a phase ends   when no arrival is pending and no byte is missing. `pending` is then set to `arrivals` again
//     missing        bytes expected minus bytes landed. It may be below zero: copies may land before they are expected
//     landing        as late as possible: only when a thread waits and all threads have arrived. Copies land one by
//                    one, in random order. Copies that are left when no byte is missing stay in flight, as may
//                    happen on a device
#include <algorithm>
#include <cstring>

#include "machine.hpp"

namespace simt {

namespace {

constexpr int64_t MOST_BYTES = (1 << 20) - 1;

// Return the index of the mbarrier at this address.
uint32_t find(uint32_t at) {
    auto& all = machine.mbarriers;
    uint32_t i = 0;
    while (i < all.size() && all[i].at != at) ++i;
    if (i == all.size()) machine.stop("uses an mbarrier at " + std::to_string(at) + " that no thread has initialised");
    machine.check(machine.clocks.read(machine.current, at, 8));  // a barrier must order the initialisation before this
    return i;
}

// End the current phase if it is complete; return whether it has ended.
bool try_end_phase(uint32_t i) {
    Mbarrier& barrier = machine.mbarriers[i];
    if (barrier.pending || barrier.missing) return false;
    machine.clocks.end_phase(i);
    barrier.parity ^= 1;
    barrier.pending = barrier.arrivals;
    for (uint32_t thread : barrier.waiting) machine.wake(thread);
    barrier.waiting.clear();
    return true;
}

void count(Mbarrier& barrier, int64_t bytes) {
    barrier.missing += bytes;
    if (std::abs(barrier.missing) <= MOST_BYTES) return;
    machine.stop("makes an mbarrier count more than " + std::to_string(MOST_BYTES) + " bytes");
}

void land(uint32_t i) {
    Mbarrier& barrier = machine.mbarriers[i];
    auto& copies = barrier.in_flight;
    while (!barrier.pending && !copies.empty()) {
        std::swap(copies[machine.draw(static_cast<uint32_t>(copies.size()))], copies.back());
        const Bulk copy = copies.back();
        copies.pop_back();
        machine.clocks.land(i, copy.to, copy.bytes);
        std::memcpy(&machine.shared[copy.to], copy.from, copy.bytes);
        count(barrier, -static_cast<int64_t>(copy.bytes));
        if (try_end_phase(i)) return;
    }
}

}  // namespace

void barrier_init(uint32_t at, uint32_t arrivals) {
    if (at % 8 || at + 8 > machine.shared.size()) {
        machine.stop("initialises an mbarrier at " + std::to_string(at) +
                     "; it needs 8 bytes inside the block's memory, at a multiple of 8");
    }
    if (!arrivals || arrivals > MOST_BYTES) {
        machine.stop("initialises an mbarrier for " + std::to_string(arrivals) + " arrivals; it takes 1 to " +
                     std::to_string(MOST_BYTES));
    }
    for (const Mbarrier& other : machine.mbarriers) {
        if (other.at == at) machine.stop("initialises the mbarrier at " + std::to_string(at) + " again");
    }
    if (machine.mbarriers.size() == Clocks::MOST_BARRIERS) {
        machine.stop("initialises more mbarriers than the " + std::to_string(Clocks::MOST_BARRIERS) +
                     " that the emulator has clocks for");
    }
    machine.check(machine.clocks.write(machine.current, at, 8, State::WRITTEN));
    Mbarrier barrier;
    barrier.at = at;
    barrier.arrivals = barrier.pending = arrivals;
    barrier.owner = machine.current;
    machine.mbarriers.push_back(std::move(barrier));
}

void fence_async(bool of_barriers) {
    machine.clocks.fence(machine.current);
    for (Mbarrier& barrier : machine.mbarriers) barrier.fenced |= of_barriers && barrier.owner == machine.current;
}

void barrier_arrive(uint32_t at, uint32_t expected_bytes) {
    const uint32_t i = find(at);
    Mbarrier& barrier = machine.mbarriers[i];
    if (!barrier.pending) {
        machine.stop("arrives at an mbarrier where all " + std::to_string(barrier.arrivals) + " have arrived");
    }
    count(barrier, expected_bytes);
    machine.clocks.arrive(machine.current, i);
    --barrier.pending;
    if (!try_end_phase(i) && !barrier.waiting.empty()) land(i);
}

void barrier_wait(uint32_t at, uint32_t parity) {
    const uint32_t i = find(at);
    if (parity > 1) machine.stop("waits for a phase of parity " + std::to_string(parity) + "; it is 0 or 1");
    while (machine.mbarriers[i].parity == parity) {
        land(i);
        Mbarrier& barrier = machine.mbarriers[i];
        if (barrier.parity != parity) break;
        barrier.waiting.push_back(machine.current);
        machine.wait("the mbarrier at " + std::to_string(at));
    }
    machine.clocks.acquire(machine.current, i);
}

void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier_at) {
    const uint32_t i = find(barrier_at);
    Mbarrier& barrier = machine.mbarriers[i];
    if (!barrier.fenced) machine.stop("copies by an mbarrier without a fence after its initialisation");
    if (!bytes || bytes % 16) {
        machine.stop("copies " + std::to_string(bytes) + " bytes in bulk; a bulk copy takes multiples of 16");
    }
    for (uint32_t byte = 0; byte < bytes; byte += 16) {
        check_shared(to + byte, 16, "copies to");
        check_global(static_cast<const char*>(from) + byte, 16, "copies");
    }
    machine.check(machine.clocks.issue(machine.current, i, to, bytes));
    std::memset(&machine.shared[to], 0xff, bytes);
    barrier.in_flight.push_back({to, from, bytes});
    if (!barrier.waiting.empty()) land(i);
}

}  // namespace simt
