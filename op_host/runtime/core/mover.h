/// \file mover.h
/// \brief The interface of engines that carry bytes between ranks on different hosts, after the ranks have agreed.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace alltoallv {

struct Outgoing {
    int rank;
    const char* data;
    size_t bytes;
};

struct Incoming {
    int rank;
    char* data;
    size_t bytes;
};

/// One transfer at a time; all ranks make the same transfers in the same order, and know each other's sizes.
class Mover {
  public:
    virtual ~Mover() = default;

    /// Returns the name of the backend, as users know it.
    virtual std::string name() const = 0;

    /// Starts a transfer with at most one piece to and one from every rank, none empty; they must outlive the transfer.
    virtual void begin(std::span<const Outgoing> out, std::span<const Incoming> in) = 0;

    /// Continues for about 10 ms at most; true once all pieces have been sent and received. Throws peer_lost.
    virtual bool progress() = 0;

    /// Returns the ranks to or from which pieces are still missing.
    virtual std::vector<int> missing() const = 0;

    /// Frees its resources, even during a transfer; called on the thread that uses it.
    virtual void close() = 0;
};

}  // namespace alltoallv
