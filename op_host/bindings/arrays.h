/// \file arrays.h
/// \brief The arrays of the frameworks whose calls repeat, as far as such a call needs to see them.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <span>

#include "transport/shm/arena.h"

namespace alltoallv {

/// The dtype of an array: the same number for the same dtype of one framework.
using DTypeCode = uint64_t;

/// A contiguous array in host memory.
struct ArrayView {
    DTypeCode dtype;
    std::span<const int64_t> shape;  ///< lives as long as the array
    size_t size;                     ///< elements
    uintptr_t address;
};

/// Makes the array of one shape and dtype over a block.
using ArrayMaker = std::function<nanobind::object(Block&&)>;

class Framework {
  public:
    virtual ~Framework() = default;

    /// Nothing for dtypes that calls of the core cannot have.
    virtual std::optional<DTypeCode> dtype(nanobind::handle array) const = 0;

    /// Nothing for an array that is more than its elements: what the framework has to be asked about, or told.
    virtual std::optional<ArrayView> input(nanobind::handle array) const = 0;

    /// Nothing, too, for an array that may not be written to.
    virtual std::optional<ArrayView> output(nanobind::handle array) const = 0;

    /// Of arrays like `like`. A maker returns an invalid object, with no Python error set, where the framework refuses.
    virtual ArrayMaker maker(nanobind::handle like, nanobind::tuple shape) const = 0;
};

/// The framework whose own array type this is an array of: not of one derived from it, which may mean something else by
/// its elements. Null for anything else.
const Framework* framework_of(nanobind::handle object);

/// Arrays of exactly this type are `framework`'s from now on; both stay for the life of the process.
void add_framework(nanobind::handle type, const Framework& framework);

}  // namespace alltoallv
