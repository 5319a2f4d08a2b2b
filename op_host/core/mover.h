/// \file mover.h
/// \brief What carries bytes between ranks on different hosts, once they have agreed about an operator.
#pragma once

#include <cstddef>
#include <functional>
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

    /// The name of the backend, as users see it.
    virtual std::string name() const = 0;

    /// At most one piece to and one from every rank, none empty; they outlive the transfer.
    virtual void begin(std::span<const Outgoing> out, std::span<const Incoming> in) = 0;

    /// Goes on for at most some 10 ms; true once all pieces have been sent and have come. Throws peer_lost.
    virtual bool progress() = 0;

    /// The ranks that pieces are still to come from or to go to.
    virtual std::vector<int> missing() const = 0;

    /// Calls it without a lock that this mover's own calls take, should the thread hold it.
    virtual void call_unlocked(const std::function<void()>& call) { call(); }

    /// Frees what it holds, in the middle of a transfer, too; from the thread that uses it.
    virtual void close() = 0;
};

}  // namespace alltoallv
