// ACL functions about streams, and host functions that run on them.
#include "runtime/stream.h"

#include <map>
#include <set>
#include <utility>

#include "acl/arguments.h"
#include "runtime/base/abandon.h"
#include "runtime/device.h"

using namespace alltoallv::emulator;

namespace {

/// Waits for the stream; throws the failure of a task, or the timeout.
void synchronize(Stream& stream, double seconds) {
    if (!stream.synchronize(seconds))
        throw Failure(acl_error_rt_stream_sync_timeout, "stream ", stream.id(), " is not done after ", seconds, " s");
    if (const int code = stream.take_failure(); code != 0)
        throw Failure(code, "a task of stream ", stream.id(), " has failed, see above");
}

void create_stream(aclrtStream* stream) {
    check_pointer("stream", stream);
    *stream = add_stream(current_device());
}

/// Callbacks of subscribed streams run on the thread that the subscription names, inside aclrtProcessReport.
struct Reports {
    std::mutex mutex;
    std::condition_variable arrived;
    std::map<uint64_t, std::deque<std::function<void()>>> queues;  // by thread
};

Reports& reports = *new Reports;  // never destroyed: threads use it to the end

}  // namespace

aclError aclrtCreateStream(aclrtStream* stream) {
    ACL_FUNCTION(create_stream(stream););
}

/// Ignores priority and flag, which change when and how fast tasks run on a device, not their results.
aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) {
    ACL_FUNCTION(create_stream(stream););
}

aclError aclrtDestroyStream(aclrtStream stream) {
    ACL_FUNCTION(check_pointer("stream", stream); remove_stream(stream)->synchronize(-1););
}

/// Does not wait: tasks that have not begun will not run, and the running one ends by itself.
aclError aclrtDestroyStreamForce(aclrtStream stream) {
    ACL_FUNCTION({
        check_pointer("stream", stream);
        const StreamPtr kept = remove_stream(stream);
        kept->discard(acl_error_rt_suspect_remote_error);
        alltoallv::abandon(kept);  // its destructor would wait for its thread
    });
}

aclError aclrtSynchronizeStream(aclrtStream stream) {
    ACL_FUNCTION(synchronize(*stream_of(stream), -1););
}

/// `timeout` is in milliseconds; -1 means none.
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout) {
    ACL_FUNCTION(if (timeout < -1) throw Failure(acl_error_rt_param_invalid, "timeout is ", timeout);
                 synchronize(*stream_of(stream), timeout < 0 ? -1 : timeout / 1e3););
}

aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus* status) {
    ACL_FUNCTION(
        give("status", status, stream_of(stream)->idle() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY););
}

aclError aclrtStreamGetId(aclrtStream stream, int32_t* streamId) {
    ACL_FUNCTION(give("streamId", streamId, stream_of(stream)->id()););
}

aclError aclrtSetStreamFailureMode(aclrtStream stream, uint64_t mode) {
    ACL_FUNCTION({
        check_pointer("stream", stream);  // the mode of the default stream cannot be set
        if (mode > acl_stop_on_failure)
            throw Failure(acl_error_rt_param_invalid, "mode is ", mode, ", expected 0 (continue) or 1 (stop)");
        stream_of(stream)->stop_on_failure(mode == acl_stop_on_failure);
    });
}

aclError aclrtSetStreamOverflowSwitch(aclrtStream stream, uint32_t flag) {
    ACL_FUNCTION({
        if (flag > 1) throw Failure(acl_error_rt_param_invalid, "flag is ", flag, ", expected 0 or 1");
        stream_of(stream)->overflow_switch = flag;
    });
}

aclError aclrtGetStreamOverflowSwitch(aclrtStream stream, uint32_t* flag) {
    ACL_FUNCTION(give("flag", flag, stream_of(stream)->overflow_switch.load()););
}

/// Reports that no stream is captured; starting a capture fails.
aclError aclmdlRICaptureGetInfo(aclrtStream stream, aclmdlRICaptureStatus* status, aclmdlRI* modelRI) {
    ACL_FUNCTION((void)stream_of(stream); give("status", status, ACL_MODEL_RI_CAPTURE_STATUS_NONE);
                 if (modelRI != nullptr)* modelRI = nullptr;);
}

/// Exchanges which calls a capture forbids to this thread. None are forbidden here, in any mode.
aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode* mode) {
    thread_local aclmdlRICaptureMode current = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
    ACL_FUNCTION({
        check_pointer("mode", mode);
        if (*mode < ACL_MODEL_RI_CAPTURE_MODE_GLOBAL || *mode > ACL_MODEL_RI_CAPTURE_MODE_RELAXED)
            throw Failure(acl_error_rt_param_invalid, "mode is ", static_cast<int>(*mode),
                          ", expected 0 (global), 1 (thread local) or 2 (relaxed)");
        std::swap(current, *mode);
    });
}

aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc fn, void* args) {
    ACL_FUNCTION({
        check_pointer("fn", reinterpret_cast<void*>(fn));
        stream_of(stream)->enqueue([=] {
            fn(args);
            return 0;
        });
    });
}

aclError aclrtSubscribeReport(uint64_t threadId, aclrtStream stream) {
    ACL_FUNCTION(stream_of(stream)->subscriber = threadId;);
}

aclError aclrtUnSubscribeReport(uint64_t, aclrtStream stream) {
    ACL_FUNCTION(stream_of(stream)->subscriber = 0;);
}

aclError aclrtLaunchCallback(aclrtCallback fn, void* userData, aclrtCallbackBlockType blockType, aclrtStream stream) {
    ACL_FUNCTION({
        check_pointer("fn", reinterpret_cast<void*>(fn));
        const StreamPtr found = stream_of(stream);
        const uint64_t thread = found->subscriber;
        if (thread == 0) throw Failure(100034, "no thread has subscribed to the stream: call aclrtSubscribeReport");
        found->enqueue([=] {
            const auto done = std::make_shared<Record>();
            {
                const std::lock_guard lock(reports.mutex);
                reports.queues[thread].push_back([=] {
                    fn(userData);
                    done->complete(0);
                });
            }
            reports.arrived.notify_all();
            if (blockType == ACL_CALLBACK_BLOCK) done->wait(-1);
            return 0;
        });
    });
}

/// Runs one callback of this thread; `timeout` is in milliseconds, -1 means none.
aclError aclrtProcessReport(int32_t timeout) {
    std::unique_lock lock(reports.mutex);
    auto& queue = reports.queues[pthread_self()];
    const auto ready = [&] { return !queue.empty(); };
    if (timeout < 0)
        reports.arrived.wait(lock, ready);
    else if (!reports.arrived.wait_for(lock, std::chrono::milliseconds(timeout), ready))
        return acl_error_rt_report_timeout;  // not a failure: the caller asks again
    const auto callback = std::move(queue.front());
    queue.pop_front();
    lock.unlock();
    callback();
    return 0;
}
