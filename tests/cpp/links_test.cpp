// Between processes of one host: messages while a socket is full, requests for segments; bells that nobody rings.
#include "runtime/shm/links.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include "check.h"
#include "runtime/bootstrap/unix_socket.h"
#include "runtime/control/doorbell.h"

using namespace alltoallv;

namespace {

/// Reads what has come, until a message of this kind.
std::vector<WireMessage> read_until(int socket, WireMessage::Kind last) {
    std::vector<WireMessage> found;
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (std::chrono::steady_clock::now() < end) {
        Message message;
        if (try_receive(socket, message) != IoStatus::done) {
            ::usleep(1000);
            continue;
        }
        CHECK_EQ(message.data.size(), sizeof(WireMessage));
        std::memcpy(&found.emplace_back(), message.data.data(), sizeof(WireMessage));
        if (found.back().kind == last) return found;
    }
    throw std::runtime_error("the message has not come; others: " + std::to_string(found.size()));
}

}  // namespace

/// What the socket does not take comes later, in order; what is awaited is not requested again.
TEST(nothing_is_lost_while_a_socket_is_full) {
    auto [ours, theirs] = socket_pair();
    std::vector<Peer> peers(2);
    peers[1].pid = ::getpid();
    peers[1].socket = std::move(ours);
    const std::shared_ptr<Links> links = Links::make(std::move(peers), {});
    links->watch();
    std::vector<uint32_t> segments(5'000);
    std::iota(segments.begin(), segments.end(), 1);
    Links::announce_released(segments);
    for (int i = 0; i < 3; ++i) links->request_segment(1, 7);
    links->announce_poison();

    const std::vector<WireMessage> found = read_until(theirs.get(), WireMessage::poisoned);
    CHECK_EQ(found.size(), segments.size() + 2);
    for (size_t i = 0; i < segments.size(); ++i) CHECK((found[i] == WireMessage{WireMessage::released, segments[i]}));
    CHECK((found[segments.size()] == WireMessage{WireMessage::want_segment, 7}));
    links->stop();
}

TEST(sleeps_that_nobody_ends_are_counted) {
    Bell bell{};
    for (const bool rings : {true, false}) {
        std::atomic<bool> done{false};
        const uint64_t before = Doorbell::unrung();
        std::thread other([&, sleeper = ::gettid()] {
            testing::eventually([&] { return bell.sleepers.load() > 0 && testing::state_of(sleeper) == 'S'; });
            done.store(true);
            if (rings) Doorbell(bell).ring();
        });
        while (!done.load()) Doorbell(bell).sleep([&] { return done.load(); }, rings ? 20'000 : 200);
        other.join();
        CHECK_EQ(Doorbell::unrung() - before, uint64_t{!rings});
    }
}
