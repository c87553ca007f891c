// The instruction sets that were compiled.
#pragma once

#include "call.hpp"

namespace pagedkv {

extern const Isa* const ISAS[];  // best first; ends with null

}  // namespace pagedkv
