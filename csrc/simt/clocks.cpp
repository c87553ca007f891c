// The rules of the race detector. See clocks.hpp.
#include "clocks.hpp"

#include <algorithm>

namespace simt {

void Clocks::begin_block(uint32_t threads, uint32_t shared_bytes) {
    threads_ = threads;
    warps_ = (threads + 31) / 32;
    const uint32_t all = threads + MOST_BARRIERS;
    clock_.assign(all, std::vector<uint32_t>(all, 0));
    fenced_ = clock_;
    ended_.assign(MOST_BARRIERS, std::vector<uint32_t>(all, 0));
    for (uint32_t i = 0; i < all; ++i) clock_[i][i] = 1;
    cells_.assign((shared_bytes + 1) / 2, Cell{0, 0, State::UNWRITTEN});
    readers_.assign(cells_.size() * warps_, Reader{0, 0});
}

void Clocks::join(std::vector<std::vector<uint32_t>>& clock, const std::vector<uint32_t>& threads) {
    joined_.assign(clock[0].size(), 0);
    for (uint32_t i : threads) {
        for (size_t j = 0; j < joined_.size(); ++j) joined_[j] = std::max(joined_[j], clock[i][j]);
    }
    for (uint32_t i : threads) clock[i] = joined_;
}

void Clocks::synchronise(const std::vector<uint32_t>& threads) {
    join(clock_, threads);
    join(fenced_, threads);
    for (uint32_t i : threads) ++clock_[i][i];
}

void Clocks::fence(uint32_t thread) {
    fenced_[thread] = clock_[thread];
    ++clock_[thread][thread];
}

void Clocks::arrive(uint32_t thread, uint32_t barrier) {
    auto& clock = clock_[of_barrier(barrier)];
    for (size_t j = 0; j < clock.size(); ++j) clock[j] = std::max(clock[j], clock_[thread][j]);
    ++clock_[thread][thread];
}

void Clocks::end_phase(uint32_t barrier) {
    const uint32_t me = of_barrier(barrier);
    ended_[barrier] = clock_[me];
    ++clock_[me][me];
}

void Clocks::acquire(uint32_t thread, uint32_t barrier) {
    const auto& ended = ended_[barrier];
    for (size_t j = 0; j < ended.size(); ++j) clock_[thread][j] = std::max(clock_[thread][j], ended[j]);
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

Race Clocks::issue(uint32_t thread, uint32_t barrier, uint32_t at, uint32_t bytes) {
    const auto fenced = [&](uint32_t other, uint32_t moment) {
        return other >= threads_ || fenced_[thread][other] >= moment;
    };
    for (uint32_t cell = at / 2; cell < (at + bytes + 1) / 2; ++cell) {
        Cell& c = cells_[cell];
        if (c.state == State::IN_FLIGHT) {
            return {"copies to where an asynchronous copy is in flight, issued by", c.writer};
        }
        if (c.state == State::WRITTEN && !has_seen(thread, c.writer, c.moment)) {
            return {"copies without a barrier after the write by", c.writer};
        }
        if (c.state == State::WRITTEN && !fenced(c.writer, c.moment)) {
            return {"copies without a fence after the write by", c.writer};
        }
        for (uint32_t w = 0; w < warps_; ++w) {
            const Reader& r = readers_[cell * warps_ + w];
            if (r.moment && !has_seen(thread, r.thread, r.moment)) {
                return {"copies without a barrier after the read by", r.thread};
            }
            if (r.moment && !fenced(r.thread, r.moment)) {
                return {"copies without a fence after the read by", r.thread};
            }
        }
        c = {0, static_cast<uint16_t>(of_barrier(barrier)), State::IN_FLIGHT};
    }
    return {};
}

void Clocks::land(uint32_t barrier, uint32_t at, uint32_t bytes) {
    const uint32_t me = of_barrier(barrier);
    for (uint32_t cell = at / 2; cell < (at + bytes + 1) / 2; ++cell) {
        cells_[cell] = {clock_[me][me], static_cast<uint16_t>(me), State::WRITTEN};
    }
}

}  // namespace simt
