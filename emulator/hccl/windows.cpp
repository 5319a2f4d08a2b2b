// The functions with which programs find the buffers of a communicator, for kernels that communicate by themselves.
#include "hccl/windows.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <cstring>
#include <memory>
#include <string>

#include "hccl/launch.h"
#include "runtime/abi/hccl_windows.h"
#include "runtime/core/request.h"
#include "runtime/handles.h"
#include "runtime/memory.h"

namespace alltoallv::emulator {
namespace {

constexpr size_t filled = 1 << 20;
constexpr uint8_t engine_vector_cores = 4;  // the only engine whose kernels reach windows by addresses

/// What HcclKfcAllocOpArgs returns: what HcclCreateOpResCtx will make links for.
struct OpArgs {
    uint8_t engine = 0;
    std::string algorithm;
};

Handles<OpArgs>& op_args = *new Handles<OpArgs>("opArgs", 0xA265, HCCL_E_PARA);

/// Where a rank's buffer can be opened.
struct Location {
    int32_t pid, fd;
};

}  // namespace

Windows::Windows(int rank, int size, int device, uint64_t bytes)
    : rank_(rank),
      device_(device),
      bytes_(bytes),
      memory_(memfd_create("alltoallv-window", MFD_CLOEXEC)),
      buffers_(static_cast<size_t>(size)) {
    if (!memory_ || ftruncate(memory_.get(), static_cast<off_t>(bytes)) != 0)
        throw Failure(HCCL_E_MEMORY, "a buffer of ", bytes, " bytes cannot be made: ", std::strerror(errno));
    add(rank, memory_.get());
    std::memset(of(rank), 0xA5, std::min<uint64_t>(bytes, filled));
}

Windows::~Windows() {
    for (const Mapping& buffer : buffers_)
        if (buffer.data() != nullptr) forget_device_memory(buffer.data());
}

void Windows::add(int rank, int fd) {
    Mapping& buffer = buffers_[static_cast<size_t>(rank)];
    buffer = Mapping(fd, bytes_);
    know_device_memory(buffer.data(), bytes_, device_);
}

void Windows::connect(Communicator& core) {
    if (connected_) return;
    const Location own_location{getpid(), memory_.get()};
    std::vector<Location> all(buffers_.size());
    const Request request = gather_request(OpKind::all_gather, core.size(), sizeof own_location);
    core.exchange(request.exchange(DType::uint8, &own_location, all.data()), -1);
    for (size_t j = 0; j < all.size(); ++j) {
        if (static_cast<int>(j) == rank_) continue;
        const std::string path = joined("/proc/", all[j].pid, "/fd/", all[j].fd);
        const UniqueFd fd(open(path.c_str(), O_RDWR | O_CLOEXEC));
        if (!fd) throw Failure(HCCL_E_MEMORY, "the buffer of rank ", j, " cannot be opened: ", std::strerror(errno));
        add(static_cast<int>(j), fd.get());
    }
    // Nobody's descriptor is closed before all have opened it.
    core.exchange(request.exchange(DType::uint8, &own_location, all.data()), -1);
    connected_ = true;
}

}  // namespace alltoallv::emulator

using namespace alltoallv;
using namespace alltoallv::emulator;

HcclResult HcclCommGetHandleWithName(const char* commName, HcclComm* comm) {
    return guarded_hccl(__func__, [&] {
        check_given("commName", commName);
        check_given("comm", comm);
        *comm = comm_named(commName);
    });
}

HcclResult HcclGetHcclBuffer(HcclComm comm, void** buffer, uint64_t* size) {
    return guarded_hccl(__func__, [&] {
        check_given("buffer", buffer);
        check_given("size", size);
        const CommPtr c = comm_of(comm);
        *buffer = c->windows().of(c->rank());
        *size = c->windows().bytes();
    });
}

HcclResult HcclGetRemoteIpcHcclBuf(HcclComm comm, uint64_t remoteRank, void** buffer, uint64_t* size) {
    return guarded_hccl(__func__, [&] {
        check_given("buffer", buffer);
        check_given("size", size);
        const CommPtr c = comm_of(comm);
        if (remoteRank >= static_cast<uint64_t>(c->size()))
            throw Failure(HCCL_E_PARA, "remoteRank is ", remoteRank, ", expected less than ", c->size());
        if (!c->windows().connected() && static_cast<int>(remoteRank) != c->rank())
            throw Failure(HCCL_E_NOT_FOUND, "'", c->spec().name,
                          "' has no links to its peers' buffers yet: HcclCreateOpResCtx makes them");
        *buffer = c->windows().of(static_cast<int>(remoteRank));
        *size = c->windows().bytes();
    });
}

HcclResult HcclKfcAllocOpArgs(void** opArgs) {
    return guarded_hccl(__func__, [&] {
        check_given("opArgs", opArgs);
        *opArgs = op_args.add(std::make_shared<OpArgs>());
    });
}

HcclResult HcclKfcFreeOpArgs(void* opArgs) {
    return guarded_hccl(__func__, [&] {
        check_given("opArgs", opArgs);
        op_args.remove(opArgs);
    });
}

HcclResult HcclKfcOpArgsSetCommEngine(void* opArgs, uint8_t engine) {
    return guarded_hccl(__func__, [&] {
        check_given("opArgs", opArgs);
        if (engine != engine_vector_cores)
            throw Failure(HCCL_E_NOT_SUPPORT, "engine is ", static_cast<int>(engine), ", expected ",
                          static_cast<int>(engine_vector_cores), ", the vector cores");
        op_args.get(opArgs)->engine = engine;
    });
}

HcclResult HcclKfcOpArgsSetAlgConfig(void* opArgs, char* algConfig) {
    return guarded_hccl(__func__, [&] {
        check_given("opArgs", opArgs);
        check_given("algConfig", algConfig);
        op_args.get(opArgs)->algorithm = algConfig;
    });
}

/// All ranks call it: makes the links to the peers' buffers.
HcclResult HcclCreateOpResCtx(HcclComm comm, uint8_t opType, void* opArgs, void** opResCtx) {
    return guarded_hccl(__func__, [&] {
        constexpr uint8_t all_to_all_v = 8, batch_write = 18;
        check_given("opArgs", opArgs);
        check_given("opResCtx", opResCtx);
        const CommPtr c = comm_of(comm);
        if (opType != all_to_all_v && opType != batch_write)
            throw Failure(HCCL_E_NOT_SUPPORT, "opType is ", static_cast<int>(opType), ", expected 8 (AlltoAllV) or 18 ",
                          "(BatchWrite), for which the emulator makes links");
        if (op_args.get(opArgs)->engine != engine_vector_cores)
            throw Failure(HCCL_E_PARA, "opArgs has no engine: call HcclKfcOpArgsSetCommEngine before");
        *opResCtx = c->connect_windows();
    });
}
