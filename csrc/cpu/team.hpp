// Threads. The work runs on the OpenMP runtime that torch has loaded, if there is one: then the process has one team,
// whose threads are awake between torch's own loops and never compete with them. Otherwise plain threads are started
// for the call. A process that was forked after this library was loaded starts plain threads, too: the team stayed with
// the parent, and OpenMP would wait for it forever.
#pragma once

#include <functional>

namespace pagedkv {

// Run work(0) ... work(n - 1) at the same time and return when all have returned. n is at most `threads`, and fewer if
// the system gives fewer threads.
void run_team(int threads, const std::function<void(int)>& work);

const char* team_runtime();  // "OpenMP" or "threads"

}  // namespace pagedkv
