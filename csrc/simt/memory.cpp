// Global and shared memory, and asynchronous copies between them, which land late. Every access is checked; see
// simt.hpp.
#include <algorithm>
#include <cstring>

#include "machine.hpp"

namespace simt {

namespace {

struct Allocation {
    const char* start;
    uint64_t bytes;
};
std::vector<Allocation> allowed;
size_t last_hit = 0;

}  // namespace

void check_global(const void* at, uint32_t bytes, const char* what) {
    const auto* p = static_cast<const char*>(at);
    const auto inside = [&](const Allocation& a) { return p >= a.start && p + bytes <= a.start + a.bytes; };
    const auto stop = [&](const char* why) {
        machine.stop(std::string(what) + " " + std::to_string(bytes) + " bytes of global memory" + why);
    };
    if (reinterpret_cast<uintptr_t>(at) % bytes) stop(" at an address that is no multiple of that");
    if (last_hit < allowed.size() && inside(allowed[last_hit])) return;
    for (last_hit = 0; last_hit < allowed.size(); ++last_hit) {
        if (inside(allowed[last_hit])) return;
    }
    stop(" outside of every allocation");
}

void check_shared(uint32_t at, uint32_t bytes, const char* what) {
    const auto stop = [&](const std::string& why) {
        const std::string access = std::string(what) + " " + std::to_string(bytes) + " bytes of shared memory at ";
        machine.stop(access + std::to_string(at) + why);
    };
    if (at % bytes) stop(", which is no multiple of that");
    if (at + bytes > machine.shared.size()) {
        stop("; the block has " + std::to_string(machine.shared.size()) + " bytes");
    }
}

void global_read(void* to, const void* from, uint32_t bytes) {
    check_global(from, bytes, "reads");
    std::memcpy(to, from, bytes);
}

void global_write(void* to, const void* from, uint32_t bytes) {
    check_global(to, bytes, "writes");
    std::memcpy(to, from, bytes);
}

uint64_t count_up(void* at, uint64_t least) {
    check_global(at, 8, "adds to");
    uint64_t& count = *static_cast<uint64_t*>(at);
    return count = std::max(count, least) + 1;
}

void shared_read(void* to, uint32_t from, uint32_t bytes) {
    check_shared(from, bytes, "reads");
    machine.check(machine.clocks.read(machine.current, from, bytes));
    std::memcpy(to, &machine.shared[from], bytes);
}

void shared_write(uint32_t to, const void* from, uint32_t bytes) {
    check_shared(to, bytes, "writes");
    machine.check(machine.clocks.write(machine.current, to, bytes, State::WRITTEN));
    std::memcpy(&machine.shared[to], from, bytes);
}

void copy_async(uint32_t to, const void* from, uint32_t bytes, bool present) {
    check_shared(to, bytes, "copies to");
    if (present) check_global(from, bytes, "copies");
    machine.check(machine.clocks.write(machine.current, to, bytes, State::IN_FLIGHT));
    std::memset(&machine.shared[to], 0xff, bytes);
    machine.threads[machine.current]->open.push_back({to, from, bytes, present});
}

void copy_commit() {
    Thread& self = *machine.threads[machine.current];
    self.groups.push_back(std::move(self.open));
    self.open.clear();
}

void copy_wait(uint32_t pending) {
    Thread& self = *machine.threads[machine.current];
    while (self.groups.size() > pending) {
        for (const Copy& copy : self.groups.front()) {
            machine.check(machine.clocks.write(machine.current, copy.to, copy.bytes, State::WRITTEN));
            if (copy.present) {
                std::memcpy(&machine.shared[copy.to], copy.from, copy.bytes);
            } else {
                std::memset(&machine.shared[copy.to], 0, copy.bytes);
            }
        }
        self.groups.pop_front();
    }
}

}  // namespace simt

void simt_allow(const void* start, uint64_t bytes) {
    simt::allowed.push_back({static_cast<const char*>(start), bytes});
}

void simt_forbid_all() { simt::allowed.clear(); }


