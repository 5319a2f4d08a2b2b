// ACL functions about events.
#include "runtime/event.h"

#include <atomic>

#include "acl/arguments.h"
#include "runtime/device.h"
#include "runtime/handles.h"
#include "runtime/stream.h"

using namespace alltoallv::emulator;

namespace {

Handles<Event>& events =
    *new Handles<Event>("event", 0xE7E0, acl_error_rt_param_invalid);  // never destroyed: threads use it to the end

void create_event(aclrtEvent* event) {
    check_pointer("event", event);
    (void)current_device();
    *event = events.add(std::make_shared<Event>());
}

/// Returns the latest recording; throws if there is none.
std::shared_ptr<Record> recorded(aclrtEvent event) {
    std::shared_ptr<Record> record = events.get(event)->latest();
    if (!record) throw Failure(acl_error_rt_param_invalid, "event has not been recorded");
    return record;
}

bool complete(aclrtEvent event) {
    const std::shared_ptr<Record> record = events.get(event)->latest();
    return record && record->done();
}

void synchronize(aclrtEvent event, double seconds) {
    const std::shared_ptr<Record> record = recorded(event);
    if (!record->wait(seconds))
        throw Failure(acl_error_rt_event_sync_timeout, "event is not complete after ", seconds, " s");
    if (record->failure() != 0) throw Failure(record->failure(), "a task before the event has failed, see above");
}

Record::Time time_of(aclrtEvent event, const char* name) {
    const std::shared_ptr<Record> record = recorded(event);
    if (!record->done()) throw Failure(acl_error_rt_event_timestamp_invalid, name, " is not complete yet");
    return record->time();
}

std::atomic<uint32_t> wait_limit{0};  // default seconds that a stream waits for an event; 0: no limit

/// Makes the stream wait; an event that was never recorded delays nobody.
void stream_wait(aclrtStream stream, aclrtEvent event, double seconds) {
    const StreamPtr waiting = stream_of(stream);
    if (auto record = events.get(event)->latest()) waiting->wait(std::move(record), seconds);
}

}  // namespace

aclError aclrtCreateEvent(aclrtEvent* event) {
    ACL_FUNCTION(create_event(event););
}

aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t) {
    ACL_FUNCTION(create_event(event););
}

aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t) {
    ACL_FUNCTION(create_event(event););
}

aclError aclrtDestroyEvent(aclrtEvent event) {
    ACL_FUNCTION(events.remove(event););
}

aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
    ACL_FUNCTION(const auto found = events.get(event); const StreamPtr recording = stream_of(stream);
                 recording->record(found->renew(recording)););
}

/// Does nothing: a wait is for the latest recording, and the next recording is a new one.
aclError aclrtResetEvent(aclrtEvent event, aclrtStream stream) {
    ACL_FUNCTION((void)events.get(event); (void)stream_of(stream););
}

aclError aclrtQueryEvent(aclrtEvent event, aclrtEventStatus* status) {
    ACL_FUNCTION(give("status", status, complete(event) ? ACL_EVENT_STATUS_COMPLETE : ACL_EVENT_STATUS_NOT_READY););
}

aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus* status) {
    ACL_FUNCTION(give("status", status,
                      complete(event) ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY););
}

aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus* status) {
    ACL_FUNCTION(
        give("status", status, complete(event) ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY););
}

aclError aclrtSynchronizeEvent(aclrtEvent event) {
    ACL_FUNCTION(synchronize(event, -1););
}

aclError aclrtSynchronizeEventWithTimeout(aclrtEvent event, int32_t timeout) {
    ACL_FUNCTION(synchronize(event, timeout < 0 ? -1 : timeout / 1e3););
}

aclError aclrtEventElapsedTime(float* ms, aclrtEvent startEvent, aclrtEvent endEvent) {
    ACL_FUNCTION({
        const Record::Time start = time_of(startEvent, "startEvent"), end = time_of(endEvent, "endEvent");
        give("ms", ms, std::chrono::duration<double, std::milli>(end - start).count());
    });
}

/// Returns microseconds of a monotonic clock.
aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t* timestamp) {
    ACL_FUNCTION({
        const auto time = time_of(event, "event").time_since_epoch();
        give("timestamp", timestamp, std::chrono::duration_cast<std::chrono::microseconds>(time).count());
    });
}

aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
    ACL_FUNCTION(const uint32_t limit = wait_limit; stream_wait(stream, event, limit == 0 ? -1 : limit););
}

/// `timeout` is in milliseconds; -1 means none.
aclError aclrtStreamWaitEventWithTimeout(aclrtStream stream, aclrtEvent event, int32_t timeout) {
    ACL_FUNCTION(if (timeout < -1) throw Failure(acl_error_rt_param_invalid, "timeout is ", timeout);
                 stream_wait(stream, event, timeout < 0 ? -1 : timeout / 1e3););
}

/// Sets the limit of later waits, in seconds; 0 means none.
aclError aclrtSetOpWaitTimeout(uint32_t timeout) {
    ACL_FUNCTION(wait_limit = timeout;);
}
