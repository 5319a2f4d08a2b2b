// Events: marks in a stream, for which others can wait.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>

namespace alltoallv::emulator {

class Stream;

/// One recording of an event. Waiting for an event means waiting for its latest recording.
class Record {
  public:
    using Time = std::chrono::steady_clock::time_point;

    explicit Record(std::weak_ptr<Stream> stream = {}) : source(std::move(stream)) {}

    void complete(int failure);

    /// Returns false if it does not complete within `seconds` (negative: no limit).
    bool wait(double seconds);

    bool done() const { return read(done_); }
    int failure() const { return read(failure_); }  // of the stream, at that point
    Time time() const { return read(time_); }       // when it completed

    const std::weak_ptr<Stream> source;  ///< the stream that completes it

  private:
    template <class Value>
    Value read(const Value& value) const {
        const std::lock_guard lock(mutex_);
        return value;
    }

    mutable std::mutex mutex_;
    std::condition_variable completed_;
    bool done_ = false;
    int failure_ = 0;
    Time time_;
};

class Event {
  public:
    /// Makes a new recording by this stream, which replaces the one before.
    std::shared_ptr<Record> renew(std::weak_ptr<Stream> source);

    /// Returns the latest recording; null before the first.
    std::shared_ptr<Record> latest() const;

  private:
    mutable std::mutex mutex_;
    std::shared_ptr<Record> latest_;
};

}  // namespace alltoallv::emulator
