#include "transport/tcp/tcp_meeting.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "base/error.h"
#include "base/place.h"
#include "base/seconds_text.h"
#include "base/sha256.h"
#include "transport/tcp/tcp_guests.h"

namespace alltoallv {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t magic = 0xa2a70002;  // also the version of these messages
constexpr auto pause = std::chrono::milliseconds(50);
constexpr double patience = 3.0;  // seconds for an address to answer, and for every message after that

/// A rank's announcement about itself. All ranks run the same build.
struct Hello {
    uint32_t magic = 0;
    int32_t rank = 0, size = 0;
    uint32_t pid = 0;
    char place[96] = {};  // distinguishes hosts, whatever their names
    char host[64] = {};
};

/// A rank's answer to rank 0's challenge, with a challenge of its own.
struct Introduction {
    Digest challenge{}, proof{};
    Hello hello;
};

/// Rank 0's answer, after its own proof: then a Hello of every rank, or the text of an error.
struct Answer {
    uint32_t magic = 0;
    uint32_t kind = 0;  // 0: welcome; else ErrorClass + 1
    uint32_t bytes = 0;
};

template <size_t N>
void set_text(char (&to)[N], const std::string& text) {
    std::memcpy(to, text.data(), std::min(text.size(), N - 1));
}

template <size_t N>
std::string text_of(const char (&from)[N]) {
    return {from, strnlen(from, N)};
}

Hello introduce(const TcpMeetingOptions& options) {
    Hello hello;
    hello.magic = magic;
    hello.rank = options.rank;
    hello.size = options.size;
    hello.pid = static_cast<uint32_t>(getpid());
    set_text(hello.place, this_place());
    (void)::gethostname(hello.host, sizeof hello.host - 1);
    return hello;
}

std::vector<TcpPeer> peers_of(const std::vector<Hello>& all, int rank) {
    const std::string place = text_of(all[static_cast<size_t>(rank)].place);
    std::vector<TcpPeer> peers;
    for (const Hello& hello : all) {
        const auto first = std::find_if(
            all.begin(), all.end(), [&](const Hello& other) { return text_of(other.place) == text_of(hello.place); });
        peers.push_back({hello.pid, place_number(text_of(hello.place)), text_of(hello.place) == place,
                         static_cast<int>(first - all.begin()), text_of(hello.host)});
    }
    return peers;
}

template <class T>
std::string bytes_of(const T& value) {
    return {reinterpret_cast<const char*>(&value), sizeof value};
}

/// Proves that the sender knows the key and has received the other side's challenge.
Digest prove(const std::string& key, const char* role, const Digest& challenge, const Digest& own, const Hello& hello) {
    return hmac_sha256(key, role + bytes_of(challenge) + bytes_of(own) + bytes_of(hello));
}

constexpr const char* secret_hint = "are job, domain and ALLTOALLV_JOB_SECRET equal on all ranks?";

/// Sends the reason of the failure to the ranks that have arrived.
[[noreturn]] void refuse(const TcpMembership& membership, const Error& error) {
    const std::string text = error.what();
    const Answer answer{magic, static_cast<uint32_t>(error.kind()) + 1, static_cast<uint32_t>(text.size())};
    for (const UniqueFd& socket : membership.sockets)
        if (socket && send_all(socket.get(), &answer, sizeof answer))
            (void)send_all(socket.get(), text.data(), text.size());
    throw error;
}

std::string unproven(int count) {
    if (count == 0) return "";
    return "; " + std::to_string(count) + " tries to join did not know the domain's secret: " + secret_hint;
}

std::string absent(const TcpMembership& membership) {
    std::string names;
    for (size_t j = 1; j < membership.sockets.size(); ++j)
        if (!membership.sockets[j]) names += (names.empty() ? "rank " : ", rank ") + std::to_string(j);
    return names;
}

}  // namespace

UniqueFd listen_when_free(int port, const TcpMeetingOptions& options) {
    const auto deadline = after(options.timeout);
    for (;;) {
        if (UniqueFd listener = listen_tcp(port)) return listener;
        if (Clock::now() >= deadline)
            throw comm_timeout("rank 0 could not listen on port " + std::to_string(port) + " within " +
                               seconds_text(options.timeout) + ": it is in use; ALLTOALLV_ROOT_PORT chooses another");
        if (options.poll) options.poll();
        std::this_thread::sleep_for(pause);
    }
}

TcpMembership receive_ranks(const UniqueFd& listener, const TcpMeetingOptions& options) {
    const auto deadline = after(options.timeout);
    std::vector<Hello> hellos(static_cast<size_t>(options.size));
    hellos[0] = introduce(options);
    TcpMembership membership;
    membership.sockets.resize(hellos.size());
    TcpGuests guests(listener.get(), sizeof(Introduction), true);
    int refused = 0;
    for (int waiting = options.size - 1; waiting > 0;) {
        if (options.poll) options.poll();
        if (Clock::now() >= deadline)
            refuse(membership, comm_timeout("rank 0 waited " + seconds_text(options.timeout) + " for " +
                                            absent(membership) + " to join domain '" + options.domain + "' at port " +
                                            std::to_string(port_of(listener.get())) + unproven(refused)));
        for (TcpGuest& guest : guests.next(static_cast<int>(pause.count()))) {
            Introduction given;
            std::memcpy(&given, guest.heard.data(), sizeof given);
            const Hello& hello = given.hello;
            if (hello.magic != magic ||
                !equal(given.proof, prove(options.key, "join", guest.challenge, given.challenge, hello))) {
                ++refused;
                continue;  // it belongs to another domain and will try again
            }
            const Digest proof = prove(options.key, "root", given.challenge, guest.challenge, hello);
            if (!send_all(guest.socket.get(), &proof, sizeof proof)) continue;
            if (hello.size != options.size || hello.rank < 1 || hello.rank >= options.size) {
                membership.sockets.push_back(std::move(guest.socket));
                refuse(membership, invalid_param("rank " + std::to_string(hello.rank) + " of " +
                                                 std::to_string(hello.size) + " came to domain '" + options.domain +
                                                 "', which has " + std::to_string(options.size) + " ranks"));
            }
            UniqueFd& place = membership.sockets[static_cast<size_t>(hello.rank)];
            if (!place) --waiting;  // else it has tried again
            place = std::move(guest.socket);
            hellos[static_cast<size_t>(hello.rank)] = hello;
        }
    }
    const Answer welcome{magic, 0, static_cast<uint32_t>(hellos.size() * sizeof(Hello))};
    for (const UniqueFd& socket : membership.sockets)
        if (socket && send_all(socket.get(), &welcome, sizeof welcome))
            (void)send_all(socket.get(), hellos.data(), welcome.bytes);
    membership.peers = peers_of(hellos, 0);
    return membership;
}

TcpMembership join_rank_0(const std::vector<TcpAddress>& addresses, const TcpMeetingOptions& options) {
    const auto deadline = after(options.timeout);
    const auto soon = [deadline] { return std::min(deadline, after(patience)); };
    Introduction mine;
    mine.hello = introduce(options);
    bool refused = false;
    for (;;) {
        for (const TcpAddress& address : addresses) {
            TcpMembership membership;
            membership.sockets.push_back(
                connect_tcp(address, std::chrono::duration<double>(soon() - Clock::now()).count()));
            const int socket = membership.sockets[0].get();
            Digest challenge, proof;
            if (socket < 0 || !receive_all(socket, &challenge, sizeof challenge, soon())) continue;
            mine.challenge = random_digest();
            mine.proof = prove(options.key, "join", challenge, mine.challenge, mine.hello);
            if (!send_all(socket, &mine, sizeof mine)) continue;
            // A process that is not rank 0 of this domain closes the connection, or cannot prove it.
            refused = true;
            if (!receive_all(socket, &proof, sizeof proof, soon()) ||
                !equal(proof, prove(options.key, "root", mine.challenge, challenge, mine.hello)))
                continue;
            refused = false;
            Answer answer;
            bool heard = false;
            for (pollfd ready{socket, POLLIN, 0}; Clock::now() < deadline + std::chrono::seconds(2);) {
                if (options.poll) options.poll();
                if (::poll(&ready, 1, static_cast<int>(pause.count())) <= 0) continue;
                heard = receive_all(socket, &answer, sizeof answer, after(patience));
                break;
            }
            if (!heard || answer.magic != magic) continue;
            if (answer.kind != 0) {
                std::string text(std::min<size_t>(answer.bytes, 4096), '\0');
                if (!receive_all(socket, text.data(), text.size(), after(patience))) continue;
                throw Error(static_cast<ErrorClass>(answer.kind - 1),
                            answer.kind - 1 == static_cast<uint32_t>(ErrorClass::invalid_param)
                                ? ErrorType::INVALID_PARAM
                                : ErrorType::HCCL_FAIL,
                            text);
            }
            std::vector<Hello> all(static_cast<size_t>(options.size));
            if (answer.bytes != all.size() * sizeof(Hello) ||
                !receive_all(socket, all.data(), answer.bytes, after(patience)))
                continue;
            membership.peers = peers_of(all, options.rank);
            return membership;
        }
        if (Clock::now() >= deadline) {
            std::string tried;
            for (const TcpAddress& address : addresses)
                tried += (tried.empty() ? "" : ", ") + address.host + ":" + std::to_string(address.port);
            throw comm_timeout(
                "rank " + std::to_string(options.rank) + " waited " + seconds_text(options.timeout) +
                " for rank 0 of domain '" + options.domain + "' at " + tried +
                (refused ? std::string(", where somebody does not know the domain's secret: ") + secret_hint : ""));
        }
        if (options.poll) options.poll();
        std::this_thread::sleep_for(pause);
    }
}

}  // namespace alltoallv
