/// \file options.h
/// \brief The options of a communicator.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace alltoallv {

struct CommunicatorOptions {
    int rank = 0;
    int size = 1;
    std::string domain = "default";   ///< name, without budget
    std::optional<size_t> budget_mb;  ///< MB of shared memory per rank for outputs; unset: as the domain says, else 200
    bool threads = false;             ///< ranks are threads of this process
    std::vector<int> names;           ///< the ranks' numbers in messages, where they are others: of a part of a group
    std::vector<int64_t> processes;   ///< those expected as the ranks, as far as known, else 0 (control/liveness.h)
    bool replaceable = false;         ///< once their loss has been raised, others may come in their place
    std::string job;                  ///< distinguishes concurrent jobs of one user
    std::string secret;               ///< proves that ranks belong to the job, if it has one
    double timeout = 600.0;           ///< seconds
    double join_timeout = -1.0;       ///< seconds for the ranks to meet; negative: timeout
    bool check = true;                ///< compare the rows of all ranks before moving data
    std::string path = "auto";  ///< "auto", or inline, push, pull, cma, staged: uses no other path where it is possible
    size_t inline_bytes = 16384;  ///< largest payload of a rank that travels with its row
    size_t budget_bytes() const { return budget_mb.value_or(200) << 20; }
    /// Returns the bytes of a mailbox: payload for a private output travels with the row up to this size.
    size_t mailbox_bytes() const {
        const size_t share = (size_t{4} << 20) / static_cast<size_t>(size);
        return std::clamp(share, 4 * inline_bytes, 16 * inline_bytes);
    }
    int copy_threads = 0;      ///< threads of a rank for a large copy; 0 means as many as fit the processors
    double warn_after = 10.0;  ///< seconds of waiting until a warning names the late ranks
    std::string cure;          ///< what warnings and errors about ranks that have not joined add
};

}  // namespace alltoallv
