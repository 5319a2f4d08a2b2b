#include "runtime/shm/peer_memory.h"

#include <fcntl.h>
#include <sys/stat.h>

#include "runtime/base/spare_descriptors.h"

namespace alltoallv {
namespace {

std::mutex table_mutex;
std::map<uint64_t, std::weak_ptr<PeerMemory>>& table() {
    static auto* instance = new std::map<uint64_t, std::weak_ptr<PeerMemory>>;
    return *instance;
}

}  // namespace

std::shared_ptr<PeerMemory> PeerMemory::of(uint64_t process) {
    const std::lock_guard lock(table_mutex);
    std::erase_if(table(), [](const auto& entry) { return entry.second.expired(); });
    auto& entry = table()[process];
    std::shared_ptr<PeerMemory> memory = entry.lock();
    if (!memory) entry = memory = std::make_shared<PeerMemory>();
    return memory;
}

std::shared_ptr<Mapping> PeerMemory::segment(uint32_t id) {
    const std::lock_guard lock(mutex_);
    const auto it = segments_.find(id);
    if (it == segments_.end()) return nullptr;
    Segment& segment = it->second;
    if (segment.refusal) {
        const Error refusal = *segment.refusal;
        segments_.erase(it);  // it may be requested again
        throw refusal;
    }
    return segment.memory;
}

bool PeerMemory::offer(uint32_t id, UniqueFd fd, bool awaited) {
    struct stat status{};
    const int seals = fcntl(fd.get(), F_GET_SEALS);  // -1 if it is not shared memory
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || fstat(fd.get(), &status) != 0 || status.st_size <= 0) return false;
    const std::lock_guard lock(mutex_);
    Segment& segment = segments_[id];
    try {
        if (segment.memory == nullptr) {
            segment.memory = std::make_shared<Mapping>(fd.get(), static_cast<size_t>(status.st_size));
        }
        segment.refusal.reset();
    } catch (const Error& error) {
        if (awaited)
            segment.refusal.emplace(error);
        else if (!segment.refusal)
            segments_.erase(id);
    }
    fd.reset();
    SpareDescriptors::instance().refill();
    return true;
}

void PeerMemory::refuse(uint32_t id, const Error& error) {
    const std::lock_guard lock(mutex_);
    Segment& segment = segments_[id];
    if (segment.memory == nullptr) segment.refusal.emplace(error);
}

void PeerMemory::drop(uint32_t id) {
    const std::lock_guard lock(mutex_);
    if (segments_.erase(id) != 0) drops_.fetch_add(1, std::memory_order_release);
}

bool PeerMemory::note_given(uint32_t id) {
    const std::lock_guard lock(mutex_);
    return given_.insert(id).second;
}

const Mapping* PeerSegments::find(uint32_t id) {
    for (const auto& [held, memory] : held_)
        if (held == id) return memory.get();
    std::shared_ptr<Mapping> memory = memory_->segment(id);
    if (memory == nullptr) return nullptr;
    return held_.emplace_back(id, std::move(memory)).second.get();
}

}  // namespace alltoallv
