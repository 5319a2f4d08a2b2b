#include "runtime/hccl/launches.h"

#include <utility>

#include "runtime/base/abandon.h"
#include "runtime/hccl/library.h"
#include "runtime/hccl/result.h"
#include "runtime/hccl/synchronization.h"

namespace alltoallv {

void Launches::follow_last(const OnStream& on) {
    if (launched_.empty() || launched_.back().stream == on.stream || !synchronizes("launch-order")) return;
    check_acl(cann().aclrtStreamWaitEvent(on.stream, launched_.back().event), "aclrtStreamWaitEvent", on.where);
}

void Launches::add(std::unique_ptr<WireLayout> layout, const OnStream& on) {
    aclrtEvent event = nullptr;
    if (free_.empty()) {
        check_acl(cann().aclrtCreateEvent(&event), "aclrtCreateEvent", on.where);
    } else {
        event = free_.back();
        free_.pop_back();
    }
    if (!synchronizes("kept-counts")) layout.reset();
    launched_.push_back({event, on.stream, std::move(layout)});
    check_acl(cann().aclrtRecordEvent(event, on.stream), "aclrtRecordEvent", on.where);
}

bool Launches::forget_completed(const std::string& where) {
    while (!launched_.empty()) {
        aclrtEventRecordedStatus status = ACL_EVENT_RECORDED_STATUS_NOT_READY;
        check_acl(cann().aclrtQueryEventStatus(launched_.front().event, &status), "aclrtQueryEventStatus", where);
        if (status != ACL_EVENT_RECORDED_STATUS_COMPLETE) return false;
        free_.push_back(launched_.front().event);
        launched_.pop_front();
    }
    return true;
}

void Launches::release() {
    for (aclrtEvent event : free_) cann().aclrtDestroyEvent(event);
    free_.clear();
    if (!launched_.empty()) abandon(std::make_unique<std::deque<Launch>>(std::exchange(launched_, {})));
}

}  // namespace alltoallv
