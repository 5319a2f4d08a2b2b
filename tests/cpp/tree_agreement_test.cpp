// Agreement between hosts at a scale that no test machine has: the leaders' code of 8,192 hosts with 65,536 ranks over
// a network in memory, which counts bytes, messages and rounds.
#include "runtime/hosts/tree_agreement.h"

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "check.h"
#include "runtime/hosts/tcp_leaders.h"

using namespace alltoallv;
using namespace testing;

namespace {

constexpr int per_host = 8;

/// What ranks announce that do not do as the others.
struct Announced {
    std::map<int, DType> dtypes{};
    std::map<int, int64_t> balances{};
    std::set<int> failed{}, learning{}, absent{};
};

class Network {
  public:
    explicit Network(int hosts) : tree_(peers_on(hosts)), hosts_(static_cast<size_t>(hosts)) {
        below_.resize(hosts_.size(), per_host);
        for (int host = hosts - 1; host > 0; --host)
            below_[static_cast<size_t>(tree_.parent(host))] += below_[static_cast<size_t>(host)];
        for (int host = 0; host < hosts; ++host) at(host).join(*this, host);
    }

    /// All ranks but those that are absent begin the next operator; all messages of a round arrive in the next one.
    void call(const Announced& announced) {
        announced_ = &announced;
        if (missed_.empty()) ++seq_;
        rounds = 0;
        total_bytes = total_messages = 0;
        for (Host& host : hosts_) host.bytes = host.messages = 0;
        for (int host = 0; host < static_cast<int>(hosts_.size()); ++host) at(host).begin(missed_);
        missed_ = announced.absent;
        deliver();
    }

    /// All ranks that have begun have waited for a while.
    void look() {
        rounds = 0;
        for (Host& host : hosts_) host.agreement->look();
        deliver();
    }

    /// The summary of all ranks, which is the same on all hosts.
    Summary outcome() {
        for (const Host& host : hosts_) {
            CHECK_EQ(host.completed, seq_);
            CHECK_EQ(host.all.ranks, static_cast<uint32_t>(ranks()));
            CHECK_EQ(host.all.agrees(), hosts_[0].all.agrees());
            CHECK_EQ(host.all.failed, hosts_[0].all.failed);
            CHECK_EQ(host.all.called, hosts_[0].all.called);
            CHECK_EQ(host.released, seq_);
        }
        return hosts_[0].all;
    }

    int ranks() const { return static_cast<int>(hosts_.size()) * per_host; }
    size_t most_bytes() const {
        return of_most([](const Host& host) { return host.bytes; });
    }
    size_t most_messages() const {
        return of_most([](const Host& host) { return host.messages; });
    }
    size_t most_neighbours() const {
        return of_most([](const Host& host) { return host.neighbours.size(); });
    }

    /// The ranks that a host knows to be absent.
    std::vector<int> missing(int host) {
        std::vector<int> ranks;
        for (const auto& [neighbour, absent] : at(host).heard) ranks.insert(ranks.end(), absent.begin(), absent.end());
        std::ranges::sort(ranks);
        return ranks;
    }

    bool receives(int host, size_t neighbour, uint64_t seq, const Summary& sum) {
        return at(host).agreement->receive(neighbour, seq, sum);
    }

    int rounds = 0;
    size_t total_bytes = 0, total_messages = 0;

  private:
    struct Host {
        Network* network = nullptr;
        int number = 0;
        std::vector<int> neighbours;
        std::unique_ptr<TreeAgreement> agreement;
        uint64_t completed = 0, released = 0;
        Summary all;
        size_t bytes = 0, messages = 0;  // that it has sent
        std::map<size_t, TreeAgreement::Ranks> heard;

        void join(Network& of, int as);
        void begin(const std::set<int>& missed) {
            bool late = false;
            for (int rank = number * per_host; rank < (number + 1) * per_host; ++rank) {
                if (network->announced_->absent.contains(rank)) return;
                late |= missed.contains(rank);
            }
            if (!missed.empty() && !late) return;  // it has begun before
            Summary own;
            for (int rank = number * per_host; rank < (number + 1) * per_host; ++rank) add(own, rank);
            agreement->add_own(own);
        }
        void add(Summary& sum, int rank) const {
            const Announced& announced = *network->announced_;
            Row row{};
            row.op = OpKind::all_to_all_v;
            const auto dtype = announced.dtypes.find(rank);
            row.dtype = dtype != announced.dtypes.end() ? dtype->second : DType::float32;
            // To the next rank go `rank` elements, which it expects.
            row.balance = pair_hash(rank, (rank + 1) % network->ranks(), rank + 1);
            const int before = (rank + network->ranks() - 1) % network->ranks();
            if (announced.learning.contains(rank))
                row.flags |= row_learns;
            else
                row.balance -= pair_hash(before, rank, before + 1);
            if (const auto found = announced.balances.find(rank); found != announced.balances.end())
                row.balance += static_cast<uint64_t>(found->second);
            if (announced.failed.contains(rank)) row.flags |= row_failed;
            sum.add(row, true);
        }
        void count(size_t more) {
            bytes += more;
            ++messages;
            network->total_bytes += more;
            ++network->total_messages;
        }
    };

    static std::vector<TcpPeer> peers_on(int hosts) {
        std::vector<TcpPeer> peers(static_cast<size_t>(hosts * per_host));
        for (int rank = 0; rank < hosts * per_host; ++rank)
            peers[static_cast<size_t>(rank)].first_on_host = rank / per_host * per_host;
        return peers;
    }
    Host& at(int host) { return hosts_[static_cast<size_t>(host)]; }
    size_t number_at(int host, int of) {
        const std::vector<int>& all = at(host).neighbours;
        return static_cast<size_t>(std::ranges::find(all, of) - all.begin());
    }
    template <class Of>
    size_t of_most(Of&& of) const {
        size_t most = 0;
        for (const Host& host : hosts_) most = std::max(most, of(host));
        return most;
    }
    void deliver() {
        for (; !sent_.empty(); ++rounds)
            for (const auto& message : std::exchange(sent_, {})) message();
    }

    const TcpTree tree_;
    std::vector<Host> hosts_;
    std::vector<uint32_t> below_;  // ranks on a host and on those under it
    std::vector<std::function<void()>> sent_;
    const Announced* announced_ = nullptr;
    std::set<int> missed_;  // ranks that have not begun the last operator
    uint64_t seq_ = 0;
};

void Network::Host::join(Network& of, int as) {
    network = &of;
    number = as;
    neighbours = of.tree_.neighbours(as);
    std::vector<TreeAgreement::Behind> behind;
    for (const int other : neighbours) {
        const uint32_t below = of.below_[static_cast<size_t>(std::max(other, as))];  // the ranks under the lower one
        TreeAgreement::Behind& one = behind.emplace_back();
        one.ranks = other > as ? below : static_cast<uint32_t>(of.ranks()) - below;
        const size_t listed = std::min<size_t>(one.ranks, TreeAgreement::most_absent);
        for (int rank = other > as ? other * per_host : 0; one.lowest.size() < listed; ++rank)
            if (rank / per_host != as && of.tree_.towards(as, rank / per_host) == other) one.lowest.push_back(rank);
    }
    TreeAgreement::Leader leader;
    leader.send = [this](size_t to, uint64_t seq, const Summary& sum) {
        count(TcpLeaders::bytes_of_sum);
        const int host = neighbours[to];
        network->sent_.emplace_back([this, host, seq, sum] {
            CHECK(network->at(host).agreement->receive(network->number_at(host, number), seq, sum));
        });
    };
    leader.others_known = [this](uint64_t seq, const Summary&) { released = seq; };
    leader.complete = [this](uint64_t seq, const Summary& total) {
        completed = seq;
        all = total;
        heard.clear();
    };
    leader.send_absent = [this](size_t to, uint64_t seq, const TreeAgreement::Ranks& absent) {
        count(TcpLeaders::bytes_of_absent(absent.size()));
        const int host = neighbours[to];
        network->sent_.emplace_back([this, host, seq, absent] {
            CHECK(network->at(host).agreement->receive_absent(network->number_at(host, number), seq, absent));
        });
    };
    leader.arrived = [this](size_t from, uint64_t, const TreeAgreement::Ranks& absent) { heard[from] = absent; };
    leader.absent_here = [this](uint64_t) {
        TreeAgreement::Ranks absent;
        for (int rank = number * per_host; rank < (number + 1) * per_host; ++rank)
            if (network->announced_->absent.contains(rank)) absent.push_back(rank);
        return absent;
    };
    agreement = std::make_unique<TreeAgreement>(behind, true, std::move(leader));
}

void print(const char* what, int hosts, const Network& network) {
    std::printf("%-26s %4d hosts: %2d rounds, %7zu bytes and %5zu messages in all, %4zu and %2zu of a leader at most\n",
                what, hosts, network.rounds, network.total_bytes, network.total_messages, network.most_bytes(),
                network.most_messages());
}

/// One message over each connection in each direction, of one size for any number of ranks.
TEST(constant_bytes) {
    const std::map<int, int> rounds{{1, 0}, {2, 1}, {32, 2}, {33, 4}, {512, 6}, {8192, 8}};
    for (const auto& [hosts, most_rounds] : rounds) {
        Network network(hosts);
        for (int call = 0; call < 3; ++call) {
            network.call({});
            CHECK(network.outcome().agrees());
        }
        print("all agree", hosts, network);
        CHECK(network.rounds <= most_rounds);
        CHECK_EQ(network.total_messages, size_t{2} * (static_cast<size_t>(hosts) - 1));
        CHECK_EQ(network.most_messages(), network.most_neighbours());
        CHECK_EQ(network.most_bytes(), network.most_neighbours() * TcpLeaders::bytes_of_sum);
        CHECK(network.most_neighbours() <= 31 && TcpLeaders::bytes_of_sum <= 128);
    }
}

/// All hosts see in the same sums what is wrong, for the same bytes.
TEST(disagreement) {
    constexpr int hosts = 8192;
    Network network(hosts);
    const auto disagrees = [&](const char* what, const Announced& announced) {
        network.call(announced);
        const Summary all = network.outcome();
        print(what, hosts, network);
        CHECK(!all.agrees());
        CHECK(network.most_bytes() <= 17 * TcpLeaders::bytes_of_sum && network.rounds <= 8);
        return all;
    };
    Announced announced;
    announced.dtypes[31'007] = DType::int8;
    CHECK(disagrees("a dtype", announced).needs_rows());
    announced = {};
    announced.balances[65'535] = 1;
    CHECK(disagrees("a count", announced).needs_rows());
    announced = {};
    announced.learning = {7, 40'000};
    CHECK(disagrees("some ranks learn counts", announced).needs_rows());
    announced = {};
    announced.failed = {40'000, 65'000};
    CHECK_EQ(disagrees("failures", announced).failed, 2u);
    announced = {};
    for (int rank = 0; rank < network.ranks(); ++rank) announced.learning.insert(rank);
    network.call(announced);
    CHECK(network.outcome().agrees());
}

/// While ranks wait, all hosts come to know the absent ones, by messages of one size.
TEST(absent_ranks) {
    constexpr int hosts = 8192;
    Network network(hosts);
    network.call({});
    Announced announced;
    announced.absent = {3, 41'000, 65'535};
    network.call(announced);
    network.look();
    for (int again = 0; again < 2; ++again) {
        for (const int host : {1, 17, 600, 5000, 8190})
            CHECK(network.missing(host) == std::vector({3, 41'000, 65'535}));
        print("three ranks absent", hosts, network);
        network.look();  // nothing new: nothing is sent
        CHECK_EQ(network.rounds, 0);
    }
    CHECK(network.most_bytes() <= 17 * 16 * TcpLeaders::bytes_of_absent(TreeAgreement::most_absent));
    network.call({});
    CHECK(network.outcome().agrees());
}

/// What no healthy leader sends is refused, and changes nothing.
TEST(nonsense) {
    Network network(3);
    Summary sum;
    sum.ranks = per_host;
    CHECK(!network.receives(0, 0, 2, sum));
    CHECK(!network.receives(0, 0, 0, sum));
    sum.ranks = per_host + 1;
    CHECK(!network.receives(0, 0, 1, sum));
    network.call({});
    CHECK(network.outcome().agrees());
}

}  // namespace
