// Reads the frameworks' arrays in place.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "runtime/base/dtype.h"
#include "runtime/core/request.h"
#include "runtime/shm/arena.h"

namespace alltoallv {

/// A contiguous array in host memory.
struct ArrayView {
    DType dtype{};
    Shape shape{};    ///< lives as long as the array, or `kept`
    size_t size = 0;  ///< elements
    uintptr_t address = 0;
    std::unique_ptr<const int64_t[]> kept = nullptr;  ///< owns the shape, if the array does not store it in C

    ByteRange bytes() const { return {address, size * size_of(dtype)}; }
};

/// Reads arrays in place. The results are filled and not returned, which a small call would notice.
class Framework {
  public:
    virtual ~Framework() = default;

    /// Returns false unless the array consists of contiguous elements of a dtype that the core knows.
    virtual bool view(nanobind::handle array, ArrayView& seen) const = 0;

    /// Also reads one with gaps, by a contiguous copy, which `copy` then holds. Returns false as well if the framework
    /// must be asked or informed about the use of the array; `tracked`: the caller informs it of a gradient. Nor does
    /// a copy for which there is no memory raise here: the front end meets that under its guard.
    virtual bool input(nanobind::handle array, ArrayView& seen, nanobind::object& copy, bool tracked = false) const = 0;

    /// Also returns false if the array must not be written to.
    virtual bool output(nanobind::handle array, ArrayView& seen) const = 0;

    /// True if somebody is to see more of a call than its result.
    virtual bool watched() const { return false; }

    /// True if `input` refuses the array only because a gradient with respect to it is recorded.
    virtual bool wants_gradient(nanobind::handle /*array*/) const { return false; }

    /// Reads an output with gaps: its dtype and shape. Returns false where `copy_to` cannot write it.
    virtual bool gaps(nanobind::handle /*array*/, ArrayView& /*seen*/) const { return false; }

    /// Copies `values` to the array.
    virtual void copy_to(nanobind::handle /*array*/, nanobind::handle /*values*/) const {}

    /// Makes an array of that shape over a block, with `like`'s dtype; throws python_error if the framework refuses.
    virtual nanobind::object make(nanobind::handle like, Shape shape, Block&& block) const = 0;
};

/// Returns the framework of which this is an array, or null. Types derived from its array type do not count, because
/// their elements may have another meaning.
const Framework* framework_of(nanobind::handle object);

/// Copies numbers, or bytes, to a NumPy array of that shape.
nanobind::object numpy_array(std::span<const int64_t> numbers, const std::vector<int64_t>& shape);
nanobind::object numpy_array(std::span<const std::byte> bytes, const std::vector<int64_t>& shape);

/// The arrays of a call.
struct ArrayPair {
    const Framework* framework = nullptr;  ///< null if a call cannot use these arrays directly
    ArrayView input;
    ArrayView output;
    nanobind::object copy{};  ///< holds the input's memory if that is not the array's own
    bool has_output = false;  ///< else it must be made

    /// What a caller lets happen to the arrays.
    enum class Use : uint8_t {
        plain,
        asks,     ///< the caller wants to know if only a gradient is in the way
        tracked,  ///< the caller records the gradient
        gaps,     ///< the output may have gaps, and is then `gapped`
    };

    /// `output` may be None; both must be arrays of one framework and dtype.
    ArrayPair(nanobind::handle input, nanobind::handle output, Use use = Use::plain);

    bool gapped = false;          ///< `output` has no memory: the call needs other memory, which is copied afterwards
    bool wants_gradient = false;  ///< the only reason why a call cannot use these arrays directly

    explicit operator bool() const { return framework != nullptr; }
    /// Copies the shapes, which a caller's code might change.
    void keep_shapes();
    /// True if these are the same arrays, in the same memory, or copied.
    bool operator==(const ArrayPair& other) const;
    const Shape* output_shape() const { return has_output ? &output.shape : nullptr; }
};

/// True if somebody is to see more of a call than its result, in any framework.
bool any_watched();

/// Registers `framework` for arrays of exactly this type; both live until the process ends.
void add_framework(nanobind::handle type, const Framework& framework);

}  // namespace alltoallv
