// Blocks, fibers, barriers and collectives of a warp. See simt.hpp for their promises.
#include "machine.hpp"

#include <cstring>
#include <numeric>

namespace simt {

Machine machine;

uint32_t Machine::draw(uint32_t below) {
    random ^= random << 13;
    random ^= random >> 7;
    random ^= random << 17;
    return static_cast<uint32_t>((random >> 11) % below);
}

static void thread_body() {
    fiber_begins();
    machine.kernel(machine.params);
    Thread& self = *machine.threads[machine.current];
    if (!self.open.empty() || !self.groups.empty()) {
        machine.stop("ends with asynchronous copies that it has not waited for");
    }
    machine.leave();
}

void Machine::run_block(uint32_t index, uint32_t shared_bytes) {
    block = index;
    num_done = 0;
    shared.assign(shared_bytes, 0xff);
    clocks.begin_block(static_cast<uint32_t>(threads.size()), shared_bytes);
    for (auto& warp : collectives) warp.clear();
    for (auto& barrier : barriers) barrier = {};
    runnable.resize(threads.size());
    std::iota(runnable.begin(), runnable.end(), 0u);
    for (auto& thread : threads) {
        thread->waits_for.clear();
        thread->done = false;
        thread->open.clear();
        thread->groups.clear();
        thread->fiber.prepare(thread_body);
    }
    const uint32_t pick = draw(static_cast<uint32_t>(runnable.size()));
    current = runnable[pick];
    runnable[pick] = runnable.back();
    runnable.pop_back();
    host.switch_to(threads[current]->fiber);  // returns when the block is done, or on a fault
}

void Machine::next(Thread& from) {
    if (!fault.empty() || num_done == threads.size()) return from.fiber.switch_to(host);
    if (runnable.empty()) {
        fault = "block " + std::to_string(block) + ": deadlock, no thread can run:";
        for (size_t i = 0, listed = 0; i < threads.size() && listed < 6; ++i) {
            if (threads[i]->done) continue;
            fault += " thread " + std::to_string(i) + " waits for " + threads[i]->waits_for + ";";
            ++listed;
        }
        fault += " " + std::to_string(num_done) + " threads have ended";
        return from.fiber.switch_to(host);
    }
    const uint32_t pick = draw(static_cast<uint32_t>(runnable.size()));
    current = runnable[pick];
    runnable[pick] = runnable.back();
    runnable.pop_back();
    if (threads[current].get() != &from) from.fiber.switch_to(threads[current]->fiber);
}

void Machine::wait(std::string why) {
    const uint32_t me = current;
    threads[me]->waits_for = std::move(why);
    next(*threads[me]);
    current = me;
}

void Machine::wake(uint32_t thread) {
    threads[thread]->waits_for.clear();
    runnable.push_back(thread);
}

void Machine::check(const Race& race) {
    if (!race.what) return;
    stop(std::string(race.what) + (race.other == current ? "" : " thread " + std::to_string(race.other)));
}

void Machine::stop(const std::string& what) {
    if (fault.empty()) fault = "block " + std::to_string(block) + ", thread " + std::to_string(current) + " " + what;
    leave();
    std::abort();
}

void Machine::leave() {
    Thread& self = *threads[current];
    self.done = true;
    ++num_done;
    next(self);
    std::abort();  // not reached: no thread switches to one that is done
}

uint32_t thread_index() { return machine.current; }
uint32_t block_index() { return machine.block; }
uint32_t num_blocks() { return machine.blocks; }

void sync_team(uint32_t id, uint32_t count) {
    if (id >= 16) machine.stop("waits at barrier " + std::to_string(id) + "; there are 16, numbered from 0");
    if (count % 32 || !count) {
        machine.stop("waits at a barrier for " + std::to_string(count) + " threads; it takes whole warps");
    }
    Barrier& barrier = machine.barriers[id];
    if (!barrier.arrived.empty() && barrier.expected != count) {
        machine.stop("waits for " + std::to_string(count) + " threads at barrier " + std::to_string(id) +
                     ", where others wait for " + std::to_string(barrier.expected));
    }
    barrier.expected = count;
    barrier.arrived.push_back(machine.current);
    if (barrier.arrived.size() < count) return machine.wait("barrier " + std::to_string(id));
    machine.clocks.synchronise(barrier.arrived);
    for (uint32_t thread : barrier.arrived) {
        if (thread != machine.current) machine.wake(thread);
    }
    barrier.arrived.clear();
}

void sync_block() { sync_team(0, static_cast<uint32_t>(machine.threads.size())); }

namespace {

// Run a collective of the lanes of `mask`: each lane waits, and the last one that arrives calls `finish` for all.
template <class Finish> void collect(const char* kind, uint32_t mask, void* mine, Finish finish) {
    const uint32_t warp = machine.current / 32, lane = machine.current % 32;
    if (!(mask >> lane & 1)) machine.stop(std::string("calls ") + kind + " with a mask that leaves it out");
    auto& open = machine.collectives[warp];
    size_t at = 0;
    while (at < open.size() && open[at].mask != mask) ++at;
    if (at == open.size()) open.push_back({kind, mask, 0, {}});
    Collective& collective = open[at];
    if (std::strcmp(collective.kind, kind)) {
        machine.stop(std::string("is at ") + kind + " while other lanes of its warp are at " + collective.kind);
    }
    collective.arrived |= 1u << lane;
    collective.lanes[lane] = mine;
    if (collective.arrived != mask) return machine.wait(std::string(kind) + " with its warp");
    Collective complete = collective;
    open.erase(open.begin() + static_cast<long>(at));
    finish(complete);
    for (uint32_t other = 0; other < 32; ++other) {
        if (mask >> other & 1 && other != lane) machine.wake(warp * 32 + other);
    }
}

}  // namespace

void sync_warp(uint32_t mask) {
    collect("sync_warp", mask, nullptr, [](const Collective& c) {
        std::vector<uint32_t> threads;
        for (uint32_t lane = 0; lane < 32; ++lane) {
            if (c.mask >> lane & 1) threads.push_back(machine.current / 32 * 32 + lane);
        }
        machine.clocks.synchronise(threads);
    });
}

uint64_t shuffle(uint32_t mask, uint64_t value, uint32_t source) {
    struct Mine {
        uint64_t value;
        uint32_t source;
        uint64_t result;
    } mine{value, source, 0};
    if (!(mask >> source & 1)) {
        machine.stop("shuffles from lane " + std::to_string(source) + ", which is not in the mask");
    }
    collect("shuffle", mask, &mine, [](const Collective& c) {
        for (uint32_t lane = 0; lane < 32; ++lane) {
            if (!(c.mask >> lane & 1)) continue;
            auto& one = *static_cast<Mine*>(c.lanes[lane]);
            one.result = static_cast<Mine*>(c.lanes[one.source])->value;
        }
    });
    return mine.result;
}

uint32_t ballot(uint32_t mask, bool vote) {
    struct Mine {
        bool vote;
        uint32_t result;
    } mine{vote, 0};
    collect("ballot", mask, &mine, [](const Collective& c) {
        uint32_t votes = 0;
        for (uint32_t lane = 0; lane < 32; ++lane) {
            if (c.mask >> lane & 1) votes |= static_cast<uint32_t>(static_cast<Mine*>(c.lanes[lane])->vote) << lane;
        }
        for (uint32_t lane = 0; lane < 32; ++lane) {
            if (c.mask >> lane & 1) static_cast<Mine*>(c.lanes[lane])->result = votes;
        }
    });
    return mine.result;
}

void load_matrices(uint32_t (&out)[4], uint32_t at, bool transposed) {
    struct Mine {
        uint16_t row[8];
        uint32_t* out;
        bool transposed;
    } mine{{}, out, transposed};
    shared_read(mine.row, at, 16);  // the lane that gives the address of a row reads the row
    collect(transposed ? "load_matrices_transposed" : "load_matrices", ~0u, &mine, [](const Collective& c) {
        for (uint32_t lane = 0; lane < 32; ++lane) {
            const uint32_t group = lane / 4, place = lane % 4;
            auto& one = *static_cast<Mine*>(c.lanes[lane]);
            for (uint32_t matrix = 0; matrix < 4; ++matrix) {
                const auto element = [&](uint32_t row, uint32_t column) -> uint32_t {
                    return static_cast<Mine*>(c.lanes[8 * matrix + row])->row[column];
                };
                one.out[matrix] = one.transposed ? element(2 * place, group) | element(2 * place + 1, group) << 16
                                                 : element(group, 2 * place) | element(group, 2 * place + 1) << 16;
            }
        }
    });
}

void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bool half) {
    Operands mine{a, {b0, b1}, d, half};
    collect("multiply_add", ~0u, &mine, [](const Collective& c) {
        Operands* lanes[32];
        for (uint32_t lane = 0; lane < 32; ++lane) lanes[lane] = static_cast<Operands*>(c.lanes[lane]);
        multiply_fragments(lanes);
    });
}

}  // namespace simt

const char* simt_launch(void (*kernel)(const void*), const void* params, uint32_t blocks, uint32_t threads,
                        uint32_t shared_bytes, uint64_t seed) {
    using simt::machine;
    machine.kernel = kernel;
    machine.params = params;
    machine.blocks = blocks;
    machine.random = seed * 2654435769u + 88172645463325252u;
    machine.fault.clear();
    machine.collectives.resize((threads + 31) / 32);
    while (machine.threads.size() < threads) machine.threads.push_back(std::make_unique<simt::Thread>());
    machine.threads.resize(threads);
    std::vector<uint32_t> order(blocks);
    std::iota(order.begin(), order.end(), 0u);
    for (uint32_t i = blocks; i > 1; --i) std::swap(order[i - 1], order[machine.draw(i)]);
    for (uint32_t block : order) {
        machine.run_block(block, shared_bytes);
        if (!machine.fault.empty()) break;
    }
    return machine.fault.empty() ? nullptr : machine.fault.c_str();
}
