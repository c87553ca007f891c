// The rules of the race detector. See clocks.hpp.
#include "clocks.hpp"

#include <algorithm>

namespace simt {

void Clocks::begin_block(uint32_t threads, uint32_t shared_bytes) {
    threads_ = threads;
    warps_ = (threads + 31) / 32;
    clock_.assign(threads, std::vector<uint32_t>(threads, 0));
    for (uint32_t i = 0; i < threads; ++i) clock_[i][i] = 1;
    cells_.assign((shared_bytes + 1) / 2, Cell{0, 0, State::UNWRITTEN});
    readers_.assign(cells_.size() * warps_, Reader{0, 0});
}

void Clocks::synchronise(const std::vector<uint32_t>& threads) {
    joined_.assign(threads_, 0);
    for (uint32_t i : threads) {
        for (size_t j = 0; j < joined_.size(); ++j) joined_[j] = std::max(joined_[j], clock_[i][j]);
    }
    for (uint32_t i : threads) {
        clock_[i] = joined_;
        ++clock_[i][i];
    }
}

Race Clocks::read(uint32_t thread, uint32_t at, uint32_t bytes) {
    for (uint32_t cell = at / 2; cell < (at + bytes + 1) / 2; ++cell) {
        const Cell& c = cells_[cell];
        if (c.state == State::UNWRITTEN) return {"reads shared memory that no thread has written", thread};
        if (c.state == State::IN_FLIGHT) {
            return {"reads bytes of an asynchronous copy that has not landed (wait for it first), issued by", c.writer};
        }
        if (!has_seen(thread, c.writer, c.moment)) return {"reads without a barrier after the write by", c.writer};
        readers_[cell * warps_ + thread / 32] = {clock_[thread][thread], static_cast<uint16_t>(thread)};
    }
    return {};
}

Race Clocks::write(uint32_t thread, uint32_t at, uint32_t bytes, State becomes) {
    const uint32_t now = clock_[thread][thread];
    for (uint32_t cell = at / 2; cell < (at + bytes + 1) / 2; ++cell) {
        Cell& c = cells_[cell];
        const bool lands = c.state == State::IN_FLIGHT && c.writer == thread && becomes == State::WRITTEN;
        if (c.state == State::IN_FLIGHT && !lands) {
            return {"writes where an asynchronous copy is in flight, issued by", c.writer};
        }
        if (c.state == State::WRITTEN && !has_seen(thread, c.writer, c.moment)) {
            return {"writes without a barrier after the write by", c.writer};
        }
        for (uint32_t w = 0; w < warps_ && !lands; ++w) {
            const Reader& r = readers_[cell * warps_ + w];
            if (r.moment && !has_seen(thread, r.thread, r.moment)) {
                return {"writes without a barrier after the read by", r.thread};
            }
        }
        c = {now, static_cast<uint16_t>(thread), becomes};
    }
    return {};
}

}  // namespace simt
