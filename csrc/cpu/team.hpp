// Threads. In a host (transformers, vLLM) torch's loops run between the calls of these kernels. There the work runs on
// the OpenMP runtime that torch has loaded: torch's threads stay awake for milliseconds after a loop, and a second team
// would compete with them for CPUs. But OpenMP waits for every thread of the team, also for one that has no CPU, so a
// step on a busy machine takes ten times as long. Our own team serves a step in which no loop of torch runs, a process
// that was forked (OpenMP's threads stayed with the parent), and a process without OpenMP.
//
// Each calling thread has its own team of ours. Its threads are started once, keep their numbers, and sleep between
// calls. A call does not wait for a thread that has not come: it waits only for those that have begun.
#pragma once

#include <functional>

namespace pagedkv {

// Run work(0), and at the same time work(i) for some of i = 1 ... threads - 1; return when all that have begun have
// returned. A thread that comes late does not begin, so `work` takes its parts from shared counters until none is left.
// It does not throw.
void run_team(int threads, const std::function<void(int)>& work);

// Have the following calls of this thread run on our own team, or on torch's threads. Returns what was chosen before.
bool use_own_team(bool own);

}  // namespace pagedkv
