// HCCL's reductions. Every rank gets the same bits, but as on a device it depends on the length, and on an element's
// place, in which order its terms are added.
#include <algorithm>
#include <bit>
#include <numeric>

#include "hccl/launch.h"
#include "op_kernel/cpu/reduce.h"
#include "runtime/core/request.h"
#include "runtime/settings.h"

using namespace alltoallv;
using namespace alltoallv::emulator;

namespace {

constexpr size_t most_by_rank = size_t{32} << 10, most_by_halving = size_t{2} << 20;  ///< bytes of a rank's input

/// Returns the order for inputs of so many bytes. It matters to sums and products that round.
Order order_of(HcclDataType type, HcclReduceOp op, size_t bytes) {
    const bool rounds = type == HCCL_DATA_TYPE_FP16 || type == HCCL_DATA_TYPE_FP32 || type == HCCL_DATA_TYPE_BFP16;
    if (!rounds || (op != HCCL_REDUCE_SUM && op != HCCL_REDUCE_PROD)) return Order::rank;
    const Order order = settings().order;
    if (order != Order::length) return order;
    return bytes <= most_by_rank ? Order::rank : bytes <= most_by_halving ? Order::halving : Order::ring;
}

/// Combines the ranks' parts of `count` elements and returns the result, which lies in one of them. Every step rounds
/// to the type, as memory does that adds what arrives.
class Steps {
  public:
    Steps(std::vector<char>& parts, HcclDataType type, HcclReduceOp op, int size)
        : parts_(parts.data()),
          type_(reduce_type(type)),
          op_(reduce_op(op, type)),
          size_(static_cast<size_t>(size)),
          bytes_(parts.size() / size_),
          count_(bytes_ / size_of(type)) {}

    /// The part goes round: from the rank after its owner, which adds last.
    const char* ring(int owner) {
        const auto at = [&](size_t step) { return (static_cast<size_t>(owner) + step) % size_; };
        for (size_t step = 1; step < size_; ++step) combine(at(step + 1), at(step), at(step + 1));
        return part(static_cast<size_t>(owner));
    }

    /// Ranks beyond a power of two join their neighbours; then pairs half of the ranks apart, a quarter, ...
    const char* halving() {
        size_t half = std::bit_floor(size_);
        const size_t joined = size_ - half;
        const auto at = [&](size_t i) { return i < joined ? 2 * i : i + joined; };
        for (size_t i = 0; i < joined; ++i) combine(at(i), at(i), at(i) + 1);
        while (half /= 2)
            for (size_t i = 0; i < half; ++i) combine(at(i), at(i), at(i + half));
        return part(0);
    }

  private:
    char* part(size_t j) { return parts_ + j * bytes_; }

    void combine(size_t into, size_t first, size_t second) {
        const void* terms[] = {part(first), part(second)};
        kernel::reduce(type_, op_, part(into), terms, 2, count_);
    }

    char* parts_;
    DType type_;
    ReduceOp op_;
    size_t size_, bytes_, count_;
};

/// Reduces by two exchanges: the parts go to their owners; of an all-reduce, their results go to all.
void run_in_steps(Comm& comm, OpKind kind, HcclDataType type, HcclReduceOp op, const void* input, void* output,
                  const std::vector<int64_t>& counts, const OperatorCall& call, Order order) {
    const auto own = static_cast<size_t>(comm.rank());
    const size_t own_bytes = static_cast<size_t>(counts[own]) * size_of(type);
    const auto exchange = [&](Request& request, const void* from, void* to) {
        pack(request.recv_counts(), request.rdispls());
        Exchange made = request.exchange(wire_type(type), from, to);
        made.root = call.terms;
        comm.core().exchange(made, call.timeout);
    };
    std::vector<char> parts(static_cast<size_t>(comm.size()) * own_bytes);
    Request to_owners(OpKind::all_to_all_v, comm.size());
    std::ranges::copy(counts, to_owners.send_counts().begin());
    std::ranges::fill(to_owners.recv_counts(), counts[own]);
    pack(to_owners.send_counts(), to_owners.sdispls());
    exchange(to_owners, input, parts.data());
    Steps steps(parts, type, op, comm.size());
    const char* own_part = order == Order::ring ? steps.ring(comm.rank()) : steps.halving();
    if (kind == OpKind::reduce_scatter) {
        std::copy(own_part, own_part + own_bytes, static_cast<char*>(output));
        return;
    }
    Request to_all(OpKind::all_gather, comm.size());
    std::ranges::fill(to_all.send_counts(), counts[own]);
    std::ranges::copy(counts, to_all.recv_counts().begin());
    exchange(to_all, own_part, output);
}

void run(Comm& comm, OpKind kind, HcclDataType type, HcclReduceOp op, const void* input, void* output,
         const std::vector<int64_t>& counts, const OperatorCall& call) {
    const size_t elements = static_cast<size_t>(std::accumulate(counts.begin(), counts.end(), int64_t{0}));
    const Order order = order_of(type, op, elements * size_of(type));
    if (order != Order::rank && comm.size() > 1)
        return run_in_steps(comm, kind, type, op, input, output, counts, call, order);
    Reduction reduction;
    reduction.op = kind;
    reduction.dtype = reduce_type(type);
    reduction.reduce_op = reduce_op(op, type);
    reduction.input = input;
    reduction.output = output;
    reduction.counts = counts;
    reduction.root = call.terms;
    comm.core().reduce(reduction, call.timeout);
}

/// Makes a reduction of parts of these lengths. Its input is copied where it shares memory with the output.
Launch reduce(OpKind kind, const Region& input, const Region& output, HcclDataType type, HcclReduceOp op,
              uint64_t count, HcclComm comm, aclrtStream stream, const std::vector<int64_t>& lengths) {
    const Agreed agreed{.type = static_cast<uint32_t>(type), .op = static_cast<uint32_t>(op), .count = count};
    Launch l{comm, stream, agreed, {input}, {output}};
    l.run = [=](Comm& c, const OperatorCall& call) {
        const Copied copied(input, output);
        run(c, kind, type, op, copied.data(), output.data(), lengths, call);
    };
    return l;
}

void check_arguments(HcclDataType type, HcclReduceOp op, uint64_t count) {
    (void)reduce_type(type);
    (void)reduce_op(op, type);
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
        l.run = [=, lengths = even_parts(static_cast<int64_t>(count), c->size())](Comm& comm_,
                                                                                  const OperatorCall& call) {
            std::vector<char> result(input.bytes);  // every rank computes it, only the root stores it
            run(comm_, OpKind::all_reduce, dataType, op, input.data(), result.data(), lengths, call);
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
        l.run = [=](Comm& comm_, const OperatorCall& call) {
            std::vector<char> packed;
            for (size_t j = 0; j < size; ++j) {
                const char* part = input.data() + static_cast<size_t>(displs[j]) * element;
                packed.insert(packed.end(), part, part + static_cast<size_t>(counts[j]) * element);
            }
            run(comm_, OpKind::reduce_scatter, dataType, op, packed.data(), output.data(), counts, call);
        };
        return l;
    });
}
