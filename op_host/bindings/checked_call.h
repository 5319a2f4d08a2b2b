// A collective on tensors of the caller, in any framework: read and checked here, then run or submitted.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/plan.h"

namespace alltoallv {

/// One tensor of a call.
struct Operand {
    nb::object tensor;  ///< keeps the memory
    DType dtype{};
    ByteRange bytes{0, 0};
    std::vector<int64_t> shape{};

    int64_t count() const { return static_cast<int64_t>(bytes.bytes / size_of(dtype)); }
};

/// Reads the tensors of one front end by its adapter (`alltoallv._calls.adapters`), and in place where that is
/// `direct`. Without an adapter, None, there are only those that can be read in place.
class Tensors {
  public:
    explicit Tensors(nb::handle adapter);

    /// Returns contiguous memory with the values of the argument called `name`.
    Operand input(std::string_view name, nb::handle tensor) const;

    /// Checks a tensor that will be written, with the dtype of `like` if there is one.
    Operand output(std::string_view name, nb::handle tensor, const Operand* like = nullptr) const;

    /// Makes a tensor of that shape with the dtype of `like`.
    Operand make(std::vector<int64_t> shape, const Operand& like) const;

    /// Returns the tensors of a list, one for each of `size` ranks.
    std::vector<nb::object> listed(std::string_view name, nb::handle tensors, int size) const;

    /// True if this is one tensor, and not a list; without an adapter there are only lists.
    bool is_tensor(nb::handle object) const;

  private:
    void need_adapter() const;
    Operand looked_at(nb::object tensor, const std::string& dtype) const;

    nb::handle adapter_;
    bool direct_;
};

/// Python's arguments of a collective.
struct CallArguments {
    nb::handle adapter;
    CommunicatorPtr communicator;
    OpKind op;
    nb::handle outputs, inputs;  ///< tensors, or lists of them; None where the collective has none, or makes them
    std::array<std::string_view, 3> names;  ///< of outputs, inputs and counts, for errors
    nb::handle root, reduce_op;
    nb::handle counts;               ///< rows of dimension 0 for every rank; None: equal parts
    std::optional<bool> one_tensor;  ///< one tensor holds the parts of all ranks; without a value it may also be a list
    nb::handle leaves{};             ///< of all ranks, in an all_reduce; invalid or None: the input is one vector
};

/// A collective that has passed this rank's checks.
class CheckedCall {
  public:
    explicit CheckedCall(const CallArguments& arguments);

    void run(double timeout, uintptr_t stream) const;
    WorkPtr submit(double timeout) const;

    nb::object result = nb::none();           ///< what it writes: a tensor, or a list
    std::vector<nb::object> inputs, outputs;  ///< the tensors that it reads and writes
    std::string name;                         ///< the argument that holds the outputs
    std::vector<int64_t> counts{};            ///< elements of every rank, where the caller gave counts
    size_t bytes() const { return bytes_; }   ///< of the larger side
    Communicator& communicator() const { return *communicator_; }

  private:
    friend struct Preparation;

    CommunicatorPtr communicator_;
    std::shared_ptr<const ReadyExchange> exchange_;  // or
    std::shared_ptr<ReadyReduction> reduction_;
    uintptr_t input_ = 0, output_ = 0;
    size_t bytes_ = 0;
    Block joined_;  // parts that the caller's memory does not hold one after the other
};

/// Throws invalid_param unless `op` is a reduction that is defined for the dtype, which is `shown` to the user.
ReduceOp checked_reduction(nb::handle op, DType dtype, std::string_view shown);

/// Returns the number of all ranks' leaves; throws unless an input of that shape holds this rank's.
int64_t checked_leaves(nb::handle leaves, Shape input, int size);

/// Throws invalid_param unless this is a list of one tensor for each of `size` ranks.
void check_list(std::string_view name, nb::handle tensors, int size);

/// Returns an integer of any type; nothing for everything else, a bool and numbers beyond 64 bits included.
std::optional<int64_t> integer_of(nb::handle value);

/// Returns one of `size` ranks; throws invalid_param with the argument's name for everything else.
int checked_rank(std::string_view name, nb::handle rank, int size);

}  // namespace alltoallv
