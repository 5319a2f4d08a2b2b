// Sends and receives: every ordered pair of ranks has a one-way channel, a communicator of two ranks, which matches
// messages in the order in which they are queued. A batch uses its channels at the same time.
#include <map>
#include <utility>

#include "hccl/launch.h"
#include "runtime/core/request.h"

using namespace alltoallv;
using namespace alltoallv::emulator;

namespace {

/// Transfers one message through its channel; both ends must have given the same count and type.
void transfer(Comm& comm, const HcclMessage& m, double timeout) {
    const int from = m.sends ? comm.rank() : m.peer, to = m.sends ? m.peer : comm.rank();
    Communicator& channel = comm.channel(from, to);
    Agreed agreed;
    std::strncpy(agreed.function, "a message", sizeof agreed.function - 1);
    agreed.type = m.type;
    agreed.count = m.count;
    Request request(OpKind::all_to_all_v, 2);
    (m.sends ? request.send_counts()[1] : request.recv_counts()[0]) = static_cast<int64_t>(m.count);
    Exchange exchange =
        request.exchange(wire_type(m.type), m.sends ? m.buffer.data() : nullptr, m.sends ? nullptr : m.buffer.data());
    run_agreed(channel, agreed, timeout, [&](const OperatorCall& call) {
        exchange.root = call.terms;
        channel.exchange(exchange, call.timeout);
    });
}

/// Copies messages from this rank to itself: sends and receives match in their orders.
void copy_to_self(const std::vector<HcclMessage>& sent, const std::vector<HcclMessage>& received) {
    if (sent.size() != received.size())
        throw Failure(HCCL_E_PARA, "the rank sends ", sent.size(), " messages to itself and receives ",
                      received.size());
    for (size_t i = 0; i < sent.size(); ++i) {
        if (sent[i].count != received[i].count || sent[i].type != received[i].type)
            throw Failure(HCCL_E_PARA, "a message of the rank to itself has two counts or types");
        if (sent[i].buffer.bytes > 0)
            std::memmove(received[i].buffer.data(), sent[i].buffer.data(), sent[i].buffer.bytes);
    }
}

Launch batch(std::vector<HcclMessage> messages, HcclComm comm, aclrtStream stream) {
    const CommPtr c = comm_of(comm);
    Launch l{comm, stream};
    for (const HcclMessage& m : messages) {
        if (m.peer < 0 || m.peer >= c->size())
            throw Failure(HCCL_E_PARA, "the peer is ", m.peer, ", expected less than ", c->size());
        check_count("count", m.count);
        (m.sends ? l.inputs : l.outputs).push_back(m.buffer);
    }
    l.messages = std::move(messages);
    return l;
}

HcclMessage message(bool sends, const char* name, void* buffer, uint64_t count, HcclDataType type, uint32_t peer) {
    return {sends, {name, buffer, count * size_of(type)}, count, type, static_cast<int>(peer)};
}

}  // namespace

void alltoallv::emulator::run_messages(Comm& comm, const std::vector<HcclMessage>& messages, double timeout) {
    std::map<std::pair<bool, int>, std::vector<HcclMessage>> by_channel;
    for (const HcclMessage& m : messages) by_channel[{m.sends, m.peer}].push_back(m);
    copy_to_self(by_channel[{true, comm.rank()}], by_channel[{false, comm.rank()}]);
    std::vector<std::vector<HcclMessage>> queues;
    for (auto& [channel, queue] : by_channel)
        if (channel.second != comm.rank()) queues.push_back(std::move(queue));
    in_threads(queues.size(), [&](size_t i) {
        for (const HcclMessage& m : queues[i]) transfer(comm, m, timeout);
    });
}

HcclResult HcclSend(void* sendBuf, uint64_t count, HcclDataType dataType, uint32_t destRank, HcclComm comm,
                    aclrtStream stream) {
    return launch(__func__,
                  [&] { return batch({message(true, "sendBuf", sendBuf, count, dataType, destRank)}, comm, stream); });
}

HcclResult HcclRecv(void* recvBuf, uint64_t count, HcclDataType dataType, uint32_t srcRank, HcclComm comm,
                    aclrtStream stream) {
    return launch(__func__,
                  [&] { return batch({message(false, "recvBuf", recvBuf, count, dataType, srcRank)}, comm, stream); });
}

HcclResult HcclBatchSendRecv(HcclSendRecvItem* sendRecvInfo, uint32_t itemNum, HcclComm comm, aclrtStream stream) {
    return launch(__func__, [&] {
        check_given("sendRecvInfo", sendRecvInfo);
        if (itemNum == 0) throw Failure(HCCL_E_PARA, "itemNum is 0");
        std::vector<HcclMessage> messages;
        for (uint32_t i = 0; i < itemNum; ++i) {
            const HcclSendRecvItem& item = sendRecvInfo[i];
            if (item.sendRecvType != HCCL_SEND && item.sendRecvType != HCCL_RECV)
                throw Failure(HCCL_E_PARA, "sendRecvType is ", item.sendRecvType);
            messages.push_back(
                message(item.sendRecvType == HCCL_SEND, "buf", item.buf, item.count, item.dataType, item.remoteRank));
        }
        return batch(std::move(messages), comm, stream);
    });
}
