#include "runtime/stream.h"

#include <atomic>
#include <chrono>
#include <map>
#include <utility>
#include <vector>

#include "acl/acl_api.h"
#include "runtime/device.h"
#include "runtime/failure.h"
#include "runtime/handles.h"
#include "runtime/settings.h"

namespace alltoallv::emulator {
namespace {

struct Streams {
    Handles<Stream> handles{"stream", 0x57E0, acl_error_rt_param_invalid};
    std::mutex mutex;
    std::map<int, StreamPtr> defaults;  // by device
};

Streams& streams = *new Streams;  // never destroyed: threads still use them at exit

int next_id() {
    static std::atomic<int> next{0};
    return next++;
}

}  // namespace

Stream::Stream(int device) : device_(device), id_(next_id()), thread_([this] { run(); }) {}

Stream::~Stream() {
    {
        const std::lock_guard lock(mutex_);
        closing_ = true;
    }
    queued_.notify_all();
    if (thread_.get_id() == std::this_thread::get_id())
        thread_.detach();  // the last owner was a task
    else
        thread_.join();
}

void Stream::enqueue(Task task, bool delayed) {
    enqueue(Item{std::move(task), delayed ? settings().task_delay_us.load() : 0, nullptr});
}

void Stream::enqueue(Item item) {
    int stopped = 0;
    {
        const std::lock_guard lock(mutex_);
        stopped = stopped_;
        if (stopped != 0) {
            failure_ = stopped;
        } else {
            items_.push_back(std::move(item));
            ++enqueued_;
        }
    }
    if (stopped != 0) {
        if (item.record) item.record->complete(stopped);
        return;
    }
    queued_.notify_one();
}

void Stream::record(std::shared_ptr<Record> record) {
    {
        std::unique_lock lock(mutex_);
        if (finished_ == enqueued_ && stopped_ == 0) {  // the stream has reached it: its thread can sleep on
            const int failure = failure_;
            lock.unlock();
            record->complete(failure);
            return;
        }
    }
    const auto complete = [this, record] {
        int failure;
        {
            const std::lock_guard lock(mutex_);
            failure = failure_;
        }
        record->complete(failure);
        return 0;
    };
    enqueue(Item{complete, 0, record});
}

void Stream::discard(int failure) {
    std::deque<Item> items;
    {
        const std::lock_guard lock(mutex_);
        items.swap(items_);
        finished_ += items.size();
    }
    progressed_.notify_all();
    for (const Item& item : items)
        if (item.record) item.record->complete(failure);
}

void Stream::stop_on_failure(bool stops) {
    const std::lock_guard lock(mutex_);
    if (stops_) throw Failure(acl_error_rt_param_invalid, "the failure mode of a stream can be set once");
    stops_ = stops;
}

void Stream::wait(std::shared_ptr<Record> record, double seconds) {
    if (record->done() && record->failure() == 0) {
        const std::lock_guard lock(mutex_);
        if (stopped_ == 0) return;
    }
    const auto wait = [id = id_, device = device_, record = std::move(record), seconds] {
        if (const StreamPtr source = record->source.lock(); source && seconds < 0 && source->device_ == device)
            source->advance(*record);
        if (record->wait(seconds)) return record->failure();
        return report("aclrtStreamWaitEvent", acl_error_rt_task_timeout,
                      "stream " + std::to_string(id) + " has waited " + std::to_string(seconds) + " s for an event");
    };
    enqueue(wait, false);
}

bool Stream::synchronize(double seconds) {
    std::unique_lock lock(mutex_);
    const auto done = [this, target = enqueued_] { return finished_ >= target; };
    if (seconds >= 0) return progressed_.wait_for(lock, std::chrono::duration<double>(seconds), done);
    while (!done()) {  // without a limit this thread runs the tasks itself, which is faster than being woken
        if (ready())
            run_next(lock);
        else
            progressed_.wait(lock, [&] { return done() || ready(); });
    }
    if (ready()) queued_.notify_one();
    return true;
}

void Stream::advance(const Record& record) {
    std::unique_lock lock(mutex_);
    while (ready() && !record.done()) run_next(lock);
    if (ready()) queued_.notify_one();
}

int Stream::take_failure() {
    const std::lock_guard lock(mutex_);
    return std::exchange(failure_, 0);
}

bool Stream::idle() const {
    const std::lock_guard lock(mutex_);
    return finished_ == enqueued_;
}

bool Stream::quiet() const {
    const std::lock_guard lock(mutex_);
    return finished_ == enqueued_ && failure_ == 0 && stopped_ == 0;
}

void Stream::run() {
    set_device(device_);
    std::unique_lock lock(mutex_);
    for (;;) {
        queued_.wait(lock, [this] { return ready() || (closing_ && items_.empty()); });
        if (items_.empty()) return;
        run_next(lock);
    }
}

void Stream::run_next(std::unique_lock<std::mutex>& lock) {
    Item item = std::move(items_.front());
    items_.pop_front();
    running_ = true;
    lock.unlock();
    if (item.delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(item.delay_us));
    const int code = item.task();
    item = {};  // frees the task's objects before others see that it is done
    lock.lock();
    if (failure_ == 0) failure_ = code;
    if (code != 0 && stops_.value_or(false)) {
        stopped_ = code;
        lock.unlock();
        discard(code);
        lock.lock();
    }
    running_ = false;
    ++finished_;
    progressed_.notify_all();
}

void* add_stream(int device) {
    return streams.handles.add(std::make_shared<Stream>(device));
}

StreamPtr stream_of(void* handle) {
    const int device = current_device();
    if (handle == nullptr) {
        const std::lock_guard lock(streams.mutex);
        StreamPtr& stream = streams.defaults[device];
        if (!stream) stream = std::make_shared<Stream>(device);
        return stream;
    }
    StreamPtr stream = streams.handles.get(handle);
    if (stream->device() != device)
        throw Failure(acl_error_rt_stream_context, "stream belongs to device ", stream->device(),
                      ", this thread uses device ", device);
    return stream;
}

bool is_quiet(void* handle) {
    const StreamPtr stream = streams.handles.find(handle);
    return stream && stream->quiet();
}

StreamPtr remove_stream(void* handle) {
    return streams.handles.remove(handle);
}

std::vector<StreamPtr> streams_of_device(int device) {
    std::vector<StreamPtr> found;
    for (StreamPtr& stream : streams.handles.all())
        if (stream->device() == device) found.push_back(std::move(stream));
    const std::lock_guard lock(streams.mutex);
    if (const auto it = streams.defaults.find(device); it != streams.defaults.end()) found.push_back(it->second);
    return found;
}

}  // namespace alltoallv::emulator
