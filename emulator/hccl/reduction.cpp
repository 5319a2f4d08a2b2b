// HCCL's reductions, in the order of the ranks, so that every rank gets the same bits.
#include <algorithm>

#include "hccl/launch.h"
#include "runtime/core/request.h"

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

/// Makes a reduction of parts of these lengths. Its input is copied where it shares memory with the output.
Launch reduce(OpKind kind, const Region& input, const Region& output, HcclDataType type, HcclReduceOp op,
              uint64_t count, HcclComm comm, aclrtStream stream, const std::vector<int64_t>& lengths) {
    const Agreed agreed{.type = static_cast<uint32_t>(type), .op = static_cast<uint32_t>(op), .count = count};
    Launch l{comm, stream, agreed, {input}, {output}};
    l.run = [=](Comm& c, const Turn& turn) {
        const Copied copied(input, output);
        run(c, kind, type, op, copied.data(), output.data(), lengths, turn);
    };
    return l;
}

void check_arguments(HcclDataType type, HcclReduceOp op, uint64_t count) {
    (void)reduce_type(type);
    (void)reduce_op(op);
    check_count("count", count);
}

/// Checks that both are the same buffer, or do not overlap.
void check_equal_or_apart(const Region& input, const Region& output) {
    if (input.address != output.address) check_apart(input, output);
}

}  // namespace

HcclResult HcclAllReduce(void* sendBuf, void* recvBuf, uint64_t count, HcclDataType dataType, HcclReduceOp op,
                         HcclComm comm, aclrtStream stream) {
    return launch(__func__, [&] {
        check_arguments(dataType, op, count);
        const Region input{"sendBuf", sendBuf, count * size_of(dataType)};
        const Region output{"recvBuf", recvBuf, input.bytes};
        check_equal_or_apart(input, output);
        return reduce(OpKind::all_reduce, input, output, dataType, op, count, comm, stream,
                      even_parts(static_cast<int64_t>(count), comm_of(comm)->size()));
    });
}

HcclResult HcclReduce(void* sendBuf, void* recvBuf, uint64_t count, HcclDataType dataType, HcclReduceOp op,
                      uint32_t root, HcclComm comm, aclrtStream stream) {
    return launch(__func__, [&] {
        check_arguments(dataType, op, count);
        const CommPtr c = comm_of(comm);
        check_root(root, *c);
        const bool is_root = static_cast<uint32_t>(c->rank()) == root;
        const Region input{"sendBuf", sendBuf, count * size_of(dataType)};
        const Region output{"recvBuf", recvBuf, is_root ? input.bytes : 0};
        if (is_root) check_equal_or_apart(input, output);
        Launch l = reduce(OpKind::all_reduce, input, output, dataType, op, count, comm, stream, {});
        l.agreed.root = root;
        l.run = [=, lengths = even_parts(static_cast<int64_t>(count), c->size())](Comm& comm_, const Turn& turn) {
            std::vector<char> result(input.bytes);  // every rank computes it, only the root stores it
            run(comm_, OpKind::all_reduce, dataType, op, input.data(), result.data(), lengths, turn);
            if (is_root) std::copy(result.begin(), result.end(), output.data());
        };
        return l;
    });
}

HcclResult HcclReduceScatter(void* sendBuf, void* recvBuf, uint64_t recvCount, HcclDataType dataType, HcclReduceOp op,
                             HcclComm comm, aclrtStream stream) {
    return launch(__func__, [&] {
        check_arguments(dataType, op, recvCount);
        const CommPtr c = comm_of(comm);
        const uint64_t bytes = recvCount * size_of(dataType);
        const Region input{"sendBuf", sendBuf, bytes * static_cast<uint64_t>(c->size())};
        const Region output{"recvBuf", recvBuf, bytes};
        const bool in_place = output.data() == input.data() + bytes * static_cast<uint64_t>(c->rank());
        if (!in_place) check_apart(input, output);
        const std::vector<int64_t> lengths(static_cast<size_t>(c->size()), static_cast<int64_t>(recvCount));
        return reduce(OpKind::reduce_scatter, input, output, dataType, op, recvCount, comm, stream, lengths);
    });
}

HcclResult HcclReduceScatterV(void* sendBuf, const void* sendCounts, const void* sendDispls, void* recvBuf,
                              uint64_t recvCount, HcclDataType dataType, HcclReduceOp op, HcclComm comm,
                              aclrtStream stream) {
    return launch(__func__, [&] {
        check_arguments(dataType, op, 0);
        const CommPtr c = comm_of(comm);
        const auto size = static_cast<size_t>(c->size()), rank = static_cast<size_t>(c->rank());
        const size_t element = size_of(dataType);
        std::vector<int64_t> counts(size), displs(size);
        read_entries("sendCounts", sendCounts, counts);
        read_entries("sendDispls", sendDispls, displs);
        if (static_cast<uint64_t>(counts[rank]) != recvCount)
            throw Failure(HCCL_E_PARA, "recvCount is ", recvCount, ", but sendCounts[", rank, "], for this rank, is ",
                          counts[rank]);
        const Region input{"sendBuf", sendBuf, span_of(counts, displs) * element};
        const Region output{"recvBuf", recvBuf, recvCount * element};
        check_apart(input, output);
        Launch l = reduce(OpKind::reduce_scatter, input, output, dataType, op, 0, comm, stream, counts);
        l.run = [=](Comm& comm_, const Turn& turn) {
            std::vector<char> packed;
            for (size_t j = 0; j < size; ++j) {
                const char* part = input.data() + static_cast<size_t>(displs[j]) * element;
                packed.insert(packed.end(), part, part + static_cast<size_t>(counts[j]) * element);
            }
            run(comm_, OpKind::reduce_scatter, dataType, op, packed.data(), output.data(), counts, turn);
        };
        return l;
    });
}
