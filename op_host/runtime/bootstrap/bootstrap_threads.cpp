// The bootstrap for ranks that are threads of one process.
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "runtime/base/process_state.h"
#include "runtime/bootstrap/bootstrap.h"
#include "runtime/bootstrap/bootstrap_protocol.h"

namespace alltoallv {

namespace {

/// The meeting place of one domain's ranks. It is removed from the table when it is complete or has failed, so that the
/// domain can be made again; the ranks that wait in it keep it alive.
struct Room {
    BootstrapOptions first;  ///< of the first rank that arrived
    std::vector<bool> joined;
    std::shared_ptr<Mapping> memory;  ///< once all have come
    std::optional<Error> failure;
    std::condition_variable changed;

    std::vector<int> absent() const {
        std::vector<int> ranks;
        for (size_t rank = 0; rank < joined.size(); ++rank)
            if (!joined[rank]) ranks.push_back(static_cast<int>(rank));
        return ranks;
    }
};

using RoomKey = std::pair<std::string, std::string>;  // job, domain

struct Lobby {
    std::mutex mutex;
    std::map<RoomKey, std::shared_ptr<Room>> rooms;
};

/// Copies an error with its own text; copies of an exception share the text, here between threads.
Error apart(const Error& error) {
    return {error.kind(), error.code(), std::string(error.what())};
}

/// Fails all ranks in the room. The caller holds the lobby's mutex.
void close_room(Lobby& in, const RoomKey& key, Room& room, const Error& error) {
    room.failure = apart(error);
    in.rooms.erase(key);
    room.changed.notify_all();
}

/// Enters the room of the options' domain and opens it if necessary; the last rank completes it.
std::shared_ptr<Room> enter(Lobby& in, const RoomKey& key, const BootstrapOptions& options) {
    std::shared_ptr<Room>& entry = in.rooms[key];
    if (!entry) {
        entry = std::make_shared<Room>();
        entry->first = options;
        entry->joined.resize(static_cast<size_t>(options.size));
    }
    const std::shared_ptr<Room> room = entry;
    try {
        check_joining(options, room->first);
        const auto rank = static_cast<size_t>(options.rank);
        if (room->joined[rank]) throw joined_twice(options, getpid(), getpid());
        room->joined[rank] = true;
        if (room->absent().empty()) {
            room->memory =
                std::make_shared<Mapping>(make_control_segment(options.control_bytes).get(), options.control_bytes);
            in.rooms.erase(key);
            room->changed.notify_all();
        }
    } catch (const Error& error) {
        close_room(in, key, *room, error);
        throw;
    }
    return room;
}

}  // namespace

Membership bootstrap_threads(const BootstrapOptions& options) {
    check_options(options);
    Lobby& in = ProcessState<Lobby>::get();
    const RoomKey key{options.job, options.domain};
    Patience patience(options);

    std::unique_lock lock(in.mutex);
    const std::shared_ptr<Room> room = enter(in, key, options);
    while (!room->memory && !room->failure) {
        const std::vector<int> absent = room->absent();
        const auto late = [&](double seconds) { return absent_error(options, seconds, absent, "had not joined"); };
        if (patience.expired()) {
            close_room(in, key, *room, late(options.timeout));
            break;
        }
        room->changed.wait_for(lock, std::chrono::milliseconds(patience.slice_ms()));
        lock.unlock();  // `poll` may wait for locks of its caller
        try {
            patience.tick();
            patience.warn(late);
        } catch (...) {
            lock.lock();
            if (!room->memory && !room->failure) close_room(in, key, *room, gave_up_error(options));
            throw;
        }
        lock.lock();
    }
    if (room->failure) throw apart(*room->failure);

    Membership membership;
    membership.memory = room->memory;
    membership.peers.resize(static_cast<size_t>(options.size));
    for (Peer& peer : membership.peers) peer.pid = getpid();
    return membership;
}

}  // namespace alltoallv
