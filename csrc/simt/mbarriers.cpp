// mbarriers, and the bulk copies that count themselves off at them. See simt.hpp.
//
//     a phase ends   when none of `arrivals` is pending and no byte is missing: `pending` and `missing` are then as they were at first
//     missing        expected minus landed; below zero while copies are ahead of who expects them, which is allowed
//     landing        as late as can be: when somebody waits, and the copies are all that is waited for. One by one, in random order; what is
//                    left when no byte is missing is left under way, as it might be
#include <algorithm>
#include <cstring>

#include "machine.hpp"

namespace simt {

namespace {

constexpr int64_t MOST_BYTES = (1 << 20) - 1;

uint32_t named(uint32_t at) {
    auto& all = machine.mbarriers;
    uint32_t i = 0;
    while (i < all.size() && all[i].at != at) ++i;
    if (i == all.size()) machine.stop("uses an mbarrier at " + std::to_string(at) + " that nobody initialised");
    machine.object(machine.clocks.read(machine.current, at, 8));  // there is a barrier between its beginning and this
    return i;
}

bool ended(uint32_t i) {
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
    if (std::abs(barrier.missing) > MOST_BYTES) machine.stop("makes an mbarrier count more than " + std::to_string(MOST_BYTES) + " bytes");
}

void land(uint32_t i) {
    Mbarrier& barrier = machine.mbarriers[i];
    while (!barrier.pending && !barrier.under_way.empty()) {
        std::swap(barrier.under_way[machine.draw(static_cast<uint32_t>(barrier.under_way.size()))], barrier.under_way.back());
        const Bulk copy = barrier.under_way.back();
        barrier.under_way.pop_back();
        machine.clocks.land(i, copy.to, copy.bytes);
        std::memcpy(&machine.shared[copy.to], copy.from, copy.bytes);
        count(barrier, -static_cast<int64_t>(copy.bytes));
        if (ended(i)) return;
    }
}

}  // namespace

void barrier_init(uint32_t at, uint32_t arrivals) {
    if (at % 8 || at + 8 > machine.shared.size()) machine.stop("initialises an mbarrier at " + std::to_string(at) + ", which is no place for one");
    if (!arrivals || arrivals > MOST_BYTES) machine.stop("initialises an mbarrier for " + std::to_string(arrivals) + " arrivals");
    for (const Mbarrier& other : machine.mbarriers) {
        if (other.at == at) machine.stop("initialises the mbarrier at " + std::to_string(at) + " again");
    }
    if (machine.mbarriers.size() == Clocks::MOST_BARRIERS) machine.stop("has more mbarriers than the emulator keeps clocks for");
    machine.object(machine.clocks.write(machine.current, at, 8, State::WRITTEN));
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
    const uint32_t i = named(at);
    Mbarrier& barrier = machine.mbarriers[i];
    if (!barrier.pending) machine.stop("arrives at an mbarrier where all " + std::to_string(barrier.arrivals) + " have arrived");
    count(barrier, expected_bytes);
    machine.clocks.arrive(machine.current, i);
    --barrier.pending;
    if (!ended(i) && !barrier.waiting.empty()) land(i);
}

void barrier_wait(uint32_t at, uint32_t parity) {
    const uint32_t i = named(at);
    if (parity > 1) machine.stop("waits for a phase of parity " + std::to_string(parity));
    while (machine.mbarriers[i].parity == parity) {
        land(i);
        Mbarrier& barrier = machine.mbarriers[i];
        if (barrier.parity != parity) break;
        barrier.waiting.push_back(machine.current);
        machine.wait("the mbarrier at " + std::to_string(at));
    }
    machine.clocks.learn(machine.current, i);
}

void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier_at) {
    const uint32_t i = named(barrier_at);
    Mbarrier& barrier = machine.mbarriers[i];
    if (!barrier.fenced) machine.stop("copies by an mbarrier whose beginning no fence shows to copies");
    if (!bytes || bytes % 16) machine.stop("copies " + std::to_string(bytes) + " bytes in bulk; it takes multiples of 16");
    for (uint32_t byte = 0; byte < bytes; byte += 16) {
        check_shared(to + byte, 16, "copies to");
        check_global(static_cast<const char*>(from) + byte, 16, "copies");
    }
    machine.object(machine.clocks.issue(machine.current, i, to, bytes));
    std::memset(&machine.shared[to], 0xff, bytes);
    barrier.under_way.push_back({to, from, bytes});
    if (!barrier.waiting.empty()) land(i);
}

}  // namespace simt
