// The instruction sets that were compiled.
#pragma once

#include "contract.hpp"

namespace pagedkv {

extern const Isa* const ISAS[];  // best first; ends with null

const Isa* isa_named(const char* name);  // null if the processor has none of that name

}  // namespace pagedkv
