// Functions that must exist but have no meaning here: they fail with an error that contains their name. Compiled once
// per library, with ALLTOALLV_UNIMPLEMENTED naming the list. The functions take no arguments: in the C ABI the caller
// removes the arguments that it passed.
#include "runtime/failure.h"

#pragma GCC visibility push(default)
extern "C" {

#define STUB(name, Result, value)                                                         \
    Result name();                                                                        \
    Result name() {                                                                       \
        alltoallv::emulator::report(#name, 207000, "is not implemented by the emulator"); \
        return value;                                                                     \
    }
#define FAILS(name) STUB(name, int, 207000)
#define EMPTY(name) STUB(name, long, 0)
#define UNDEFINED(name) STUB(name, long, -1)
#include ALLTOALLV_UNIMPLEMENTED

}  // extern "C"
#pragma GCC visibility pop
