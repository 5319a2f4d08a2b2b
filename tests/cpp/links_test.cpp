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
#include "runtime/shm/arena.h"

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

/// A segment is there once its owner has given it: without a request, and without the thread that watches.
TEST(what_is_given_needs_no_request) {
    auto [ours, theirs] = socket_pair();
    const auto linked_to = [](UniqueFd socket, uint64_t process) {
        std::vector<Peer> peers(2);
        peers[1].socket = std::move(socket);
        std::shared_ptr<Links> links = Links::make(std::move(peers), {});
        links->set_memory(1, PeerMemory::of(process));
        return links;
    };
    const std::shared_ptr<PeerMemory> given = PeerMemory::of(1), unused = PeerMemory::of(2);
    const std::shared_ptr<Links> owner = linked_to(std::move(ours), 2), user = linked_to(std::move(theirs), 1);
    Arena& arena = Arena::instance();
    arena.add_budget(size_t{64} << 20);
    const uint32_t segment = arena.first_segment();
    CHECK(segment != 0);
    *arena.address(segment, 4096, 1) = 42;
    for (int i = 0; i < 2; ++i) owner->give_segment(1, segment);
    CHECK(given->segment(segment) == nullptr);
    user->take(1);
    CHECK_EQ(*given->segment(segment)->at(4096, 1), 42);
    given->drop(segment);
    user->take(1);
    CHECK(given->segment(segment) == nullptr);  // the same process has been sent it once
    CHECK_EQ(user->requests(), uint64_t{0});
    for (const auto& links : {owner, user}) links->stop();
    arena.remove_budget(size_t{64} << 20);
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
