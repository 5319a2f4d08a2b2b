// An exchange of int32 by counts and displacements, whose receive counts may be learnt.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "check.h"
#include "core/communicator.h"

namespace testing {

/// What one rank sends and receives, in elements.
struct Layout {
    std::vector<int64_t> sends, sdispls, recvs, rdispls;
};

/// Where `learns`, checks that the counts that are learnt are those of the layout.
inline void exchange_ints(alltoallv::Communicator& comm, const std::vector<int32_t>& input,
                          std::vector<int32_t>& output, const Layout& layout, bool learns) {
    alltoallv::Exchange x;
    x.dtype = alltoallv::DType::int32;
    x.input = input.data();
    x.output = output.data();
    x.send_counts = layout.sends;
    x.sdispls = layout.sdispls;
    if (!learns) x.recv_counts = layout.recvs;
    x.rdispls = layout.rdispls;
    x.allocate = [&](std::span<const int64_t> learnt) -> void* {
        CHECK(std::equal(learnt.begin(), learnt.end(), layout.recvs.begin(), layout.recvs.end()));
        return output.data();
    };
    comm.exchange(x, -1);
}

}  // namespace testing
