#include "runtime/base/place.h"

#include <unistd.h>

#include <cerrno>
#include <fstream>

#include "runtime/base/resources.h"
#include "runtime/base/sha256.h"

namespace alltoallv {

std::string this_place() {
    static const std::string boot = [] {
        std::string id;
        std::ifstream file("/proc/sys/kernel/random/boot_id");
        if (!file.is_open() && has_run_out(errno)) throw system_error("cannot tell this host from others", errno);
        file >> id;
        return id;
    }();
    std::string place = boot;
    bool complete = !boot.empty();
    for (const char* name : {"/proc/self/ns/net", "/proc/self/ns/pid"}) {
        char text[24] = {};
        complete = ::readlink(name, text, sizeof text - 1) > 0 && complete;
        place += text;
    }
    // Without /proc nothing tells hosts apart: each process counts as a host of its own.
    static const std::string nowhere = hex(random_digest()).substr(0, 32);
    return complete ? place : place + nowhere;
}

uint32_t place_number(const std::string& place) {
    uint32_t hash = 0x811c9dc5;
    for (const char c : place) hash = (hash ^ static_cast<uint8_t>(c)) * 0x01000193;
    return hash;
}

}  // namespace alltoallv
