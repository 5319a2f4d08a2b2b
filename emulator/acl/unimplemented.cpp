// Functions that must exist but have no meaning here: they fail with an error that contains their name. Compiled once
// per library, with ALLTOALLV_UNIMPLEMENTED naming the list. The functions take no arguments: in the C ABI the caller
// removes the arguments that it passed.
#include "runtime/failure.h"

#pragma GCC visibility push(default)
extern "C" {

#define FAILS(name)                                                                              \
    int name();                                                                                  \
    int name() {                                                                                 \
        return alltoallv::emulator::report(#name, 207000, "is not implemented by the emulator"); \
    }
#define EMPTY(name)                                                                       \
    long name();                                                                          \
    long name() {                                                                         \
        alltoallv::emulator::report(#name, 207000, "is not implemented by the emulator"); \
        return 0;                                                                         \
    }
#define UNDEFINED(name)                                                                   \
    long name();                                                                          \
    long name() {                                                                         \
        alltoallv::emulator::report(#name, 207000, "is not implemented by the emulator"); \
        return -1;                                                                        \
    }
#include ALLTOALLV_UNIMPLEMENTED

}  // extern "C"
#pragma GCC visibility pop
