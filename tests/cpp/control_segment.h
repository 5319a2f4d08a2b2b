// Where the control segment of a communicator lies, for tests that write into it as a broken peer would.
#pragma once

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <map>
#include <string>

namespace testing {

/// Where control segments lie in this process, by inode; huge pages are mappings of their own. What is quarantined
/// keeps older ones.
inline std::map<uint64_t, char*> control_segments() {
    std::ifstream maps("/proc/self/maps");
    std::map<uint64_t, char*> segments;
    for (std::string line; std::getline(maps, line);) {
        unsigned long long begin = 0, inode = 0;
        if (line.find("memfd:alltoallv-control") != std::string::npos &&
            std::sscanf(line.c_str(), "%llx-%*x %*s %*x %*s %llu", &begin, &inode) == 2)
            segments.emplace(inode, reinterpret_cast<char*>(begin));
    }
    return segments;
}

}  // namespace testing
