#include "runtime/bootstrap/registry.h"

#include <map>
#include <mutex>
#include <tuple>
#include <vector>

#include "runtime/base/process_state.h"

namespace alltoallv {
namespace {

struct Shared {
    std::mutex making;                         // two threads that request one domain must not both bootstrap it
    std::weak_ptr<Communicator> communicator;  // guarded by the registry's mutex
};

using Key = std::tuple<std::string, std::string, int>;  // job, domain, rank of a thread (otherwise -1)

struct Registry {
    std::mutex mutex;
    std::map<Key, std::shared_ptr<Shared>> entries;
    std::vector<std::weak_ptr<Communicator>> others;                        // which are not found by name
    std::map<std::pair<std::string, int>, std::vector<int64_t>> processes;  // by job and size: the last ones
};

Registry& registry() {
    return ProcessState<Registry>::get();
}

}  // namespace

CommunicatorPtr find_or_make_communicator(const CommunicatorOptions& options, const CommunicatorFactory& make) {
    Registry& all = registry();
    std::shared_ptr<Shared> entry;
    {
        const std::lock_guard lock(all.mutex);
        std::erase_if(all.entries, [](const auto& item) {
            return item.second.use_count() == 1 && item.second->communicator.expired();
        });
        auto& slot = all.entries[Key(options.job, options.domain, options.threads ? options.rank : -1)];
        if (!slot) slot = std::make_shared<Shared>();
        entry = slot;
    }
    const std::lock_guard making(entry->making);
    std::vector<CommunicatorPtr> present;  // in this domain: one, or one for each rank that is a thread
    {
        const std::lock_guard lock(all.mutex);
        for (const auto& [key, other] : all.entries)
            if (std::get<0>(key) == options.job && std::get<1>(key) == options.domain)
                if (CommunicatorPtr communicator = other->communicator.lock())
                    present.push_back(std::move(communicator));
    }
    for (const CommunicatorPtr& existing : present) {
        if (!existing->usable()) continue;
        if (existing->size() != options.size || (!options.threads && existing->rank() != options.rank))
            throw invalid_param(1098, "domain '", options.domain, "' is in use by rank ", existing->rank(), " of ",
                                existing->size(), " in this process, asked for rank ", options.rank, " of ",
                                options.size);
        if (existing->rank() == options.rank) return existing;
    }
    CommunicatorOptions completed = options;
    if (completed.processes.empty() && !options.threads) {
        completed.processes = processes_of(options.job, options.size);
        completed.replaceable = true;
    }
    CommunicatorPtr fresh = make(completed);
    const std::vector<int64_t> processes = fresh->processes();
    const std::lock_guard lock(all.mutex);
    entry->communicator = fresh;
    if (!options.threads) all.processes[{options.job, options.size}] = processes;
    return fresh;
}

std::vector<int64_t> processes_of(const std::string& job, int size) {
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    const auto entry = all.processes.find({job, size});
    return entry == all.processes.end() ? std::vector<int64_t>{} : entry->second;
}

CommunicatorPtr destroyed_with_all(CommunicatorPtr communicator) {
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    std::erase_if(all.others, [](const auto& other) { return other.expired(); });
    all.others.push_back(communicator);
    return communicator;
}

void destroy_all_communicators() {
    process_ends.store(true);
    std::vector<CommunicatorPtr> alive;
    {
        Registry& all = registry();
        const std::lock_guard lock(all.mutex);
        for (const auto& [key, entry] : all.entries)
            if (CommunicatorPtr communicator = entry->communicator.lock()) alive.push_back(std::move(communicator));
        for (const auto& other : all.others)
            if (CommunicatorPtr communicator = other.lock()) alive.push_back(std::move(communicator));
    }
    for (const CommunicatorPtr& communicator : alive) {
        if (communicator->busy()) communicator->abort("the process exits while calls are pending");
        communicator->destroy();
    }
}

}  // namespace alltoallv
