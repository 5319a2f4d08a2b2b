#include "all_to_all_v/operation.h"

#include <algorithm>
#include <new>
#include <string>
#include <utility>

namespace alltoallv {

Operation::Operation(OpKind op, AllToAllVParam group, Connect connect)
    : op_(op), group_(std::move(group)), connect_(std::move(connect)) {}

/// Runs this rank's own checks; their errors are announced to the peers and thrown on.
template <class Checks>
auto Operation::guard(Checks&& checks) {
    try {
        return checks();
    } catch (const Error& error) {
        announce(error);
        throw;
    } catch (const std::bad_alloc&) {
        announce(resource_error(5001, "out of host memory"));
        throw;
    }
}

TensorDesc Operation::infer_shape(std::span<const TensorDesc> inputs) {
    return guard([&] { return infer(inputs); });
}

TensorDesc Operation::check(std::span<const TensorDesc> inputs, std::span<const TensorDesc> outputs) const {
    if (!outputs.empty()) check_setup(inputs, outputs);
    return infer(inputs);
}

void Operation::setup(std::span<const TensorDesc> inputs, std::span<const TensorDesc> outputs) {
    {
        const std::lock_guard lock(planning_);
        plan_ = nullptr;  // a failed setup leaves nothing to execute
    }
    guard([&] { check_setup(inputs, outputs); });
    // This is outside the guard: without a communicator an error cannot be announced.
    const CommunicatorPtr communicator = connected();
    guard([&] { check_member(*communicator); });
    auto plan = std::make_shared<const Plan>(
        Plan{communicator, {inputs.begin(), inputs.end()}, {outputs.begin(), outputs.end()}});
    const std::lock_guard lock(planning_);
    plan_ = std::move(plan);
}

void Operation::execute(std::span<const ByteRange> inputs, std::span<const ByteRange> outputs, double timeout,
                        void* stream) {
    const std::shared_ptr<const Plan> plan = guard([&] { return check_execute(inputs, outputs); });
    run(*plan, inputs, outputs, timeout, stream);
}

std::shared_ptr<const Operation::Plan> Operation::plan_for(DType dtype, Shape shape) const {
    const std::lock_guard lock(planning_);
    if (plan_ == nullptr || plan_->inputs.size() != 1 || plan_->inputs[0].dtype != dtype ||
        !std::ranges::equal(plan_->inputs[0].shape, shape))
        return nullptr;
    return plan_;
}

std::shared_ptr<const Operation::Plan> Operation::check_execute(std::span<const ByteRange> inputs,
                                                                std::span<const ByteRange> outputs) const {
    std::shared_ptr<const Plan> plan;
    {
        const std::lock_guard lock(planning_);
        plan = plan_;
    }
    if (plan == nullptr) throw invalid_param(1015, "execute was called before setup had succeeded");
    check_tensor_count("inputs", inputs.size(), plan->inputs.size());
    check_tensor_count("outputs", outputs.size(), plan->outputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) check_buffer(input_names[i], inputs[i], plan->inputs[i]);
    for (size_t i = 0; i < outputs.size(); ++i) check_buffer(output_names[i], outputs[i], plan->outputs[i]);
    const bool in_place =
        works_in_place() && plan->inputs[0].dtype == plan->outputs[0].dtype && inputs[0].address == outputs[0].address;
    if (overlaps(inputs[0], outputs[0]) && !in_place)
        throw invalid_param(1016, "the input and the output overlap in memory");
    for (size_t i = 1; i < outputs.size(); ++i)
        if (overlaps(outputs[i], inputs[0]) || overlaps(outputs[i], outputs[0]) ||
            (i == 2 && overlaps(outputs[1], outputs[2])))
            throw invalid_param(1017, "the ", output_names[i], " overlaps another tensor in memory");
    return plan;
}

/// Returns the communicator, which must have the param's rank and size. Throws backend_unavailable without one.
CommunicatorPtr Operation::connected() {
    const std::lock_guard lock(connecting_);
    if (communicator_ != nullptr) return communicator_;
    if (connect_) communicator_ = connect_(group_);
    if (communicator_ != nullptr) return communicator_;
    throw backend_unavailable(5002, "the operation has no communicator, expected one, or a function that connects");
}

/// An external communicator or a rank table has not been compared with the param before.
void Operation::check_member(const Communicator& communicator) const {
    check_ranks(group_.rank, group_.rank_size, communicator.rank(), communicator.size(), communicator.domain());
}

void check_ranks(int rank, int rank_size, int own_rank, int size, std::string_view domain) {
    if (rank == own_rank && rank_size == size) return;
    throw invalid_param(1018, "rank and rank_size are ", rank, " and ", rank_size, ", expected ", own_rank, " and ",
                        size, ", as in the communicator \"", domain, "\"");
}

void Operation::announce(const Error& error) {
    try {
        connected()->fail(op_, error);
    } catch (const std::exception&) {
        const std::string_view text = error.what(), id = id_of(text);
        throw Error(error.kind(), error.code(),
                    joined(text.substr(0, text.size() - id.size()), " (the peers could not be notified)", id));
    }
}

}  // namespace alltoallv
