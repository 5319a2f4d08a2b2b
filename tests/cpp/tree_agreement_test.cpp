// Agreement between hosts at a scale that no test machine has: the leaders' code of 8192 hosts with 65,536 ranks over a
// network in memory, which counts bytes and rounds.
#include "runtime/hosts/tree_agreement.h"

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <memory>
#include <utility>

#include "check.h"
#include "runtime/hosts/tcp_tree.h"

using namespace alltoallv;
using namespace testing;

namespace {

using Stage = TreeAgreement::Stage;

/// What every rank calls, and what some ranks do instead.
struct Job {
    static constexpr std::array<int64_t, 5> strides{1, 7, 64, 4099, 30000};  // to which ranks each rank sends

    int ranks, per_host;
    uint64_t seq = 0;
    std::map<std::pair<int, int>, int64_t> sent{}, expected{};  // counts that differ, by sender and receiver
    std::map<int, DType> dtypes{};
    std::map<int, std::string> failures{};
    std::vector<bool> learners{};

    int receiver(int from, size_t k) const {
        return static_cast<int>((from + strides[k] * static_cast<int64_t>(seq)) % ranks);
    }
    int sender(int to, size_t k) const {
        const int64_t back = strides[k] * static_cast<int64_t>(seq) % ranks;
        return static_cast<int>((to + ranks - back) % ranks);
    }
    bool learns(int rank) const { return !learners.empty() && learners[static_cast<size_t>(rank)]; }
    static int64_t count(int from, int to) { return 1 + (from * 31 + to) % 100; }
    int64_t sends(int from, int to) const {
        const auto found = sent.find({from, to});
        return found != sent.end() ? found->second : count(from, to);
    }
    int64_t expects(int from, int to) const {
        const auto found = expected.find({from, to});
        return found != expected.end() ? found->second : count(from, to);
    }
    RowFacts facts(int rank) const {
        RowFacts facts;
        facts.rank = rank;
        facts.op = OpKind::all_to_all_v;
        const auto found = dtypes.find(rank);
        facts.dtype = found != dtypes.end() ? found->second : DType::float32;
        facts.count = 1;
        if (learns(rank)) facts.flags |= row_learns;
        if (failures.contains(rank)) facts.flags |= row_failed;
        return facts;
    }
};

class Network;

class SimulatedHost final : public TreeAgreement::Host {
  public:
    SimulatedHost(Network& network, const Job& job, int host, std::vector<int> neighbours)
        : network_(network),
          job_(job),
          host_(host),
          neighbours_(std::move(neighbours)),
          agreement_(*this, neighbours_.size(), job.ranks, "sim") {}

    Summary summary(uint64_t) override {
        Summary all;
        each([&](int rank) {
            Digest128 balance;
            for (size_t k = 0; k < Job::strides.size(); ++k) {
                const int to = job_.receiver(rank, k), from = job_.sender(rank, k);
                balance += pair_hash(rank, to, job_.sends(rank, to));
                if (!job_.learns(rank)) balance -= pair_hash(from, rank, job_.expects(from, rank));
            }
            all.add(summary_of(job_.facts(rank), balance, true));
        });
        return all;
    }
    FailedRow failure(uint64_t, uint64_t called) override {
        FailedRow first;
        each([&](int rank) {
            const auto found = job_.failures.find(rank);
            if (found == job_.failures.end()) return;
            ErrorText text{static_cast<uint8_t>(ErrorClass::invalid_param), 1, {}};
            std::copy(found->second.begin(), found->second.end(), text.text);
            first.add(failure_of(job_.facts(rank), text, called));
        });
        return first;
    }
    std::optional<RowFacts> facts(uint64_t, int rank) override {
        if (rank / job_.per_host != host_) return {};
        return job_.facts(rank);
    }
    void add_learners(uint64_t, TreeAgreement::Ranks& learners) override {
        each([&](int rank) {
            if (job_.learns(rank)) learners[static_cast<size_t>(rank) / 8] |= static_cast<uint8_t>(1 << rank % 8);
        });
    }
    void tell(uint64_t, const TreeAgreement::Ranks&) override {}
    void add_pairs(uint64_t, TreeAgreement::Search& search) override {
        each([&](int rank) {
            for (size_t k = 0; k < Job::strides.size(); ++k) {
                const int to = job_.receiver(rank, k), from = job_.sender(rank, k);
                search.sends(rank, to, job_.sends(rank, to));
                search.expects(from, rank, job_.expects(from, rank));
            }
        });
    }
    void add_pair(uint64_t, int from, int to, TreeAgreement::PairReport& report) override {
        if (from / job_.per_host == host_) {
            report.sent = job_.sends(from, to);
            report.op = OpKind::all_to_all_v;
            report.row = 1;
        }
        if (to / job_.per_host == host_) report.expected = job_.expects(from, to);
    }
    void send(size_t neighbour, const TreeAgreement::Header& header, const std::string& body) override;
    void heard(size_t, uint64_t, const Summary&, bool) override {}
    void decided(uint64_t seq, const std::optional<Verdict>& verdict) override {
        decided_ = seq;
        verdict_ = verdict ? verdict->error.what() : "";
    }

    TreeAgreement& agreement() { return agreement_; }
    size_t index_of(int neighbour) const {
        return static_cast<size_t>(std::ranges::find(neighbours_, neighbour) - neighbours_.begin());
    }
    size_t degree() const { return neighbours_.size(); }

    uint64_t decided_ = 0;
    std::string verdict_;
    size_t sent_ = 0, messages_ = 0;  // in the present operator

  private:
    template <class Do>
    void each(Do&& what) const {
        for (int k = 0; k < job_.per_host; ++k) what(host_ * job_.per_host + k);
    }

    Network& network_;
    const Job& job_;
    const int host_;
    const std::vector<int> neighbours_;
    TreeAgreement agreement_;
};

/// Delivers all messages that were sent in one step in the next one.
class Network {
  public:
    explicit Network(Job& job) : job_(job) {
        std::vector<TcpPeer> peers(static_cast<size_t>(job.ranks));
        for (int rank = 0; rank < job.ranks; ++rank)
            peers[static_cast<size_t>(rank)].first_on_host = rank / job.per_host * job.per_host;
        const TcpTree tree(peers);
        for (int host = 0; host < tree.hosts(); ++host)
            hosts_.push_back(std::make_unique<SimulatedHost>(*this, job, host, tree.neighbours(host)));
    }

    struct Told {
        int from, to;
        TreeAgreement::Header header;
        std::string body;
    };
    void send(Told told) { next_.push_back(std::move(told)); }

    /// Lets all ranks call the next operator, and returns the error that all of them get.
    std::string call() {
        ++job_.seq;
        steps = 0;
        for (const auto& host : hosts_) host->sent_ = host->messages_ = 0;
        for (const auto& host : hosts_) host->agreement().publish(job_.seq);
        for (; !next_.empty(); ++steps) {
            std::vector<Told> now = std::exchange(next_, {});
            for (const Told& told : now) {
                SimulatedHost& host = *hosts_[static_cast<size_t>(told.to)];
                CHECK(host.agreement().hear(host.index_of(told.from), told.header, told.body.data(), told.body.size()));
            }
        }
        most_bytes = most_messages = most_degree = 0;
        for (const auto& host : hosts_) {
            CHECK_EQ(host->decided_, job_.seq);
            CHECK_EQ(host->verdict_, hosts_[0]->verdict_);
            most_bytes = std::max(most_bytes, host->sent_);
            most_messages = std::max(most_messages, host->messages_);
            most_degree = std::max(most_degree, host->degree());
        }
        return hosts_[0]->verdict_;
    }

    SimulatedHost& host(int number) { return *hosts_[static_cast<size_t>(number)]; }
    size_t hosts() const { return hosts_.size(); }

    int steps = 0;
    size_t most_bytes = 0, most_messages = 0, most_degree = 0;  // of a host

  private:
    Job& job_;
    std::vector<std::unique_ptr<SimulatedHost>> hosts_;
    std::vector<Told> next_;
};

void SimulatedHost::send(size_t neighbour, const TreeAgreement::Header& header, const std::string& body) {
    sent_ += sizeof header + body.size();
    ++messages_;
    network_.send({host_, neighbours_[neighbour], header, body});
}

void print(const char* what, const Network& network) {
    std::printf("%-28s %5zu hosts: %2d hops, at most %4zu bytes in %2zu messages per host\n", what, network.hosts(),
                network.steps, network.most_bytes, network.most_messages);
}

/// One message over each connection in each direction, of the same size whatever the number of ranks.
TEST(constant_bytes) {
    constexpr size_t message = sizeof(TreeAgreement::Header) + sizeof(Summary);
    for (const int hosts : {2, 32, 512, 8192}) {
        Job job{hosts * 8, 8};
        Network network(job);
        for (int call = 0; call < 2; ++call) CHECK_EQ(network.call(), std::string());
        print("agreed", network);
        CHECK(message <= 200);
        CHECK_EQ(network.most_messages, network.most_degree);
        CHECK_EQ(network.most_bytes, network.most_degree * message);
        CHECK(network.most_degree <= 31);
        CHECK(network.steps <= (hosts == 2 ? 1 : hosts == 32 ? 2 : 8));
    }
}

/// At 65,536 ranks the same ranks are named as at few, in a few rounds of constant size.
TEST(names_the_ranks) {
    Job job{65'536, 8};
    Network network(job);
    const auto raises = [&](const char* what, const std::string& error) {
        CHECK_EQ(network.call(), error);
        print(what, network);
        const size_t bits = job.learners.size() / 8;  // of who learns, once
        CHECK(network.steps <= 8 * 9 && network.most_bytes <= 17 * (9 * 1100 + bits));
        CHECK(network.most_messages <= 17 * 9);
        job.sent.clear();
        job.expected.clear();
        job.dtypes.clear();
        job.failures.clear();
        job.learners.clear();
    };
    const std::string op = " all_to_all_v of domain 'sim'";
    // In the next operator.
    const auto first = [&](int from, size_t k) {
        const int64_t next = static_cast<int64_t>(job.seq) + 1;
        return static_cast<int>((from + Job::strides[k] * next) % job.ranks);
    };
    {
        const int from = 64'001, receiver = first(from, 2);
        job.expected[{from, receiver}] = 1000;
        raises("a count", "operator #1" + op + ": rank 64001 sends " + std::to_string(Job::count(from, receiver)) +
                              " elements to rank " + std::to_string(receiver) + ", which expects 1000");
    }
    {  // of two, the one with the lower receiver
        const int low = first(100, 1), high = first(50'000, 1);
        job.sent[{50'000, high}] = 5000;
        job.sent[{100, low}] = 0;
        raises("two counts", "operator #2" + op + ": rank 100 sends 0 elements to rank " + std::to_string(low) +
                                 ", which expects " + std::to_string(Job::count(100, low)));
    }
    job.dtypes = {{60'000, DType::float64}, {31'007, DType::int8}};
    raises("a dtype", "operator #3 of domain 'sim': rank 0 has dtype float32, rank 31007 has dtype int8");
    job.failures = {{65'535, "x is wrong"}, {40'000, "y is wrong"}};
    raises("an invalid argument", "operator #4" + op + " failed on rank 40000: y is wrong");
    job.learners.assign(65'536, false);
    for (size_t rank = 0; rank < job.learners.size(); rank += 3) job.learners[rank] = true;
    CHECK_EQ(network.call(), std::string());
    print("some learn their counts", network);
    {
        const auto next_receiver = [&] {
            int from = 20'000;
            while (job.learns(first(from, 0))) ++from;
            return std::pair{from, first(from, 0)};
        }();
        job.expected[next_receiver] = 12'345;
        raises("the same, and a count",
               "operator #6" + op + ": rank " + std::to_string(next_receiver.first) + " sends " +
                   std::to_string(Job::count(next_receiver.first, next_receiver.second)) + " elements to rank " +
                   std::to_string(next_receiver.second) + ", which expects 12345");
    }
    CHECK_EQ(network.call(), std::string());
}

/// Messages that no leader sends are refused, and change nothing.
TEST(nonsense) {
    Job job{24, 8};
    Network network(job);
    const std::string summary(sizeof(Summary), '\0');
    const auto refuses = [&](TreeAgreement::Header header, size_t bytes = sizeof(Summary)) {
        CHECK(!network.host(0).agreement().hear(0, header, summary.data(), bytes));
    };
    refuses({1, 0, Stage::summary, 1});  // of all, before this host has told its part
    refuses({3, 0, Stage::summary, 0});
    refuses({0, 0, Stage::summary, 0});
    refuses({1, 1, Stage::summary, 0});
    refuses({1, 2, Stage::failure, 0});
    refuses({1, 0, Stage::summary, 0}, sizeof(Summary) - 1);
    refuses({1, 1, static_cast<Stage>(99), 0});
    CHECK_EQ(network.call(), std::string());
    refuses({1, 0, Stage::summary, 0});
    CHECK_EQ(network.call(), std::string());
}

}  // namespace
