/// \file array_call.h
/// \brief A call that repeats on pairs of arrays: the common case is checked here, everything else by the caller, in
/// words.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <functional>
#include <string>

namespace alltoallv {

/// What the arrays of a call must be: of one Python type, contiguous, of these buffer formats and at least so long.
struct Arrays {
    nanobind::object type;
    std::string input_format, output_format;
    size_t input_bytes, output_bytes;
    bool in_place;  ///< whether the output may be the input
};

struct ArrayCall {
    Arrays arrays;
    std::function<void(uintptr_t input, uintptr_t output)> call;

    /// False if these are no such arrays, with nothing done.
    bool run(nanobind::handle input, nanobind::handle output) const;
};

}  // namespace alltoallv
