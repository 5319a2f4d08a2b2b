// Ranks that find each other, and the ways in which they do not, alike for processes and for threads.
#include <cmath>

#include "bootstrap_fixture.h"

using namespace testing;

namespace {

TEST(success, const Mode& mode) {
    for (const int size : {1, 2, 4, 8, 48}) {
        all_pass(mode.run(size, [&](int rank) { check_membership(mode, options_of(rank, size)); }));
    }
}

TEST(late_arrivals, const Mode& mode) {
    all_pass(mode.run(4, [&](int rank) {  // the root comes second to last, peers find it quickly
        const int order[] = {2, 0, 1, 3};
        std::this_thread::sleep_for(std::chrono::milliseconds(100 * order[rank]));
        check_membership(mode, options_of(rank, 4));
    }));
}

TEST(recreation, const Mode& mode) {
    all_pass(mode.run(4, [&](int rank) {
        for (int i = 0; i < 50; ++i) {
            const Membership membership = bootstrap(mode, options_of(rank, 4));
            CHECK_EQ(membership.peers.size(), size_t{4});
        }
        std::vector<Membership> alive;  // and several of one domain alive at once
        for (int i = 0; i < 5; ++i) alive.push_back(bootstrap(mode, options_of(rank, 4)));
    }));
}

TEST(timeouts, const Mode& mode) {
    const std::string job = options_of(0, 1).job;
    auto start = Clock::now();
    all_pass(mode.run(2, [&](int i) {  // ranks 1 and 3 never come
        fails(mode, options_of(2 * i, 4, 1.5), ErrorClass::comm_timeout,
              "after 1.5 s ranks 1, 3 of 4 had not joined domain 'd' (job '" + job + "')", 1.5, start);
    }));
    start = Clock::now();
    all_pass(mode.run(2, [&](int rank) {  // the first whose time is up ends it for everybody
        fails(mode, options_of(rank, 3, rank == 0 ? 50 : 1.5), ErrorClass::comm_timeout,
              "after 1.5 s rank 2 of 3 had not joined", 1.5, start);
    }));
    const std::string rootless = mode.threads ? "rank 0 of 2 had not joined" : "rank 0 had not opened domain 'd'";
    all_pass(mode.run(1, [&](int) { fails(mode, options_of(1, 2, 0.3), ErrorClass::comm_timeout, rootless, 0.3); }));
    all_pass(mode.run(2, [&](int rank) { check_membership(mode, options_of(rank, 2)); }));  // the name is free again
}

TEST(violations, const Mode& mode) {
    // The last of 3 ranks differs. Everybody hears of it.
    const auto differ = [&](const std::string& part, const std::function<void(BootstrapOptions&)>& change) {
        const auto start = Clock::now();
        all_pass(mode.run(3, [&](int rank) {
            BootstrapOptions options = options_of(rank, 3);
            if (rank == 2) {
                std::this_thread::sleep_for(std::chrono::milliseconds(300));
                change(options);
            }
            fails(mode, options, ErrorClass::invalid_param, part, 0.3, start);
        }));
    };
    differ("says the domain 'd' has 4 ranks, rank ", [](BootstrapOptions& options) { options.size = 4; });
    differ("rank 1 joined domain 'd' twice", [](BootstrapOptions& options) { options.rank = 1; });
    differ("wants a control segment of 8192 bytes", [](BootstrapOptions& options) { options.control_bytes = 8192; });
    differ("rank 2 has check = 'off', rank ", [](BootstrapOptions& options) { options.settings = "check=off;pool=1"; });
    differ("rank 2 has pool unset, rank ", [](BootstrapOptions& options) { options.settings = "check=always"; });
    differ("rank 2 has more = '', rank ", [](BootstrapOptions& options) { options.settings += ";more="; });
    // Order and a trailing separator mean nothing.
    all_pass(mode.run(2, [&](int rank) {
        BootstrapOptions options = options_of(rank, 2);
        if (rank == 1) options.settings = "pool=1;check=always;";
        check_membership(mode, options);
    }));
    BootstrapOptions options = options_of(4, 4);
    fails(mode, options, ErrorClass::invalid_param, "rank is 4, expected 0 <= rank < 4");
    options = options_of(0, 0);
    fails(mode, options, ErrorClass::invalid_param, "size is 0");
    options = options_of(0, 2, std::nan(""));
    fails(mode, options, ErrorClass::invalid_param, "timeout is nan");
}

TEST(interrupted, const Mode& mode) {
    for (const int quitter : {0, 1}) {
        const Polls polls(3);
        all_pass(mode.run(3, [&](int rank) {  // rank 3 of 4 never comes
            BootstrapOptions options = options_of(rank, 4);
            options.poll = [&, rank] {
                if (polls.all_wait(rank) && rank == quitter) throw std::logic_error("Ctrl-C");
            };
            const auto start = Clock::now();
            if (rank == quitter) {
                CHECK_EQ(thrown([&] { bootstrap(mode, options); }), std::string("Ctrl-C"));
                CHECK(seconds_since(start) < soon);
            } else {
                fails(mode, options, ErrorClass::peer_lost, "rank " + std::to_string(quitter) + " (pid ");
            }
        }));
    }
}

}  // namespace
