// A copy beside threads that compute and leave no CPU to it. A thread of its own would take the CPU of one of them for
// the milliseconds of the copy, and the others would wait for the unit of work of that thread. So the copy is offered
// to the teams: a thread copies what is due, and then computes the unit that it has taken.
#pragma once

#include "moves/runs.hpp"

namespace pagedkv {

// Copy all runs. seconds: how long it may take, so that teams can copy; with 0 the calling thread copies at once.
// The calling thread copies the rest when the time is over. If no team has come in the first quarter, it copies then.
// One copy is offered at a time; another one is made at once.
void copy_spread(Copy& copy, double seconds);

// Called by each of the `threads` of a team between units of work. left: the bytes that the team will read after this
// unit; up to a quarter as many are copied. Only a team with a thread for each CPU of the copy's own thread helps:
// otherwise that thread finds an idle CPU.
void help_to_copy(int threads, int64_t left);

}  // namespace pagedkv
