#include "transport/shm/peer_memory.h"

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
    if (segment.memory == nullptr) {
        segment.memory = std::make_shared<Mapping>(segment.fd.get(), segment.bytes);
        segment.memory->populate(segment.bytes);
        segment.fd.reset();
    }
    return segment.memory;
}

void PeerMemory::offer(uint32_t id, UniqueFd fd, size_t bytes) {
    const std::lock_guard lock(mutex_);
    Segment& segment = segments_[id];
    if (segment.memory != nullptr || segment.fd) return;
    segment.fd = std::move(fd);
    segment.bytes = bytes;
}

void PeerMemory::drop(uint32_t id) {
    const std::lock_guard lock(mutex_);
    if (segments_.erase(id) != 0) drops_.fetch_add(1, std::memory_order_release);
}

char* PeerSegments::base(uint32_t id) {
    for (const auto& [held, memory] : held_)
        if (held == id) return memory->data();
    std::shared_ptr<Mapping> memory = memory_->segment(id);
    if (memory == nullptr) return nullptr;
    return held_.emplace_back(id, std::move(memory)).second->data();
}

}  // namespace alltoallv
