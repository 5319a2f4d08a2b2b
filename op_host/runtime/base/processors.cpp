#include "runtime/base/processors.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <string>

namespace alltoallv {
namespace {

constexpr size_t usual = size_t{32} << 20;

/// Parses a size that the kernel writes as "1024K" or "32M"; returns bytes, or 0 for other text.
size_t parse_size(const std::string& text) {
    size_t value = 0, at = 0;
    for (; at < text.size() && text[at] >= '0' && text[at] <= '9'; ++at)
        value = value * 10 + static_cast<size_t>(text[at] - '0');
    if (at < text.size() && text[at] == 'K') return value << 10;
    if (at < text.size() && text[at] == 'M') return value << 20;
    return value;
}

std::string first_line(const std::string& path) {
    std::string line;
    std::ifstream file(path);
    std::getline(file, line);
    return line;
}

}  // namespace

int quota_cpus(const std::string& cgroup) {
    int cpus = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
    std::ifstream version_2(cgroup + "/cpu.max"), quota_file(cgroup + "/cpu/cpu.cfs_quota_us"),
        period_file(cgroup + "/cpu/cpu.cfs_period_us");
    std::string quota;
    double period = 0;
    const bool limited =
        version_2 >> quota >> period ? quota != "max" : quota_file >> quota && period_file >> period && quota != "-1";
    if (limited && period > 0) {
        const double share = std::strtod(quota.c_str(), nullptr) / period;
        if (share > 0) cpus = std::min(cpus, static_cast<int>(std::ceil(share)));
    }
    return std::max(cpus, 1);
}

int usable_cpus() {
    cpu_set_t mask;
    if (sched_getaffinity(0, sizeof mask, &mask) != 0) return quota_cpus();
    return std::max(1, std::min(quota_cpus(), CPU_COUNT(&mask)));
}

CpuSet affinity() {
    CpuSet result{};
    cpu_set_t mask;
    static_assert(sizeof mask == sizeof result);
    if (sched_getaffinity(0, sizeof mask, &mask) == 0) std::memcpy(result.data(), &mask, sizeof mask);
    return result;
}

namespace {

// Linux, Documentation/ABI/testing/sysfs-devices-system-cpu: cache/index*/{level,size,shared_cpu_list}.
size_t read_caches(const CpuSet& cpus) {
    size_t bytes = 0;
    std::set<std::string> seen;
    for (size_t cpu = 0; cpu < cpus.size() * 64; ++cpu) {
        if ((cpus[cpu / 64] >> (cpu % 64) & 1u) == 0) continue;
        const std::string caches = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/cache/index";
        for (int index = 4; index >= 0; --index) {
            const std::string cache = caches + std::to_string(index);
            const size_t size = parse_size(first_line(cache + "/size"));
            if (size == 0) continue;
            // Processors that share a cache name the same list.
            if (seen.insert(first_line(cache + "/shared_cpu_list")).second) bytes += size;
            break;
        }
    }
    return bytes > 0 ? bytes : usual;
}

}  // namespace

size_t last_level_cache_bytes(const CpuSet& cpus) {
    static std::mutex mutex;
    static std::map<CpuSet, size_t> by_cpus;  // reading the files takes as long as the rest of a small group's start
    const std::lock_guard lock(mutex);
    const auto [entry, is_new] = by_cpus.try_emplace(cpus);
    if (is_new) entry->second = read_caches(cpus);
    return entry->second;
}

}  // namespace alltoallv
