// Threads. The work runs on the OpenMP runtime that torch has already loaded, if there is one: then the process has one team, whose
// threads are awake between torch's own loops and never compete with them. Else plain threads, started for the call; so in a process that
// was forked after this was loaded: the team stayed with the parent, and OpenMP would wait for it forever.
#pragma once

#include <functional>

namespace pagedkv {

// Runs work(0) ... work(n - 1) at the same time, n at most `threads` (fewer if there are no more to be had); returns when all have returned.
void run_team(int threads, const std::function<void(int)>& work);

const char* team_runtime();  // "OpenMP" or "threads"

}  // namespace pagedkv
