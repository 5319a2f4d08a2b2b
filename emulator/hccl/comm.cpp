#include "hccl/comm.h"

#include <cstdio>
#include <cstdlib>

#include "runtime/core/hooks.h"
#include "runtime/device.h"
#include "runtime/handles.h"
#include "runtime/settings.h"
#include "runtime/shm/shm_communicator.h"

namespace alltoallv::emulator {
namespace {

constexpr double forever = 1e9;

Handles<Comm>& comms = *new Handles<Comm>("comm", 0xC0DE, HCCL_E_PARA);  // never destroyed: threads use it to the end

/// Returns one of HCCL's variables, within HCCL's limits.
double number_of(const char* variable, double standard, double least, double most) {
    const char* text = std::getenv(variable);
    if (text == nullptr || *text == 0) return standard;
    char* end = nullptr;
    const double value = std::strtod(text, &end);
    if (*end != 0 || value < least || value > most)
        throw Failure(HCCL_E_PARA, variable, " is '", text, "', expected ", static_cast<int>(least), " to ",
                      static_cast<int>(most));
    return value;
}

double connect_timeout() {
    const double chosen = settings().connect_timeout;
    return chosen >= 0 ? chosen : number_of("HCCL_CONNECT_TIMEOUT", 120, 120, 7200);
}

CommunicatorPtr connect(const CommSpec& spec, const std::string& domain, int rank, int size, double timeout) {
    static const bool once = [] {  // before the first communicator of the process, on any thread
        hooks().warn = [](const std::string& text) { std::fprintf(stderr, "[alltoallv emulator] %s\n", text.c_str()); };
        return true;
    }();
    (void)once;
    CommunicatorOptions options;
    options.rank = rank;
    options.size = size;
    options.domain = domain;
    options.job = spec.job;
    options.threads = spec.threads;
    options.timeout = timeout;
    try {
        return make_shm_communicator(options);
    } catch (const Error& error) {
        throw Failure(result_of(error), error.what());
    }
}

/// Makes peers see that this process has left in order, and was not lost.
void leave_at_exit() {
    static const int once = std::atexit([] {
        for (const CommPtr& comm : comms.all())
            if (comm->pending == 0) comm->destroy();
    });
    (void)once;
}

}  // namespace

Comm::Comm(const CommSpec& spec) : spec_(spec) {
    const double megabytes = spec.buffer_mb > 0 ? spec.buffer_mb : number_of("HCCL_BUFFSIZE", 200, 1, 2147483647);
    buffer_bytes_ = static_cast<uint64_t>(megabytes) << 21;
    try {
        buffers_.emplace(spec.device, buffer_bytes_);
    } catch (const Failure& failure) {
        throw Failure(HCCL_E_OOM, "twice ", static_cast<int64_t>(megabytes), " MB for '", spec.name,
                      "': ", failure.what());
    }
    core_ = connect(spec, spec.name, spec.rank, spec.size, connect_timeout());
    leave_at_exit();  // after the core's static objects exist, which must be destroyed later
}

Comm::~Comm() {
    destroy();
}

double Comm::exec_timeout() const {
    const double chosen = settings().exec_timeout;
    if (chosen >= 0) return chosen;
    if (spec_.exec_timeout >= 0) return spec_.exec_timeout;
    const double seconds = number_of("HCCL_EXEC_TIMEOUT", 1836, 0, 2147483647);
    return seconds == 0 ? forever : seconds;
}

Communicator& Comm::channel(int from, int to) {
    {
        const std::lock_guard lock(mutex_);
        if (const auto found = channels_.find({from, to}); found != channels_.end()) return *found->second;
    }
    const std::string domain = spec_.name + "/" + std::to_string(from) + ">" + std::to_string(to);
    CommunicatorPtr made = connect(spec_, domain, rank() == from ? 0 : 1, 2, exec_timeout());
    const std::lock_guard lock(mutex_);
    return *channels_.emplace(std::pair{from, to}, std::move(made)).first->second;
}

Windows& Comm::windows() {
    const std::lock_guard lock(mutex_);
    if (!windows_) windows_.emplace(rank(), size(), spec_.device, buffer_bytes_);
    return *windows_;
}

void* Comm::connect_windows() {
    Windows& own = windows();
    if (!own.connected()) {  // over ranks of its own, so that calls which are queued do not come between
        const CommunicatorPtr core = connect(spec_, spec_.name + "/windows", rank(), size(), exec_timeout());
        own.connect(*core);
        core->destroy();
    }
    return own.of(rank());
}

void Comm::fail(HcclResult result) {
    int none = HCCL_SUCCESS;
    failed_.compare_exchange_strong(none, result);
}

void Comm::destroy() {
    const std::lock_guard lock(mutex_);
    core_->destroy();
    windows_.reset();
    buffers_.reset();
    for (const auto& entry : channels_) entry.second->destroy();
}

HcclComm add_comm(CommPtr comm) {
    return comms.add(std::move(comm));
}

CommPtr comm_of(HcclComm handle) {
    if (handle == nullptr) throw Failure(HCCL_E_PTR, "comm is null");
    return comms.get(handle);
}

void remove_comm(HcclComm handle) {
    comms.remove(handle);
}

HcclComm comm_named(const std::string& name) {
    const int device = current_device();
    void* found = comms.find_if([&](const Comm& c) { return c.spec().name == name && c.spec().device == device; });
    if (found == nullptr) throw Failure(HCCL_E_NOT_FOUND, "commName is '", name, "', which no communicator has");
    return found;
}

HcclResult result_of(const Error& error) {
    switch (error.kind()) {
        case ErrorClass::invalid_param:
        case ErrorClass::invalid_tensor:
        case ErrorClass::peer_mismatch:
            return HCCL_E_PARA;
        case ErrorClass::peer_lost:
            return HCCL_E_REMOTE;
        case ErrorClass::comm_timeout:
            return HCCL_E_TIMEOUT;
        default:
            return HCCL_E_INTERNAL;
    }
}

std::pair<HcclResult, std::string> caught() {
    try {
        throw;
    } catch (const Failure& failure) {
        // An error of the runtime about a stream or a buffer is a wrong argument here.
        const bool own = failure.code() <= HCCL_E_RESERVED;
        return {own ? static_cast<HcclResult>(failure.code()) : HCCL_E_PARA, failure.what()};
    } catch (const Error& error) {
        return {result_of(error), error.what()};
    } catch (const std::exception& error) {
        return {HCCL_E_INTERNAL, error.what()};
    }
}

HcclResult guarded_hccl(const char* function, const std::function<void()>& body) {
    try {
        if (const int code = apply_at_call(function, fault_of(function)); code != 0)
            return static_cast<HcclResult>(code);
        body();
        return HCCL_SUCCESS;
    } catch (...) {
        const auto [code, text] = caught();
        return static_cast<HcclResult>(report(function, code, text));
    }
}

}  // namespace alltoallv::emulator
