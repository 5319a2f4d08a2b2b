// HCCL's collectives that move data: each is an exchange with particular counts.
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>

#include "hccl/launch.h"
#include "runtime/core/request.h"
#include "runtime/settings.h"

using namespace alltoallv;
using namespace alltoallv::emulator;

namespace {

/// An exchange of all ranks without elements yet.
Request nothing(HcclComm comm) {
    return {OpKind::all_to_all_v, comm_of(comm)->size()};
}

/// Makes the regions follow each other.
Request packed(Request request) {
    pack(request.send_counts(), request.sdispls());
    pack(request.recv_counts(), request.rdispls());
    return request;
}

/// HCCL does not specify when it reads the counts, so they must not change until the call has run.
void check_unchanged(const char* name, const void* array, std::span<const int64_t> before) {
    if (std::memcmp(array, before.data(), before.size_bytes()) != 0)
        throw Failure(HCCL_E_PARA, name, " was changed or freed before the call had run");
}

/// Makes an exchange. Its input is copied where it shares memory with the output.
Launch exchange(const Region& input, const Region& output, HcclDataType type, HcclComm comm, aclrtStream stream,
                const Request& request) {
    Launch l{comm, stream, {.type = static_cast<uint32_t>(type)}, {input}, {output}};
    l.run = [=](Comm& c, const OperatorCall& call) {
        const Copied copied(input, output);
        Exchange exchange = request.exchange(wire_type(type), copied.data(), output.data());
        exchange.root = call.terms;
        c.core().exchange(exchange, call.timeout);
    };
    return l;
}

Launch all_to_all(const void* sendBuf, HcclDataType type, const void* recvBuf, HcclComm comm, aclrtStream stream,
                  Request request) {
    const size_t element = size_of(type);
    const Region input{"sendBuf", sendBuf, span_of(request.send_counts(), request.sdispls()) * element};
    const Region output{"recvBuf", recvBuf, span_of(request.recv_counts(), request.rdispls()) * element};
    check_apart(input, output);
    return exchange(input, output, type, comm, stream, request);
}

/// Makes a gather: every rank sends the same elements to all.
Launch gather(const void* sendBuf, uint64_t sendCount, const void* recvBuf, HcclDataType type, HcclComm comm,
              aclrtStream stream, Request request) {
    const size_t element = size_of(type);
    check_count("sendCount", sendCount);
    std::ranges::fill(request.send_counts(), static_cast<int64_t>(sendCount));
    const Region input{"sendBuf", sendBuf, sendCount * element};
    const Region output{"recvBuf", recvBuf, span_of(request.recv_counts(), request.rdispls()) * element};
    const auto own = static_cast<size_t>(comm_of(comm)->rank());
    const bool in_place = input.data() == output.data() + static_cast<size_t>(request.rdispls()[own]) * element;
    if (!in_place) check_apart(input, output);  // a rank's part may already be in its place in recvBuf
    return exchange(input, output, type, comm, stream, request);
}

}  // namespace

HcclResult HcclAlltoAll(const void* sendBuf, uint64_t sendCount, HcclDataType sendType, const void* recvBuf,
                        uint64_t recvCount, HcclDataType recvType, HcclComm comm, aclrtStream stream) {
    return launch(__func__, [&] {
        if (sendCount != recvCount || sendType != recvType)
            throw Failure(HCCL_E_PARA, "sendCount and recvCount, sendType and recvType must be equal");
        check_count("sendCount", sendCount);
        Request request = nothing(comm);
        std::ranges::fill(request.send_counts(), static_cast<int64_t>(sendCount));
        std::ranges::fill(request.recv_counts(), static_cast<int64_t>(sendCount));
        Launch l = all_to_all(sendBuf, sendType, recvBuf, comm, stream, packed(std::move(request)));
        l.agreed.count = sendCount;
        return l;
    });
}

/// Like HCCL, does not compare the types, and ignores the displacements between a rank and itself.
HcclResult HcclAlltoAllV(const void* sendBuf, const void* sendCounts, const void* sdispls, HcclDataType sendType,
                         const void* recvBuf, const void* recvCounts, const void* rdispls, HcclDataType recvType,
                         HcclComm comm, aclrtStream stream) {
    return launch(__func__, [&] {
        Request request = nothing(comm);
        read_entries("sendCounts", sendCounts, request.send_counts());
        read_entries("sdispls", sdispls, request.sdispls());
        read_entries("recvCounts", recvCounts, request.recv_counts());
        read_entries("rdispls", rdispls, request.rdispls());
        (void)size_of(sendType);
        if (request.size() == 1) {
            request.sdispls()[0] = request.rdispls()[0] = 0;
            request.recv_counts()[0] = request.send_counts()[0];
        }
        Launch l = all_to_all(sendBuf, recvType, recvBuf, comm, stream, request);
        if (!settings().late_counts || request.size() == 1) return l;
        l.run = [=, run = l.run](Comm& c, const OperatorCall& call) mutable {
            check_unchanged("sendCounts", sendCounts, request.send_counts());
            check_unchanged("sdispls", sdispls, request.sdispls());
            check_unchanged("recvCounts", recvCounts, request.recv_counts());
            check_unchanged("rdispls", rdispls, request.rdispls());
            run(c, call);
        };
        return l;
    });
}

HcclResult AlltoallvEmulatorExchange(const void* input, const uint64_t* sends, const void* output,
                                     const uint64_t* recvs, HcclComm comm) {
    return launch("HcclAlltoAllV", [&] {
        Request request = nothing(comm);
        read_entries("sends", sends, request.send_counts());
        read_entries("recvs", recvs, request.recv_counts());
        Launch l = all_to_all(input, HCCL_DATA_TYPE_UINT8, output, comm, nullptr, packed(std::move(request)));
        l.at_once = true;
        return l;
    });
}

HcclResult HcclAlltoAllVC(const void* sendBuf, const void* sendCountMatrix, HcclDataType sendType, const void* recvBuf,
                          HcclDataType recvType, HcclComm comm, aclrtStream stream) {
    return launch(__func__, [&] {
        if (sendType != recvType) throw Failure(HCCL_E_PARA, "sendType and recvType must be equal");
        const CommPtr c = comm_of(comm);
        const auto size = static_cast<size_t>(c->size()), rank = static_cast<size_t>(c->rank());
        std::vector<int64_t> matrix(size * size);
        read_entries("sendCountMatrix", sendCountMatrix, matrix);
        Request request = nothing(comm);
        for (size_t j = 0; j < size; ++j) {
            request.send_counts()[j] = matrix[rank * size + j];
            request.recv_counts()[j] = matrix[j * size + rank];
        }
        return all_to_all(sendBuf, sendType, recvBuf, comm, stream, packed(std::move(request)));
    });
}

HcclResult HcclAllGather(void* sendBuf, void* recvBuf, uint64_t sendCount, HcclDataType dataType, HcclComm comm,
                         aclrtStream stream) {
    return launch(__func__, [&] {
        check_count("sendCount", sendCount);
        Request request = nothing(comm);
        std::ranges::fill(request.recv_counts(), static_cast<int64_t>(sendCount));
        Launch l = gather(sendBuf, sendCount, recvBuf, dataType, comm, stream, packed(std::move(request)));
        l.agreed.count = sendCount;
        return l;
    });
}

HcclResult HcclAllGatherV(void* sendBuf, uint64_t sendCount, void* recvBuf, const void* recvCounts,
                          const void* recvDispls, HcclDataType dataType, HcclComm comm, aclrtStream stream) {
    return launch(__func__, [&] {
        const CommPtr c = comm_of(comm);
        Request request = nothing(comm);
        read_entries("recvCounts", recvCounts, request.recv_counts());
        read_entries("recvDispls", recvDispls, request.rdispls());
        if (const auto own = request.recv_counts()[static_cast<size_t>(c->rank())];
            static_cast<uint64_t>(own) != sendCount)
            throw Failure(HCCL_E_PARA, "sendCount is ", sendCount, ", but recvCounts[", c->rank(),
                          "], for this rank, is ", own);
        return gather(sendBuf, sendCount, recvBuf, dataType, comm, stream, std::move(request));
    });
}

HcclResult HcclBroadcast(void* buf, uint64_t count, HcclDataType dataType, uint32_t root, HcclComm comm,
                         aclrtStream stream) {
    return launch(__func__, [&] {
        const CommPtr c = comm_of(comm);
        const bool is_root = static_cast<uint32_t>(c->rank()) == root;
        check_count("count", count);
        check_root(root, *c);
        const uint64_t bytes = count * size_of(dataType);
        const Region input{"buf", buf, is_root ? bytes : 0}, output{"buf", buf, is_root ? 0 : bytes};
        Request request = nothing(comm);
        if (is_root) std::ranges::fill(request.send_counts(), static_cast<int64_t>(count));
        (is_root ? request.send_counts() : request.recv_counts())[root] = is_root ? 0 : static_cast<int64_t>(count);
        Launch l = exchange(input, output, dataType, comm, stream, request);
        l.agreed.count = count;
        l.agreed.root = root;
        return l;
    });
}

HcclResult HcclScatter(void* sendBuf, void* recvBuf, uint64_t recvCount, HcclDataType dataType, uint32_t root,
                       HcclComm comm, aclrtStream stream) {
    return launch(__func__, [&] {
        const CommPtr c = comm_of(comm);
        const bool is_root = static_cast<uint32_t>(c->rank()) == root;
        check_count("recvCount", recvCount);
        check_root(root, *c);
        const uint64_t bytes = recvCount * size_of(dataType);
        const Region input{"sendBuf", sendBuf, is_root ? bytes * static_cast<uint64_t>(c->size()) : 0};
        const Region output{"recvBuf", recvBuf, bytes};
        const bool in_place = is_root && input.data() + root * bytes == output.data();
        if (is_root && !in_place) check_apart(input, output);
        Request request = nothing(comm);
        if (is_root) std::ranges::fill(request.send_counts(), static_cast<int64_t>(recvCount));
        request = packed(std::move(request));
        request.recv_counts()[root] = static_cast<int64_t>(recvCount);
        Launch l = exchange(input, output, dataType, comm, stream, request);
        l.agreed.count = recvCount;
        l.agreed.root = root;
        return l;
    });
}

HcclResult HcclBarrier(HcclComm comm, aclrtStream stream) {
    return launch(__func__, [&] { return exchange({}, {}, HCCL_DATA_TYPE_UINT8, comm, stream, nothing(comm)); });
}
