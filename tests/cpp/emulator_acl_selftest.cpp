// Streams, events, memory and faults of the emulated ACL.
#include <atomic>
#include <chrono>

#include "emulator_fixture.h"
#include "runtime/faults.h"

using namespace testing;

namespace {

constexpr int milliseconds = 1000;

void sleep_ms(int ms) {
    usleep(static_cast<useconds_t>(ms) * milliseconds);
}

void slow_task(void*) {
    sleep_ms(20);
}

TEST(a_thread_exchanges_its_capture_mode) {
    for (const int before : {0, 2, 1}) {
        auto mode = static_cast<aclmdlRICaptureMode>(before == 0 ? 2 : before == 2 ? 1 : 0);
        CHECK_EQ(aclmdlRICaptureThreadExchangeMode(&mode), 0);
        CHECK_EQ(static_cast<int>(mode), before);
    }
    auto wrong = static_cast<aclmdlRICaptureMode>(3);
    CHECK_EQ(aclmdlRICaptureThreadExchangeMode(&wrong), acl_error_rt_param_invalid);
    CHECK_EQ(aclmdlRICaptureThreadExchangeMode(nullptr), acl_error_rt_param_invalid);
}

TEST(streams_run_in_order_and_later) {
    aclrtStream stream = nullptr;
    CHECK_EQ(aclrtCreateStream(&stream), 0);
    static std::vector<int> order;
    int numbers[] = {0, 1, 2, 3, 4};
    const auto task = [](void* number) { order.push_back(*static_cast<int*>(number)); };
    Held held(stream);
    for (int& number : numbers) CHECK_EQ(aclrtLaunchHostFunc(stream, task, &number), 0);
    aclrtStreamStatus status;
    CHECK_EQ(aclrtStreamQuery(stream, &status), 0);
    CHECK_EQ(status, ACL_STREAM_STATUS_NOT_READY);
    CHECK_EQ(aclrtSynchronizeStreamWithTimeout(stream, 1), acl_error_rt_stream_sync_timeout);
    CHECK(order.empty());
    held.let_go();
    CHECK_EQ(aclrtSynchronizeStream(stream), 0);
    CHECK(order == (std::vector<int>{0, 1, 2, 3, 4}));
    CHECK_EQ(aclrtStreamQuery(stream, &status), 0);
    CHECK_EQ(status, ACL_STREAM_STATUS_COMPLETE);
    CHECK_EQ(aclrtDestroyStream(stream), 0);
    CHECK_EQ(aclrtSynchronizeStream(stream), acl_error_rt_param_invalid);
    check_message("stream has been destroyed");
}

TEST(a_stream_destroyed_by_force_forgets_its_tasks) {
    aclrtStream stream = nullptr;
    CHECK_EQ(aclrtCreateStream(&stream), 0);
    const Stream other;
    const Event event;
    static std::atomic<int> begun{0}, ended{0};  // nothing waits for the task that is under way
    static std::atomic<bool> go{false};
    const auto task = [](void*) {
        ++begun;
        while (!go) sleep_ms(1);
        ++ended;
    };
    for (int i = 0; i < 5; ++i) CHECK_EQ(aclrtLaunchHostFunc(stream, task, nullptr), 0);
    CHECK_EQ(aclrtRecordEvent(event, stream), 0);
    CHECK_EQ(aclrtStreamWaitEvent(other, event), 0);
    CHECK_EQ(aclrtDestroyStreamForce(stream), 0);
    CHECK(aclrtSynchronizeStream(other) != 0);  // not for ever, and not as if the tasks had run
    go = true;
    eventually([] { return ended == begun; });
    sleep_ms(50);  // for one that would come nevertheless
    CHECK(begun <= 1);
}

/// A copy on one stream, then another on a second stream, with or without the event between them.
std::vector<int> copy_across_streams(bool synchronized) {
    const std::vector<int> values{1, 2, 3, 4};
    const DeviceArray<int> first(std::vector<int>(4, -1)), second(std::vector<int>(4, -2)), source(values);
    const Stream a, b;
    const Event event;
    Held held(a);
    const auto copy = [&](const DeviceArray<int>& to, const DeviceArray<int>& from, aclrtStream stream) {
        CHECK_EQ(
            aclrtMemcpyAsync(to.data(), to.bytes(), from.data(), from.bytes(), ACL_MEMCPY_DEVICE_TO_DEVICE, stream), 0);
    };
    copy(first, source, a);
    CHECK_EQ(aclrtRecordEvent(event, a), 0);
    if (synchronized) CHECK_EQ(aclrtStreamWaitEvent(b, event), 0);
    copy(second, first, b);
    if (synchronized) held.let_go();
    CHECK_EQ(aclrtSynchronizeStream(b), 0);
    const std::vector<int> result = second.values();
    held.let_go();
    CHECK_EQ(aclrtSynchronizeStream(a), 0);
    return result;
}

TEST(events_order_streams) {
    CHECK(copy_across_streams(true) == (std::vector<int>{1, 2, 3, 4}));
}

#ifndef __SANITIZE_THREAD__  // these two race on purpose
TEST(a_missing_wait_is_seen) {
    CHECK(copy_across_streams(false) == (std::vector<int>{-1, -1, -1, -1}));
}

TEST(a_synchronous_copy_waits_for_no_stream) {
    const DeviceArray<int> target(std::vector<int>{7}), source(std::vector<int>{8});
    const Stream stream;
    Held held(stream);
    CHECK_EQ(aclrtMemcpyAsync(target.data(), 4, source.data(), 4, ACL_MEMCPY_DEVICE_TO_DEVICE, stream), 0);
    CHECK_EQ(target.values()[0], 7);
    held.let_go();
    CHECK_EQ(aclrtSynchronizeStream(stream), 0);
    CHECK_EQ(target.values()[0], 8);
}
#endif

TEST(events_tell_when) {
    const Stream stream;
    aclrtEvent start, end;
    CHECK_EQ(aclrtCreateEventWithFlag(&start, acl_event_time_line), 0);
    CHECK_EQ(aclrtCreateEventExWithFlag(&end, acl_event_time_line), 0);
    float ms = 0;
    CHECK_EQ(aclrtEventElapsedTime(&ms, start, end), acl_error_rt_param_invalid);
    check_message("has not been recorded");
    CHECK_EQ(aclrtRecordEvent(start, stream), 0);
    CHECK_EQ(aclrtLaunchHostFunc(stream, slow_task, nullptr), 0);
    Held held(stream);
    CHECK_EQ(aclrtRecordEvent(end, stream), 0);
    aclrtEventRecordedStatus status;
    CHECK_EQ(aclrtQueryEventStatus(end, &status), 0);
    CHECK_EQ(status, ACL_EVENT_RECORDED_STATUS_NOT_READY);
    held.let_go();
    CHECK_EQ(aclrtSynchronizeEvent(end), 0);
    CHECK_EQ(aclrtQueryEventStatus(end, &status), 0);
    CHECK_EQ(status, ACL_EVENT_RECORDED_STATUS_COMPLETE);
    CHECK_EQ(aclrtEventElapsedTime(&ms, start, end), 0);
    CHECK(ms >= 20 && ms < 20000);
    CHECK_EQ(aclrtDestroyEvent(start), 0);
    CHECK_EQ(aclrtDestroyEvent(end), 0);
}

TEST(memory_knows_its_bounds) {
    const DeviceArray<char> device(100);
    char host[200] = {};
    CHECK_EQ(aclrtMemcpy(device.data(), 200, host, 101, ACL_MEMCPY_HOST_TO_DEVICE), acl_error_rt_param_invalid);
    check_message("dst is byte 0 of an allocation of 100 bytes");
    CHECK_EQ(aclrtMemcpy(host, 50, device.data(), 51, ACL_MEMCPY_DEVICE_TO_HOST), acl_error_rt_param_invalid);
    check_message("destMax only 50");
    CHECK_EQ(aclrtMemcpy(host, 200, host + 100, 10, ACL_MEMCPY_HOST_TO_DEVICE), acl_error_rt_param_invalid);
    check_message("is not device memory");
    CHECK_EQ(aclrtMemcpy(device.data(), 100, host, 10, ACL_MEMCPY_HOST_TO_HOST), acl_error_rt_param_invalid);
    check_message("dst");
    CHECK_EQ(aclrtMemset(static_cast<char*>(device.data()) + 90, 20, 0, 20), acl_error_rt_param_invalid);
    CHECK_EQ(aclrtFree(host), acl_error_rt_param_invalid);
    void* const freed = allocated(10);
    CHECK_EQ(aclrtFree(freed), 0);
    CHECK_EQ(aclrtFree(freed), acl_error_rt_param_invalid);
    CHECK_EQ(static_cast<int>(device.values()[0]), static_cast<int>(static_cast<char>(0xA5)));
    aclrtPtrAttributes attributes;
    CHECK_EQ(aclrtPointerGetAttributes(device.data(), &attributes), 0);
    CHECK_EQ(attributes.location.type, ACL_MEM_LOCATION_TYPE_DEVICE);
    void* begin = nullptr;
    size_t size = 0;
    CHECK_EQ(aclrtMemGetAddressRange(static_cast<char*>(device.data()) + 50, &begin, &size), 0);
    CHECK(begin == device.data());
    CHECK_EQ(size, size_t{100});
    CHECK_EQ(aclrtMemGetAddressRange(&attributes, &begin, &size), acl_error_rt_param_invalid);
}

TEST(memory_is_mapped_at_reserved_addresses) {
    constexpr size_t page = size_t{2} << 20;
    size_t granularity = 0, free_before = 0, free_after = 0, total = 0;
    aclrtPhysicalMemProp prop{};
    prop.location = {0, ACL_MEM_LOCATION_TYPE_DEVICE};
    CHECK_EQ(aclrtMemGetAllocationGranularity(&prop, ACL_RT_MEM_ALLOC_GRANULARITY_MINIMUM, &granularity), 0);
    CHECK_EQ(granularity, page);
    CHECK_EQ(aclrtGetMemInfo(ACL_HBM_MEM, &free_before, &total), 0);
    void* addresses = nullptr;
    CHECK_EQ(aclrtReserveMemAddress(&addresses, 512, 0, nullptr, 1), 0);  // as torch_npu asks whether it can
    CHECK_EQ(aclrtReleaseMemAddress(addresses), 0);
    CHECK_EQ(aclrtReserveMemAddress(&addresses, total + page, 0, nullptr, 1), 0);
    char* const base = static_cast<char*>(addresses);
    aclrtDrvMemHandle first = nullptr, second = nullptr;
    CHECK_EQ(aclrtMallocPhysical(&first, page, &prop, 0), 0);
    CHECK_EQ(aclrtMallocPhysical(&second, 2 * page, &prop, 0), 0);
    CHECK_EQ(aclrtGetMemInfo(ACL_HBM_MEM, &free_after, &total), 0);
    CHECK_EQ(free_before - free_after, 3 * page);
    CHECK_EQ(aclrtMapMem(base, page, 0, first, 0), 0);
    CHECK_EQ(aclrtMapMem(base + page, page, page, second, 0), 0);
    // Memory that is mapped side by side is one range, which ends there.
    CHECK_EQ(static_cast<int>(base[page]), static_cast<int>(static_cast<char>(0xA5)));
    CHECK_EQ(aclrtMemset(base + page - 10, 20, 7, 20), 0);
    CHECK_EQ(aclrtMemset(base + 2 * page - 10, 20, 7, 20), acl_error_rt_param_invalid);
    check_message("20 bytes from there leave it");
    CHECK_EQ(aclrtMapMem(base + page, page, 0, second, 0), acl_error_rt_param_invalid);
    check_message("has memory already");
    CHECK_EQ(aclrtMapMem(base + 2 * page, 2 * page, page, second, 0), acl_error_rt_param_invalid);
    check_message("of memory of 4194304 bytes");
    CHECK_EQ(aclrtFreePhysical(second), acl_error_rt_param_invalid);
    check_message("still mapped");
    CHECK_EQ(aclrtReleaseMemAddress(base), acl_error_rt_param_invalid);
    check_message("still mapped");
    // What is unmapped keeps its content.
    CHECK_EQ(aclrtUnmapMem(base + page), 0);
    CHECK_EQ(aclrtUnmapMem(base + page), acl_error_rt_param_invalid);
    check_message("is not mapped");
    CHECK_EQ(aclrtMapMem(base + 4 * page, page, page, second, 0), 0);
    CHECK_EQ(static_cast<int>(base[4 * page + 9]), 7);
    CHECK_EQ(aclrtFree(base), acl_error_rt_param_invalid);
    CHECK_EQ(aclrtUnmapMem(base + 4 * page), 0);
    CHECK_EQ(aclrtUnmapMem(base), 0);
    CHECK_EQ(aclrtFreePhysical(first), 0);
    CHECK_EQ(aclrtFreePhysical(second), 0);
    CHECK_EQ(aclrtFreePhysical(second), acl_error_rt_param_invalid);
    CHECK_EQ(aclrtReleaseMemAddress(base), 0);
    CHECK_EQ(aclrtMallocPhysical(&first, page + 1, &prop, 0), acl_error_rt_param_invalid);
    check_message("size is 2097153, expected a multiple of 2097152");
    CHECK_EQ(aclrtGetMemInfo(ACL_HBM_MEM, &free_after, &total), 0);
    CHECK_EQ(free_before, free_after);
}

TEST(a_device_can_be_full) {
    size_t free_before = 0, free_after = 0, total = 0;
    CHECK_EQ(aclrtGetMemInfo(ACL_HBM_MEM, &free_before, &total), 0);
    void* memory = nullptr;
    CHECK_EQ(aclrtMalloc(&memory, total + 1, ACL_MEM_MALLOC_HUGE_FIRST), acl_error_rt_memory_allocation);
    memory = allocated(1000);
    CHECK_EQ(aclrtGetMemInfo(ACL_HBM_MEM, &free_after, &total), 0);
    CHECK_EQ(free_before - free_after, size_t{1000});
    CHECK_EQ(aclrtFree(memory), 0);
}

/// Queues a task that will fail, because its memory is freed before it runs; tasks are late from now on.
void queue_failure(aclrtStream stream) {
    void* const memory = allocated(100);
    const Held held(stream);
    option("task_delay_us", "20000");
    CHECK_EQ(aclrtMemsetAsync(memory, 100, 0, 100, stream), 0);
    CHECK_EQ(aclrtFree(memory), 0);
}

/// The failed task, and one behind it; then what the stream says. Whether the second has run.
bool runs_on_after_a_failure(aclrtStream stream) {
    const DeviceArray<int> value(std::vector<int>{-1});
    queue_failure(stream);
    CHECK_EQ(aclrtMemsetAsync(value.data(), value.bytes(), 0, value.bytes(), stream), 0);
    CHECK_EQ(aclrtSynchronizeStream(stream), acl_error_rt_param_invalid);
    option("task_delay_us", "0");
    CHECK_EQ(aclrtSynchronizeStream(stream), 0);  // reported once
    return value.values()[0] == 0;
}

TEST(a_failure_stops_a_stream_that_was_told_so) {
    const Stream usual, goes_on, stops, other;
    const Event event;
    CHECK_EQ(aclrtSetStreamFailureMode(goes_on, acl_continue_on_failure), 0);
    CHECK_EQ(aclrtSetStreamFailureMode(stops, acl_stop_on_failure), 0);
    CHECK_EQ(aclrtSetStreamFailureMode(stops, acl_stop_on_failure), acl_error_rt_param_invalid);
    check_message("can be set once");
    CHECK_EQ(aclrtSetStreamFailureMode(usual, 2), acl_error_rt_param_invalid);
    CHECK_EQ(aclrtSetStreamFailureMode(nullptr, acl_stop_on_failure), acl_error_rt_param_invalid);
    CHECK(runs_on_after_a_failure(usual));
    CHECK(runs_on_after_a_failure(goes_on));

    const DeviceArray<int> value(1);
    CHECK_EQ(aclrtMemsetAsync(value.data(), value.bytes(), 0, value.bytes(), stops), 0);
    CHECK_EQ(aclrtSynchronizeStream(stops), 0);
    queue_failure(stops);
    CHECK_EQ(aclrtMemsetAsync(value.data(), value.bytes(), 1, value.bytes(), stops), 0);
    CHECK_EQ(aclrtRecordEvent(event, stops), 0);  // comes too late, and whoever waits for it learns why
    CHECK_EQ(aclrtStreamWaitEvent(other, event), 0);
    CHECK_EQ(aclrtSynchronizeStream(other), acl_error_rt_param_invalid);
    option("task_delay_us", "0");
    CHECK_EQ(aclrtSynchronizeStream(stops), acl_error_rt_param_invalid);
    CHECK_EQ(aclrtSynchronizeStream(stops), 0);  // reported once
    CHECK_EQ(aclrtMemsetAsync(value.data(), value.bytes(), 1, value.bytes(), stops), 0);
    CHECK_EQ(aclrtSynchronizeStream(stops), acl_error_rt_param_invalid);  // what comes later is not run either
    CHECK_EQ(value.values()[0], 0);
}

TEST(failures_travel_with_events) {
    const Stream broken, other;
    const Event event;
    queue_failure(broken);
    CHECK_EQ(aclrtRecordEvent(event, broken), 0);
    CHECK_EQ(aclrtStreamWaitEvent(other, event), 0);
    CHECK_EQ(aclrtSynchronizeStream(other), acl_error_rt_param_invalid);
    option("task_delay_us", "0");
    CHECK_EQ(aclrtSynchronizeEvent(event), acl_error_rt_param_invalid);
    CHECK_EQ(aclrtSynchronizeDevice(), acl_error_rt_param_invalid);
}

TEST(a_stream_waits_for_an_event_only_so_long) {
    const Stream late, other;
    const Event event;
    std::atomic<bool> go{false};
    const auto held = [](void* argument) {
        while (!*static_cast<std::atomic<bool>*>(argument)) sleep_ms(1);
    };
    CHECK_EQ(aclrtLaunchHostFunc(late, held, &go), 0);
    CHECK_EQ(aclrtRecordEvent(event, late), 0);
    CHECK_EQ(aclrtStreamWaitEventWithTimeout(other, event, -2), acl_error_rt_param_invalid);
    CHECK_EQ(aclrtStreamWaitEventWithTimeout(other, event, 20), 0);
    CHECK_EQ(aclrtSynchronizeStream(other), acl_error_rt_task_timeout);
    CHECK_EQ(aclrtSetOpWaitTimeout(1), 0);
    CHECK_EQ(aclrtStreamWaitEvent(other, event), 0);
    CHECK_EQ(aclrtSetOpWaitTimeout(0), 0);
    CHECK_EQ(aclrtSynchronizeStream(other), acl_error_rt_task_timeout);
    CHECK_EQ(aclrtStreamWaitEventWithTimeout(other, event, 60000), 0);
    CHECK_EQ(aclrtStreamWaitEventWithTimeout(other, event, -1), 0);
    go = true;
    CHECK_EQ(aclrtSynchronizeStream(other), 0);
}

TEST(threads_choose_their_device) {
    std::thread([] {
        void* memory = nullptr;
        CHECK_EQ(aclrtMalloc(&memory, 1, ACL_MEM_MALLOC_HUGE_FIRST), acl_error_rt_context_null);
        check_message("aclrtSetDevice has not been called");
        CHECK_EQ(aclrtSetDevice(99), acl_error_rt_invalid_deviceid);
        CHECK_EQ(aclrtSetDevice(1), 0);
        const Stream stream;
        CHECK_EQ(aclrtSetDevice(0), 0);
        CHECK_EQ(aclrtSynchronizeStream(stream), acl_error_rt_stream_context);
    }).join();
}

TEST(faults_hit_the_call_they_name) {
    void* memory = nullptr;
    option("faults", "aclrtMalloc#2=fail:207001");
    CHECK_EQ(aclrtMalloc(&memory, 10, ACL_MEM_MALLOC_HUGE_FIRST), 0);
    CHECK_EQ(aclrtFree(memory), 0);
    CHECK_EQ(aclrtMalloc(&memory, 10, ACL_MEM_MALLOC_HUGE_FIRST), 207001);
    check_message("aclrtMalloc: fails because a fault was requested");
    CHECK_EQ(aclrtMalloc(&memory, 10, ACL_MEM_MALLOC_HUGE_FIRST), 0);
    CHECK_EQ(aclrtFree(memory), 0);
    option("faults", "");
    option("faults", "aclrtFree@7=fail:1 ; aclrtMalloc=fail:207001;");
    CHECK_EQ(aclrtMalloc(&memory, 10, ACL_MEM_MALLOC_HUGE_FIRST), 207001);
    option("faults", "");
    for (const char* wrong : {"aclrtMalloc", "=die", "aclrtMalloc=explode", "aclrtMalloc=fail", "aclrtMalloc=zeros",
                              "aclrtMalloc@x=die", "aclrtMalloc#99999999999=die", "aclrtMalloc#2x=die",
                              "aclrtMalloc@-1=die", "aclrtMalloc=fail:4 5", "HcclSend=zeros:1"})
        CHECK_EQ(AlltoallvEmulatorSet("faults", wrong), -1);
    CHECK_EQ(AlltoallvEmulatorSet("no such setting", "1"), -1);
}

TEST(settings_out_of_range_are_refused) {
    for (const char* name : {"devices", "memory_mb", "task_delay_us", "connect_timeout", "exec_timeout", "late_counts"})
        for (const char* wrong : {"many", "-2", "nan", "inf", "1e300", ""})
            CHECK_EQ(AlltoallvEmulatorSet(name, wrong), -1);
    for (const char* name : {"memory_mb", "task_delay_us"}) CHECK_EQ(AlltoallvEmulatorSet(name, "-1"), -1);
    CHECK_EQ(AlltoallvEmulatorSet("exec_timeout", "-1"), 0);
}

TEST(a_new_stream_has_no_subscriber) {
    for (int i = 0; i < 10; ++i) {  // at the address of the one before, perhaps
        const Stream stream;
        CHECK_EQ(aclrtLaunchCallback(slow_task, nullptr, ACL_CALLBACK_BLOCK, stream), 100034);
        check_message("no thread has subscribed");
        CHECK_EQ(aclrtSubscribeReport(pthread_self(), stream), 0);
        CHECK_EQ(aclrtLaunchCallback(slow_task, nullptr, ACL_CALLBACK_BLOCK, stream), 0);
        CHECK_EQ(aclrtProcessReport(-1), 0);
    }
}

extern "C" int aclmdlLoadFromFile();

TEST(what_is_not_implemented_says_so) {
    CHECK_EQ(aclmdlLoadFromFile(), acl_error_rt_feature_not_support);
    check_message("aclmdlLoadFromFile: is not implemented");
}

}  // namespace
