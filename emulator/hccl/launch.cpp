#include "hccl/launch.h"

#include <chrono>
#include <optional>
#include <thread>
#include <utility>

#include "runtime/core/request.h"
#include "runtime/memory.h"
#include "runtime/settings.h"

namespace alltoallv::emulator {
namespace {

/// A call whose arguments have been checked.
struct Checked {
    CommPtr comm;
    StreamPtr stream;
    Launch launch;
    std::optional<Fault> fault;
    uint64_t ticket = 0;  ///< of a collective
};

/// Number of open HcclGroupStart calls; while it is not 0, calls of this thread wait for HcclGroupEnd.
thread_local int group_depth = 0;
thread_local std::vector<Checked> grouped;

bool overlap(const Region& a, const Region& b) {
    return a.bytes > 0 && b.bytes > 0 && a.data() < b.data() + b.bytes && b.data() < a.data() + a.bytes;
}

void check_region(const Region& region) {
    if (region.bytes == 0) return;
    if (region.address == nullptr) throw Failure(HCCL_E_PTR, region.name, " is null");
    check_device_range(region.name, region.address, region.bytes);
}

void check_regions(const Launch& l) {
    if (l.at_once) return;
    for (const Region& region : l.inputs) check_region(region);
    for (const Region& region : l.outputs) check_region(region);
}

/// Returns the code that a task's failure has for its stream.
int stream_code(int result) {
    return result == HCCL_E_TIMEOUT ? acl_error_rt_task_timeout : acl_error_rt_suspect_remote_error;
}

void work(Comm& comm, const Launch& l, const std::optional<Fault>& fault) {
    if (fault && fault->action == Action::die) die(l.agreed.function);
    if (fault && fault->action == Action::delay) std::this_thread::sleep_for(std::chrono::milliseconds(fault->number));
    if (fault && fault->action == Action::skip) return;
    try {
        check_regions(l);  // the memory may have been freed since
    } catch (const Failure& failure) {
        if (l.run) comm.core().fail(OpKind::all_gather, invalid_param(1478, failure.what()), false);
        throw;
    }
    const double timeout = comm.exec_timeout();
    if (l.run)
        run_agreed(comm.core(), l.agreed, timeout, [&](const OperatorCall& call) { l.run(comm, call); });
    else
        run_messages(comm, l.messages, timeout);
    if (fault && fault->action == Action::zeros)
        for (const Region& region : l.outputs)
            if (region.bytes > 0) std::memset(region.data(), 0, region.bytes);
    if (fault && fault->action == Action::async) throw Failure(fault->number, "fails because a fault was requested");
}

/// A collective must not begin before earlier ones of its communicator are done.
void check_order(Comm& comm, uint64_t ticket) {
    const uint64_t finished = comm.finished;
    if (ticket == finished) return;
    const std::string text = joined("call ", ticket + 1, " of the communicator begins when ", finished,
                                    " are done: nothing orders their streams");
    comm.core().fail(OpKind::all_gather, invalid_param(1479, text), false);
    throw Failure(HCCL_E_PARA, text);
}

int task(Comm& comm, const Launch& l, const std::optional<Fault>& fault, uint64_t ticket) {
    try {
        if (l.run) check_order(comm, ticket);
        work(comm, l, fault);
        return 0;
    } catch (...) {
        const auto [code, text] = caught();
        if (!l.at_once) comm.fail(code);
        report(l.agreed.function, code,
               "on rank " + std::to_string(comm.rank()) + " of '" + comm.spec().name + "': " + text);
        return l.at_once ? code : stream_code(code);
    }
}

/// Makes the work of a call, which is the communicator's next.
Stream::Task next_task(Checked call) {
    if (call.launch.run) call.ticket = call.comm->called++;
    // Runs also if a stream drops the task, or does not accept it.
    std::shared_ptr<void> done(nullptr, [comm = call.comm, collective = call.launch.run != nullptr](void*) {
        if (collective) ++comm->finished;
        --comm->pending;
    });
    return [call = std::move(call), done = std::move(done)] {
        return task(*call.comm, call.launch, call.fault, call.ticket);
    };
}

void enqueue(Checked call) {
    const StreamPtr stream = call.stream;
    stream->enqueue(next_task(std::move(call)));
}

/// Throws Failure(HCCL_E_PARA) if the ranks have given different values.
void compare(Communicator& core, const Agreed& agreed, double timeout) {
    std::vector<Agreed> all(static_cast<size_t>(core.size()));
    const Request request = gather_request(OpKind::all_gather, core.size(), sizeof(Agreed));
    core.exchange(request.exchange(DType::uint8, &agreed, all.data()), timeout);
    const auto differs = [](size_t j, const char* what, const auto& first, const auto& other) {
        throw Failure(HCCL_E_PARA, "the ranks disagree: ", what, " is ", first, " on rank 0 and ", other, " on rank ",
                      j);
    };
    for (size_t j = 1; j < all.size(); ++j) {
        const Agreed &a = all[0], &b = all[j];
        if (std::strcmp(a.function, b.function) != 0) differs(j, "the function", a.function, b.function);
        if (a.type != b.type)
            differs(j, "dataType", name_of(static_cast<HcclDataType>(a.type)),
                    name_of(static_cast<HcclDataType>(b.type)));
        if (a.op != b.op) differs(j, "op", a.op, b.op);
        if (a.root != b.root) differs(j, "root", a.root, b.root);
        if (a.count != b.count) differs(j, "count", a.count, b.count);
    }
}

}  // namespace

void check_count(const char* name, uint64_t count) {
    if (count > most_elements) throw Failure(HCCL_E_PARA, name, " is ", count, ", expected at most ", most_elements);
}

void check_given(const char* name, const void* pointer) {
    if (pointer == nullptr) throw Failure(HCCL_E_PTR, name, " is null");
}

void check_root(uint32_t root, const Comm& comm) {
    if (root >= static_cast<uint32_t>(comm.size()))
        throw Failure(HCCL_E_PARA, "root is ", root, ", expected less than ", comm.size());
}

void read_entries(const char* name, const void* array, std::span<int64_t> into) {
    check_given(name, array);
    for (size_t j = 0; j < into.size(); ++j) {
        const uint64_t value = static_cast<const uint64_t*>(array)[j];
        check_count(joined(name, "[", j, "]").c_str(), value);
        into[j] = static_cast<int64_t>(value);
    }
}

uint64_t span_of(std::span<const int64_t> counts, std::span<const int64_t> displs) {
    int64_t end = 0;
    for (size_t j = 0; j < counts.size(); ++j)
        if (counts[j] > 0) end = std::max(end, displs[j] + counts[j]);
    return static_cast<uint64_t>(end);
}

void check_apart(const Region& input, const Region& output) {
    const bool same = input.address == output.address && input.address != nullptr;
    if (same || overlap(input, output))
        throw Failure(HCCL_E_PARA, input.name, " and ", output.name, " share memory, which HCCL does not allow here");
}

HcclResult launch(const char* function, const std::function<Launch()>& make) {
    const std::optional<Fault> fault = fault_of(function);
    if (fault && fault->action == Action::fail)
        return static_cast<HcclResult>(report(function, fault->number, "fails because a fault was requested"));
    try {
        Launch l = make();
        std::strncpy(l.agreed.function, function, sizeof l.agreed.function - 1);
        const CommPtr comm = comm_of(l.comm);
        if (!l.at_once) check_given("stream", l.stream);
        if (!l.at_once && settings().capturing)
            throw Failure(HCCL_E_NOT_SUPPORT,
                          "cannot be captured in an NPUGraph: it is called by no operator of torch, so that replays "
                          "would leave it out");
        check_count("count", l.agreed.count);
        check_regions(l);
        Checked call{comm, l.at_once ? nullptr : stream_of(l.stream), std::move(l), fault};
        ++comm->pending;
        if (call.launch.at_once) return static_cast<HcclResult>(next_task(std::move(call))());
        if (group_depth > 0)
            grouped.push_back(std::move(call));
        else
            enqueue(std::move(call));
        return HCCL_SUCCESS;
    } catch (...) {
        const auto [code, text] = caught();
        return static_cast<HcclResult>(report(function, code, text));
    }
}

void run_agreed(Communicator& core, const Agreed& agreed, double timeout,
                const std::function<void(const OperatorCall&)>& run) {
    const std::string terms =
        joined(agreed.function, " ", agreed.type, " ", agreed.op, " ", agreed.root, " ", agreed.count);
    try {
        run({static_cast<int64_t>(std::hash<std::string>{}(terms)), timeout});
    } catch (const Error& error) {
        if (error.kind() == ErrorClass::peer_mismatch) compare(core, agreed, timeout);  // on all ranks
        throw;
    }
}

Copied::Copied(const Region& input, const Region& output) : data_(input.address) {
    if (!overlap(input, output)) return;
    copy_.assign(input.data(), input.data() + input.bytes);
    data_ = copy_.data();
}

void in_threads(size_t count, const std::function<void(size_t)>& body) {
    std::vector<std::exception_ptr> errors(count);
    std::vector<std::thread> threads;
    const auto noting = [&](size_t i, const auto& call) {
        try {
            call();
        } catch (...) {
            errors[i] = std::current_exception();
        }
    };
    for (size_t i = 0; i < count; ++i)  // where no thread can be made, those that were come to their end first
        noting(i, [&] { threads.emplace_back([&, i] { noting(i, [&] { body(i); }); }); });
    for (std::thread& thread : threads) thread.join();
    for (const std::exception_ptr& error : errors)
        if (error) std::rethrow_exception(error);
}

void begin_group() {
    ++group_depth;
}

void end_group() {
    if (group_depth == 0) throw Failure(HCCL_E_PARA, "HcclGroupStart has not been called by this thread");
    if (--group_depth > 0) return;
    std::vector<Checked> calls = std::exchange(grouped, {});
    for (size_t i = 0; i < calls.size(); ++i) {
        Checked& call = calls[i];
        if (!call.comm) continue;  // merged into an earlier one
        for (size_t j = i + 1; j < calls.size() && !call.launch.run; ++j) {
            Checked& other = calls[j];
            if (other.comm != call.comm || other.stream != call.stream || other.launch.run) continue;
            const auto append = [](auto& to, auto& from) { to.insert(to.end(), from.begin(), from.end()); };
            append(call.launch.messages, other.launch.messages);
            append(call.launch.inputs, other.launch.inputs);
            append(call.launch.outputs, other.launch.outputs);
            if (!call.fault) call.fault = other.fault;
            --other.comm->pending;
            other.comm = nullptr;
        }
        enqueue(std::move(call));
    }
}

}  // namespace alltoallv::emulator
