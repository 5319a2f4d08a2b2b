// What every ATB-shaped operation does as one rank of several: connects at its first need, and tells the peers
// of a failure.
#pragma once

#include <mutex>
#include <new>

#include "atb/connect.h"
#include "base/error.h"

namespace alltoallv {

class Member {
  public:
    /// `group` names the rank and its peers; `op` is the operator whose failures are announced.
    Member(OpKind op, AllToAllVParam group, Connect connect);

    /// The communicator, of the rank and size that the param says. Throws backend_unavailable without one.
    CommunicatorPtr connected();

    /// Throws code 1 if the communicator has another rank or size than the param.
    void check(const Communicator& communicator) const;

    /// Tells the peers that this rank fails its next call.
    void announce(const Error& error);

    /// Runs this rank's own checks; what they throw is announced to the peers and thrown on.
    template <typename Checks>
    auto guard(Checks&& checks) {
        try {
            return checks();
        } catch (const Error& error) {
            announce(error);
            throw;
        } catch (const std::bad_alloc&) {
            announce(resource_error("out of host memory"));
            throw;
        }
    }

  private:
    const OpKind op_;
    const AllToAllVParam group_;
    const Connect connect_;
    std::mutex connecting_;
    CommunicatorPtr communicator_;  ///< under connecting_
};

}  // namespace alltoallv
