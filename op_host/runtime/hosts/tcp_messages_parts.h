/// \file tcp_messages_parts.h
/// \brief The state that `TcpMessages` keeps of messages and connections that are under way.
#pragma once

#include <string>
#include <utility>

#include "runtime/control/message_post.h"
#include "runtime/hosts/tcp_messages.h"

namespace alltoallv {

/// `wait`: the receiver has the offer, and has made no call that takes it. `leave`: nothing follows, and this rank is
/// not lost; over other connections that may be known later.
enum class Say : uint32_t { offer, take, refuse, data, done, wait, leave };

class TcpMessages::Pending final : public MessageWork {
  public:
    explicit Pending(std::shared_ptr<TcpMessages> owner) : owner_(std::move(owner)) {}

    bool await(double seconds) override;

  private:
    std::shared_ptr<TcpMessages> owner_;
};

/// The head of every message between two ranks; `bytes` follow. The number is that of the sender's message.
struct TcpMessages::Frame {
    Say type = Say::offer;
    int32_t tag = 0;
    uint64_t number = 0, bytes = 0;
    int64_t count = 0;  // of the message; in a refusal: what the receiver expected
    DType dtype = DType::uint8;
    uint8_t reserved[7] = {};
};

struct TcpMessages::Post : MessagePost {
    std::shared_ptr<Pending> work;
    uint64_t number = 0;       // once offered or matched
    size_t offered = 0;        // bytes of a send that have gone with its offer
    bool met = false;          // a receive that has an offer
    bool waits = false;        // a send that the receiver has told to wait
    MessageWorkPtr carried{};  // its data, on their way through shared memory

    /// True for messages of ranks that meet again over a poisoned communicator.
    bool survives() const { return asked.tag < -(1 << 30) - 1 && asked.tag != PeerMessage::any_tag; }
    SentAs as() const { return {asked.count, asked.dtype}; }
};

struct TcpMessages::Offer {
    Frame frame;
    std::string data;  // data that came with the offer
    Clock::time_point came = Clock::now();
    bool notified = false;  // that it has to wait
};

struct TcpMessages::Connection {
    UniqueFd socket;
    uint64_t sent = 0;   // number of messages
    size_t offered = 0;  // bytes that have gone with offers, of messages under way
    std::deque<Offer> offers;
    bool leaves = false;  // the peer has said so

    /// Bytes to send: heads and small data are copied, large data stay in place.
    struct Words {
        std::string own;
        const char* data;
        size_t bytes;
    };
    std::deque<Words> words;

    Frame head;
    size_t head_heard = 0, body_heard = 0;
    std::string body;
    char* into = nullptr;  // destination of a body that is a message's data
};

}  // namespace alltoallv
