// HCCL's reductions, in the order of the ranks, so that every rank gets the same bits.
#include <algorithm>

#include "hccl/launch.h"

using namespace alltoallv;
using namespace alltoallv::emulator;

namespace {

void run(Comm& comm, OpKind kind, HcclDataType type, HcclReduceOp op, const void* input, void* output,
         const std::vector<int64_t>& counts, const Turn& turn) {
    Reduction reduction;
    reduction.op = kind;
    reduction.dtype = reduce_type(type);
    reduction.reduce_op = reduce_op(op);
    reduction.input = input;
    reduction.output = output;
    reduction.counts = counts;
    reduction.root = turn.terms;
    comm.core().reduce(reduction, turn.timeout);
}

/// Cuts a vector into a part per rank.
std::vector<int64_t> parts(uint64_t count, int size) {
    std::vector<int64_t> result(static_cast<size_t>(size), static_cast<int64_t>(count) / size);
    for (size_t j = 0; j < count % result.size(); ++j) ++result[j];
    return result;
}

Launch reduce_launch(const char* function, HcclComm comm, aclrtStream stream, HcclDataType type, HcclReduceOp op,
                     uint64_t count) {
    (void)reduce_type(type);
    (void)reduce_op(op);
    check_count("count", count);
    Launch l{function, comm, stream, type};
    l.op = op;
    l.count = count;
    return l;
}

/// Checks that both are the same buffer, or do not overlap.
void check_equal_or_apart(const Region& input, const Region& output) {
    if (input.address != output.address) check_apart(input, output);
}

}  // namespace

HcclResult HcclAllReduce(void* sendBuf, void* recvBuf, uint64_t count, HcclDataType dataType, HcclReduceOp op,
                         HcclComm comm, aclrtStream stream) {
    return launch(__func__, [&] {
        Launch l = reduce_launch("HcclAllReduce", comm, stream, dataType, op, count);
        const Region input{"sendBuf", sendBuf, count * size_of(dataType)};
        const Region output{"recvBuf", recvBuf, input.bytes};
        check_equal_or_apart(input, output);
        l.inputs = {input};
        l.outputs = {output};
        l.run = [=](Comm& c, const Turn& turn) {
            const Copied copied(input, output);
            run(c, OpKind::all_reduce, dataType, op, copied.data(), output.data(), parts(count, c.size()), turn);
        };
        return l;
    });
}

HcclResult HcclReduce(void* sendBuf, void* recvBuf, uint64_t count, HcclDataType dataType, HcclReduceOp op,
                      uint32_t root, HcclComm comm, aclrtStream stream) {
    return launch(__func__, [&] {
        Launch l = reduce_launch("HcclReduce", comm, stream, dataType, op, count);
        const bool is_root = static_cast<uint32_t>(comm_of(comm)->rank()) == root;
        const Region input{"sendBuf", sendBuf, count * size_of(dataType)};
        const Region output{"recvBuf", recvBuf, is_root ? input.bytes : 0};
        if (is_root) check_equal_or_apart(input, output);
        l.root = root;
        l.inputs = {input};
        l.outputs = {output};
        l.run = [=](Comm& c, const Turn& turn) {  // every rank computes it, only the root stores it
            std::vector<char> result(input.bytes);
            run(c, OpKind::all_reduce, dataType, op, input.data(), result.data(), parts(count, c.size()), turn);
            if (is_root) std::copy(result.begin(), result.end(), output.data());
        };
        return l;
    });
}

HcclResult HcclReduceScatter(void* sendBuf, void* recvBuf, uint64_t recvCount, HcclDataType dataType, HcclReduceOp op,
                             HcclComm comm, aclrtStream stream) {
    return launch(__func__, [&] {
        Launch l = reduce_launch("HcclReduceScatter", comm, stream, dataType, op, recvCount);
        const CommPtr c = comm_of(comm);
        const uint64_t bytes = recvCount * size_of(dataType);
        const Region input{"sendBuf", sendBuf, bytes * static_cast<uint64_t>(c->size())};
        const Region output{"recvBuf", recvBuf, bytes};
        const bool in_place = output.data() == input.data() + bytes * static_cast<uint64_t>(c->rank());
        if (!in_place) check_apart(input, output);
        l.inputs = {input};
        l.outputs = {output};
        l.run = [=](Comm& comm_, const Turn& turn) {
            const std::vector<int64_t> counts(static_cast<size_t>(comm_.size()), static_cast<int64_t>(recvCount));
            const Copied copied(input, output);
            run(comm_, OpKind::reduce_scatter, dataType, op, copied.data(), output.data(), counts, turn);
        };
        return l;
    });
}

HcclResult HcclReduceScatterV(void* sendBuf, const void* sendCounts, const void* sendDispls, void* recvBuf,
                              uint64_t recvCount, HcclDataType dataType, HcclReduceOp op, HcclComm comm,
                              aclrtStream stream) {
    return launch(__func__, [&] {
        Launch l = reduce_launch("HcclReduceScatterV", comm, stream, dataType, op, 0);
        const CommPtr c = comm_of(comm);
        const auto size = static_cast<size_t>(c->size()), rank = static_cast<size_t>(c->rank());
        const size_t element = size_of(dataType);
        check_given("sendCounts", sendCounts);
        check_given("sendDispls", sendDispls);
        const std::vector<uint64_t> counts(static_cast<const uint64_t*>(sendCounts),
                                           static_cast<const uint64_t*>(sendCounts) + size);
        const std::vector<uint64_t> displs(static_cast<const uint64_t*>(sendDispls),
                                           static_cast<const uint64_t*>(sendDispls) + size);
        uint64_t end = 0;
        for (size_t j = 0; j < size; ++j) {
            check_count("sendCounts", counts[j]);
            check_count("sendDispls", displs[j]);
            if (counts[j] > 0) end = std::max(end, displs[j] + counts[j]);
        }
        if (counts[rank] != recvCount)
            throw Failure(HCCL_E_PARA, "recvCount is " + std::to_string(recvCount) + ", but sendCounts[" +
                                           std::to_string(rank) + "], for this rank, is " +
                                           std::to_string(counts[rank]));
        const Region input{"sendBuf", sendBuf, end * element};
        const Region output{"recvBuf", recvBuf, recvCount * element};
        check_apart(input, output);
        l.inputs = {input};
        l.outputs = {output};
        l.run = [=](Comm& comm_, const Turn& turn) {
            std::vector<char> packed;
            for (size_t j = 0; j < size; ++j) {
                const char* part = input.data() + displs[j] * element;
                packed.insert(packed.end(), part, part + counts[j] * element);
            }
            const std::vector<int64_t> lengths(counts.begin(), counts.end());
            run(comm_, OpKind::reduce_scatter, dataType, op, packed.data(), output.data(), lengths, turn);
        };
        return l;
    });
}
