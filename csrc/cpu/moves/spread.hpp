// A copy beside threads that compute and leave no core to it. A thread of its own would take the core of one of them
// for the milliseconds of the copy, and the others would wait for the unit of work in that one's hands. So the copy is
// offered to the teams: a thread copies the pieces that are due, and then computes the unit that it has taken.
#pragma once

#include "moves/runs.hpp"

namespace pagedkv {

// Copy all runs. seconds: how long it may take, so that teams can copy; with 0 the calling thread copies at once. It
// copies what no team has copied after that time, and, after half of it, a copy for which no team has come.
void copy_spread(Copy& copy, double seconds);

// Called by each of the `threads` of a team between units of work, while there is work for the others. Only a team that
// has a thread for each CPU of the copy's own thread helps: otherwise that thread finds an idle CPU.
void help_to_copy(int threads);

}  // namespace pagedkv
