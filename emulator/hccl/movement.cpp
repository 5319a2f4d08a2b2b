// HCCL's collectives that move data: each is an exchange with particular counts.
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>

#include "hccl/launch.h"
#include "runtime/settings.h"

using namespace alltoallv;
using namespace alltoallv::emulator;

namespace {

/// The four arrays of an exchange, copied because they must outlive the call.
struct Arrays {
    std::vector<int64_t> send_counts, sdispls, recv_counts, rdispls;

    explicit Arrays(int size)
        : send_counts(static_cast<size_t>(size)),
          sdispls(send_counts),
          recv_counts(send_counts),
          rdispls(send_counts) {}

    void pack() {
        for (size_t j = 1; j < send_counts.size(); ++j) {
            sdispls[j] = sdispls[j - 1] + send_counts[j - 1];
            rdispls[j] = rdispls[j - 1] + recv_counts[j - 1];
        }
    }
};

/// HCCL does not specify when it reads the counts, so they must not change until the call has run.
void check_unchanged(const char* name, const void* array, const std::vector<int64_t>& before) {
    if (std::memcmp(array, before.data(), before.size() * sizeof(int64_t)) != 0)
        throw Failure(HCCL_E_PARA, std::string(name) + " was changed or freed before the call had run");
}

/// Makes an exchange by these arrays. Its input is copied where it shares memory with the output.
Launch exchange(const Region& input, const Region& output, HcclDataType type, HcclComm comm, aclrtStream stream,
                Arrays arrays) {
    Launch l{comm, stream, {.type = static_cast<uint32_t>(type)}, {input}, {output}};
    l.run = [=](Comm& c, const Turn& turn) {
        const Copied copied(input, output);
        Exchange exchange;
        exchange.dtype = wire_type(type);
        exchange.input = copied.data();
        exchange.output = output.data();
        exchange.send_counts = arrays.send_counts;
        exchange.sdispls = arrays.sdispls;
        exchange.recv_counts = arrays.recv_counts;
        exchange.rdispls = arrays.rdispls;
        exchange.root = turn.terms;
        c.core().exchange(exchange, turn.timeout);
    };
    return l;
}

/// Makes an all-to-all from its arrays.
Launch all_to_all(const void* sendBuf, HcclDataType type, const void* recvBuf, HcclComm comm, aclrtStream stream,
                  Arrays arrays) {
    const size_t element = size_of(type);
    const Region input{"sendBuf", sendBuf, span_of(arrays.send_counts, arrays.sdispls) * element};
    const Region output{"recvBuf", recvBuf, span_of(arrays.recv_counts, arrays.rdispls) * element};
    check_apart(input, output);
    return exchange(input, output, type, comm, stream, std::move(arrays));
}

}  // namespace

HcclResult HcclAlltoAll(const void* sendBuf, uint64_t sendCount, HcclDataType sendType, const void* recvBuf,
                        uint64_t recvCount, HcclDataType recvType, HcclComm comm, aclrtStream stream) {
    return launch(__func__, [&] {
        if (sendCount != recvCount || sendType != recvType)
            throw Failure(HCCL_E_PARA, "sendCount and recvCount, sendType and recvType must be equal");
        check_count("sendCount", sendCount);
        Arrays arrays(comm_of(comm)->size());
        for (int64_t& count : arrays.send_counts) count = static_cast<int64_t>(sendCount);
        arrays.recv_counts = arrays.send_counts;
        arrays.pack();
        Launch l = all_to_all(sendBuf, sendType, recvBuf, comm, stream, std::move(arrays));
        l.agreed.count = sendCount;
        return l;
    });
}

/// Like HCCL, does not compare the types, and ignores the displacements between a rank and itself.
HcclResult HcclAlltoAllV(const void* sendBuf, const void* sendCounts, const void* sdispls, HcclDataType sendType,
                         const void* recvBuf, const void* recvCounts, const void* rdispls, HcclDataType recvType,
                         HcclComm comm, aclrtStream stream) {
    return launch(__func__, [&] {
        const auto size = static_cast<size_t>(comm_of(comm)->size());
        Arrays arrays(static_cast<int>(size));
        arrays.send_counts = entries("sendCounts", sendCounts, size);
        arrays.sdispls = entries("sdispls", sdispls, size);
        arrays.recv_counts = entries("recvCounts", recvCounts, size);
        arrays.rdispls = entries("rdispls", rdispls, size);
        (void)size_of(sendType);
        if (size == 1) {
            arrays.sdispls[0] = arrays.rdispls[0] = 0;
            arrays.recv_counts = arrays.send_counts;
        }
        Launch l = all_to_all(sendBuf, recvType, recvBuf, comm, stream, arrays);
        if (!settings().late_counts || size == 1) return l;
        l.run = [=, run = l.run](Comm& c, const Turn& turn) {
            check_unchanged("sendCounts", sendCounts, arrays.send_counts);
            check_unchanged("sdispls", sdispls, arrays.sdispls);
            check_unchanged("recvCounts", recvCounts, arrays.recv_counts);
            check_unchanged("rdispls", rdispls, arrays.rdispls);
            run(c, turn);
        };
        return l;
    });
}

HcclResult AlltoallvEmulatorExchange(const void* input, const uint64_t* sends, const void* output,
                                     const uint64_t* recvs, HcclComm comm) {
    return launch("HcclAlltoAllV", [&] {
        const auto size = static_cast<size_t>(comm_of(comm)->size());
        Arrays arrays(static_cast<int>(size));
        arrays.send_counts = entries("sends", sends, size);
        arrays.recv_counts = entries("recvs", recvs, size);
        arrays.pack();
        Launch l = all_to_all(input, HCCL_DATA_TYPE_UINT8, output, comm, nullptr, arrays);
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
        const std::vector<int64_t> matrix = entries("sendCountMatrix", sendCountMatrix, size * size);
        Arrays arrays(c->size());
        for (size_t j = 0; j < size; ++j) {
            arrays.send_counts[j] = matrix[rank * size + j];
            arrays.recv_counts[j] = matrix[j * size + rank];
        }
        arrays.pack();
        return all_to_all(sendBuf, sendType, recvBuf, comm, stream, std::move(arrays));
    });
}

namespace {

/// Makes a gather: every rank sends the same elements to all.
Launch gather(const void* sendBuf, uint64_t sendCount, const void* recvBuf, HcclDataType type, HcclComm comm,
              aclrtStream stream, Arrays arrays) {
    const size_t element = size_of(type);
    check_count("sendCount", sendCount);
    for (int64_t& count : arrays.send_counts) count = static_cast<int64_t>(sendCount);
    const Region input{"sendBuf", sendBuf, sendCount * element};
    const Region output{"recvBuf", recvBuf, span_of(arrays.recv_counts, arrays.rdispls) * element};
    const auto own = static_cast<size_t>(comm_of(comm)->rank());
    const bool in_place = input.data() == output.data() + static_cast<size_t>(arrays.rdispls[own]) * element;
    if (!in_place) check_apart(input, output);  // a rank's part may already be in its place in recvBuf
    return exchange(input, output, type, comm, stream, std::move(arrays));
}

}  // namespace

HcclResult HcclAllGather(void* sendBuf, void* recvBuf, uint64_t sendCount, HcclDataType dataType, HcclComm comm,
                         aclrtStream stream) {
    return launch(__func__, [&] {
        check_count("sendCount", sendCount);
        Arrays arrays(comm_of(comm)->size());
        for (size_t j = 0; j < arrays.recv_counts.size(); ++j) {
            arrays.recv_counts[j] = static_cast<int64_t>(sendCount);
            arrays.rdispls[j] = static_cast<int64_t>(j * sendCount);
        }
        Launch l = gather(sendBuf, sendCount, recvBuf, dataType, comm, stream, std::move(arrays));
        l.agreed.count = sendCount;
        return l;
    });
}

HcclResult HcclAllGatherV(void* sendBuf, uint64_t sendCount, void* recvBuf, const void* recvCounts,
                          const void* recvDispls, HcclDataType dataType, HcclComm comm, aclrtStream stream) {
    return launch(__func__, [&] {
        const CommPtr c = comm_of(comm);
        Arrays arrays(c->size());
        arrays.recv_counts = entries("recvCounts", recvCounts, arrays.recv_counts.size());
        arrays.rdispls = entries("recvDispls", recvDispls, arrays.rdispls.size());
        if (const auto own = arrays.recv_counts[static_cast<size_t>(c->rank())];
            static_cast<uint64_t>(own) != sendCount)
            throw Failure(HCCL_E_PARA, "sendCount is " + std::to_string(sendCount) + ", but recvCounts[" +
                                           std::to_string(c->rank()) + "], for this rank, is " + std::to_string(own));
        return gather(sendBuf, sendCount, recvBuf, dataType, comm, stream, std::move(arrays));
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
        Arrays arrays(c->size());
        const auto elements = static_cast<int64_t>(count);
        if (is_root)
            for (size_t j = 0; j < arrays.send_counts.size(); ++j) arrays.send_counts[j] = j == root ? 0 : elements;
        else
            arrays.recv_counts[root] = elements;
        Launch l = exchange(input, output, dataType, comm, stream, std::move(arrays));
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
        Arrays arrays(c->size());
        if (is_root) arrays.send_counts.assign(arrays.send_counts.size(), static_cast<int64_t>(recvCount));
        arrays.pack();
        arrays.recv_counts[root] = static_cast<int64_t>(recvCount);
        Launch l = exchange(input, output, dataType, comm, stream, std::move(arrays));
        l.agreed.count = recvCount;
        l.agreed.root = root;
        return l;
    });
}

HcclResult HcclBarrier(HcclComm comm, aclrtStream stream) {
    return launch(__func__,
                  [&] { return exchange({}, {}, HCCL_DATA_TYPE_UINT8, comm, stream, Arrays(comm_of(comm)->size())); });
}
