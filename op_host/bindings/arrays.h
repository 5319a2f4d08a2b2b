// Arrays of the frameworks, read where they lie.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "base/dtype.h"
#include "core/request.h"
#include "transport/shm/arena.h"

namespace alltoallv {

/// A contiguous array in host memory.
struct ArrayView {
    DType dtype;
    Shape shape;  ///< lives as long as the array, or `kept`
    size_t size;  ///< elements
    uintptr_t address;
    std::shared_ptr<const int64_t[]> kept = nullptr;  ///< the shape, where the array does not hold it in C

    ByteRange bytes() const { return {address, size * size_of(dtype)}; }
};

class Framework {
  public:
    virtual ~Framework() = default;

    /// Nothing for an array that is more than contiguous elements of a dtype of the core.
    virtual std::optional<ArrayView> view(nanobind::handle array) const = 0;

    /// Nothing, too, for one whose framework has to be asked, or told, about what is done with it.
    virtual std::optional<ArrayView> input(nanobind::handle array) const = 0;

    /// Nothing, too, for one that may not be written to.
    virtual std::optional<ArrayView> output(nanobind::handle array) const = 0;

    /// An array of that shape over a block, of the dtype of `like`; throws python_error where the framework refuses.
    virtual nanobind::object make(nanobind::handle like, Shape shape, Block&& block) const = 0;
};

/// The framework whose own array type this is an array of: not of one derived from it, which may mean something else by
/// its elements. Null for anything else.
const Framework* framework_of(nanobind::handle object);

/// The arrays that a call is given.
struct ArrayPair {
    const Framework* framework;
    ArrayView input;
    std::optional<ArrayView> output;  ///< nothing: to be made

    const Shape* output_shape() const { return output ? &output->shape : nullptr; }
};

/// Nothing if these are no two arrays of one framework and dtype that a call can take as they are; `output` may be
/// None.
std::optional<ArrayPair> arrays_given(nanobind::handle input, nanobind::handle output);

/// Memory for the output of an exchange, gaps zero.
Block new_output(const Request& request, DType dtype);

/// Arrays of exactly this type are `framework`'s from now on; both stay for the life of the process.
void add_framework(nanobind::handle type, const Framework& framework);

}  // namespace alltoallv
