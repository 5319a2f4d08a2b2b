#include "atb/member.h"

#include <string>
#include <utility>

namespace alltoallv {

Member::Member(OpKind op, AllToAllVParam group, Connect connect)
    : op_(op), group_(std::move(group)), connect_(std::move(connect)) {}

CommunicatorPtr Member::connected() {
    const std::lock_guard lock(connecting_);
    if (communicator_ != nullptr) return communicator_;
    if (connect_) communicator_ = connect_(group_);
    if (communicator_ != nullptr) return communicator_;
    throw backend_unavailable("the operation has no communicator, expected one, or a function that connects");
}

void Member::check(const Communicator& communicator) const {
    // With an external communicator or a rank table nothing has compared these before.
    if (communicator.size() == group_.rank_size && communicator.rank() == group_.rank) return;
    throw invalid_param("rank and rank_size are " + std::to_string(group_.rank) + " and " +
                        std::to_string(group_.rank_size) + ", expected " + std::to_string(communicator.rank()) +
                        " and " + std::to_string(communicator.size()) + ", as in the communicator \"" +
                        communicator.domain() + "\"");
}

void Member::announce(const Error& error) {
    try {
        connected()->fail(op_, error);
    } catch (const std::exception&) {
        throw Error(error.kind(), error.code(), std::string(error.what()) + " (the peers could not be told)");
    }
}

}  // namespace alltoallv
