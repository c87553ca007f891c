// A call as Python hands it over, and calls that are known: of what kind they are was checked when the first of them came.
#pragma once

#include <Python.h>

namespace pagedkv {

extern PyMethodDef call_methods[], move_methods[];  // see calls.cpp, moves.cpp

}  // namespace pagedkv
