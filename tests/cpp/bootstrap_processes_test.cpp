// What befalls only processes: ended, stopped and forked ranks, strangers, other users, exhausted limits.
#include <sched.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cstddef>
#include <cstring>

#include "bootstrap_fixture.h"
#include "runtime/base/sha256.h"
#include "runtime/bootstrap/bootstrap_protocol.h"

using namespace testing;

namespace {

TEST(killed) {
    for (const int victim : {0, 1}) {
        const Polls polls(3);
        const std::vector<int> statuses = run_processes(3, [&](int rank) {
            BootstrapOptions options = options_of(rank, 4);
            options.poll = [&, rank] {
                if (!polls.all_wait(rank) || rank != victim) return;
                if (open_pidfd(getpid()) && fork() == 0) {  // a child that lives on with the sockets changes nothing
                    sleep(2);
                    _exit(0);
                }
                raise(SIGKILL);
            };
            fails(processes, options, ErrorClass::peer_lost, "rank " + std::to_string(victim) + " (pid ");
        });
        for (int rank = 0; rank < 3; ++rank)
            CHECK_EQ(statuses[static_cast<size_t>(rank)], rank == victim ? 128 + SIGKILL : 0);
    }
}

/// A child forked while the domain opens inherits its sockets. That must not keep the name.
TEST(forked_meanwhile) {
    all_pass(run_processes(2, [](int rank) {
        BootstrapOptions options = options_of(rank, 2);
        pid_t child = 0;
        if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
        if (rank == 0) {
            options.poll = [&] {
                if (child != 0) return;
                child = fork();
                if (child == 0) {
                    sleep(20);  // not for ever: should this test fail, nobody ends it
                    _exit(0);
                }
            };
        }
        check_membership(processes, options);
        for (int i = 0; i < 3; ++i) check_membership(processes, options_of(rank, 2));
        if (rank == 0) {
            CHECK(child > 0);
            kill(child, SIGKILL);
            wait_for(child);
        }
    }));
}

TEST(stopped_root) {
    all_pass(run_processes(1, [](int) {
        const pid_t root = spawn("stopped root", [] {
            BootstrapOptions options = options_of(0, 2);
            options.poll = [] { raise(SIGSTOP); };
            bootstrap_processes(options);
        });
        int status = 0;
        CHECK(waitpid(root, &status, WUNTRACED) == root && WIFSTOPPED(status));
        fails(processes, options_of(1, 2, 0.5), ErrorClass::comm_timeout, "had not answered while opening", 1.5);
        kill(root, SIGKILL);
        wait_for(root);
    }));
}

TEST(silent_and_malformed) {
    all_pass(run_processes(1, [](int) {
        const pid_t root = spawn("root", [] { check_membership(processes, options_of(0, 2)); });
        std::vector<UniqueFd> strangers;
        while (strangers.size() < 20) {
            Connection connection = connect_abstract(socket_name(options_of(0, 2), 0));
            if (connection.error != 0) continue;
            if (strangers.size() % 2 == 1) try_send(connection.socket.get(), "no message of ours, but long enough");
            strangers.push_back(std::move(connection.socket));
        }
        std::string truncated = encode_hello(options_of(1, 2));
        truncated.resize(truncated.size() - 3);
        try_send(strangers[0].get(), truncated);
        check_membership(processes, options_of(1, 2));
        CHECK_EQ(wait_for(root), 0);
    }));
}

UniqueFd connect_to_root() {
    Connection connection;
    do {
        connection = connect_abstract(socket_name(options_of(0, 2), 0));
    } while (connection.error != 0);
    return std::move(connection.socket);
}

/// A rank that gave up on a slow root tries again, or another process has taken its place: the root hears both at once.
TEST(tries_again) {
    all_pass(run_processes(1, [](int) {
        const pid_t root = spawn("slow root", [] {
            BootstrapOptions options = options_of(0, 2);
            options.poll = [stopped = false]() mutable {
                if (!std::exchange(stopped, true)) raise(SIGSTOP);
            };
            check_membership(processes, options);
        });
        int status = 0;
        CHECK(waitpid(root, &status, WUNTRACED) == root && WIFSTOPPED(status));
        try_send(connect_to_root().get(), encode_hello(options_of(1, 2)));
        BootstrapOptions options = options_of(1, 2);
        options.poll = [root] { kill(root, SIGCONT); };
        check_membership(processes, options);
        CHECK_EQ(wait_for(root), 0);
    }));
}

/// Who speaks our protocol and is no member is told why; the meeting goes on, or names it when nobody else comes.
TEST(refused) {
    for (const bool comes : {true, false}) {
        all_pass(run_processes(1, [comes](int) {
            const pid_t root = spawn("root", [comes] {
                if (comes) return check_membership(processes, options_of(0, 2));
                fails(processes, options_of(0, 2, 0.5), ErrorClass::comm_timeout,
                      "pid " + std::to_string(getppid()) + " was refused: rank 1 asks for another domain or job", 0.5);
            });
            std::string other_release = encode_hello(options_of(1, 2));
            other_release[4] = 9;  // the version, on a little-endian machine
            BootstrapOptions elsewhere = options_of(1, 2);
            elsewhere.job = "\xff\xfe another";
            for (const auto& [hello, reason] : {std::pair{other_release, "same release"},
                                                std::pair{encode_hello(elsewhere), "another domain or job"}}) {
                const UniqueFd stranger = connect_to_root();
                CHECK(try_send(stranger.get(), hello) == IoStatus::done);
                wait_readable(stranger.get());
                Message message;
                CHECK(try_receive(stranger.get(), message) == IoStatus::done);
                CHECK(message.data.find(reason) != std::string::npos);
            }
            const UniqueFd talker = connect_to_root();
            const std::string long_message(max_message_bytes + 1, 'x');
            CHECK(send(talker.get(), long_message.data(), long_message.size(), 0) > 0);
            if (comes) check_membership(processes, options_of(1, 2));
            CHECK_EQ(wait_for(root), 0);
        }));
    }
}

/// AddressSanitizer and its kin open descriptors to check an object, and take failure for a bad one.
bool sanitizer_needs_descriptors() {
#if defined(__SANITIZE_ADDRESS__)
    std::printf("  NOT RUN: without descriptors the sanitizer takes every object for a bad one\n");
    return true;
#else
    return false;
#endif
}

/// Far more strangers than the root has descriptors for, who come all the time and stay.
TEST(flood) {
    if (sanitizer_needs_descriptors()) return;
    all_pass(run_processes(1, [](int) {
        const pid_t root = spawn("root", [] {
            const rlimit limit{64, 64};
            CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
            check_membership(processes, options_of(0, 2));
        });
        const pid_t crowd = spawn("crowd", [] {
            const rlimit limit{1024, 1024};
            CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
            std::vector<UniqueFd> strangers(900);
            for (size_t i = 0;; i = (i + 1) % strangers.size()) {
                strangers[i] = std::move(connect_abstract(socket_name(options_of(0, 2), 0)).socket);
                if (i % 100 == 0) usleep(1000);
            }
        });
        connect_to_root();
        usleep(300'000);
        const auto start = Clock::now();
        check_membership(processes, options_of(1, 2));
        CHECK(seconds_since(start) < soon);
        CHECK_EQ(wait_for(root), 0);
        kill(crowd, SIGKILL);
        wait_for(crowd);
    }));
}

/// Whatever listens on the name first and talks nonsense, ranks find their root.
TEST(nonsense_before_the_root) {
    all_pass(run_processes(1, [](int) {
        UniqueFd impostor = listen_abstract(socket_name(options_of(0, 2), 0));
        const pid_t peer = spawn("peer", [&] {
            impostor.reset();
            check_membership(processes, options_of(1, 2));
        });
        for (const std::string& nonsense :
             {std::string("nonsense"), encode(MessageKind::commit), std::string(max_message_bytes + 1, 'x')}) {
            wait_readable(impostor.get());
            const UniqueFd caller = accept_connection(impostor.get());
            wait_readable(caller.get());
            CHECK(send(caller.get(), nonsense.data(), nonsense.size(), 0) > 0);
        }
        impostor.reset();
        check_membership(processes, options_of(0, 2));
        CHECK_EQ(wait_for(peer), 0);
    }));
}

/// A process of this user listens on all foreseeable names and says nothing: ranks meet all the same.
TEST(silence_on_the_names) {
    all_pass(run_processes(1, [](int) {
        std::vector<UniqueFd> held;
        for (int attempt = 0; attempt < name_attempts; ++attempt)
            held.push_back(listen_abstract(socket_name(options_of(0, 2), attempt)));
        std::vector<pid_t> ranks;
        for (const int rank : {0, 1})
            ranks.push_back(spawn("rank", [&held, rank] {
                held.clear();
                check_membership(processes, options_of(rank, 2));
            }));
        for (const pid_t rank : ranks) CHECK_EQ(wait_for(rank), 0);
    }));
}

UniqueFd bound_socket(const std::string& name) {
    UniqueFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, name.data(), name.size());
    const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    CHECK(bind(fd.get(), reinterpret_cast<sockaddr*>(&address), length) == 0);
    return fd;
}

bool is_root() {
    if (geteuid() != 0) std::printf("  NOT RUN: becoming another user needs root, this is uid %u\n", geteuid());
    return geteuid() == 0;
}

/// Another user holds three of our names in three ways, then knocks at the fourth, where the root listens.
TEST(another_user) {
    if (!is_root()) return;
    all_pass(run_processes(1, [](int) {
        std::vector<std::string> names;
        for (int attempt = 0; attempt < 4; ++attempt) names.push_back(socket_name(options_of(0, 2), attempt));
        auto [ours, theirs] = socket_pair();
        const pid_t squatter = spawn("squatter", [&, at = theirs.get()] {
            ours.reset();
            CHECK(setuid(65534) == 0);
            const UniqueFd listening = listen_abstract(names[0]), silent = bound_socket(names[1]);
            const UniqueFd busy = bound_socket(names[2]);
            CHECK(listen(busy.get(), 0) == 0);
            const Connection filler = connect_abstract(names[2]);
            CHECK_EQ(connect_abstract(names[2]).error, EAGAIN);
            try_send(at, "holding");
            Connection knock;
            while ((knock = connect_abstract(names[3])).error != 0) usleep(1000);
            // Says it is rank 1. It is thrown out without an answer.
            try_send(knock.socket.get(), encode_hello(options_of(1, 2)));
            wait_readable(knock.socket.get());
            Message message;
            CHECK(try_receive(knock.socket.get(), message) == IoStatus::closed);
            try_send(at, "refused");
            wait_readable(at);  // until the bootstrap is over
            UniqueFd visitor;
            while ((visitor = accept_connection(listening.get()))) {  // rank 0 and 1 looked in and said nothing
                CHECK(try_receive(visitor.get(), message) == IoStatus::closed);
            }
        });
        theirs.reset();
        const auto expect = [&, at = ours.get()](const std::string& text) {
            Message message;
            wait_readable(at);
            CHECK(try_receive(at, message) == IoStatus::done);
            CHECK_EQ(message.data, text);
        };
        expect("holding");
        const pid_t root = spawn("root", [] { check_membership(processes, options_of(0, 2)); });
        expect("refused");
        check_membership(processes, options_of(1, 2));
        CHECK_EQ(wait_for(root), 0);
        try_send(ours.get(), "over");
        CHECK_EQ(wait_for(squatter), 0);
    }));
}

/// All the names that can be foreseen are held, some by listeners and some in silence: ranks meet on another.
TEST(another_user_has_all_names) {
    if (!is_root()) return;
    all_pass(run_processes(1, [](int) {
        auto [ours, theirs] = socket_pair();
        const pid_t squatter = spawn("squatter", [&, at = theirs.get()] {
            ours.reset();
            std::vector<std::string> names;
            for (int attempt = 0; attempt < name_attempts; ++attempt)
                names.push_back(socket_name(options_of(0, 2), attempt));
            const std::string decoy = found_name_prefix(options_of(0, 2)) + "decoy";
            CHECK(setuid(1) == 0);
            std::vector<UniqueFd> held;
            for (size_t i = 0; i < names.size(); ++i)
                held.push_back(i % 2 == 0 ? listen_abstract(names[i]) : bound_socket(names[i]));
            held.push_back(listen_abstract(decoy));
            try_send(at, "holding");
            wait_readable(at);  // until the bootstrap is over
        });
        theirs.reset();
        wait_readable(ours.get());
        const pid_t root = spawn("root", [] { check_membership(processes, options_of(0, 2)); });
        const auto start = Clock::now();
        check_membership(processes, options_of(1, 2));
        CHECK(seconds_since(start) < soon);
        CHECK_EQ(wait_for(root), 0);
        ours.reset();
        wait_for(squatter);
    }));
}

/// Where a user namespace shows others as the same uid as this process, nobody is let in.
TEST(overflow_uid) {
    all_pass(run_processes(1, [](int) {
        if (geteuid() == 0) CHECK(setuid(1) == 0);
        if (unshare(CLONE_NEWUSER) != 0) {
            std::printf("  NOT RUN: this kernel refuses user namespaces: %s\n", strerror(errno));
            return;
        }
        CHECK_EQ(geteuid(), uid_t{65534});  // nothing is mapped
        for (const int rank : {0, 1})
            fails(processes, options_of(rank, 2), ErrorClass::backend_unavailable,
                  "cannot tell each other from strangers");
        check_membership(processes, options_of(0, 1));
    }));
}

/// Ranks with another secret do not even find each other.
TEST(secrets) {
    const std::string plain = socket_name(options_of(0, 2), 0);
    BootstrapOptions options = options_of(0, 2);
    options.secret = "of the job";
    CHECK(socket_name(options, 0) != plain && socket_name(options, 0) != socket_name(options, 1));
    CHECK_EQ(hex(sha256("abc")), std::string("ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"));
    CHECK_EQ(hex(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
             std::string("248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"));
    CHECK_EQ(hex(hmac_sha256("Jefe", "what do ya want for nothing?")),  // RFC 4231, cases 2 and 6
             std::string("5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"));
    CHECK_EQ(hex(hmac_sha256(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First")),
             std::string("60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"));
    CHECK(!equal(random_digest(), random_digest()));
}

TEST(name_taken_by_ourselves) {
    all_pass(run_processes(1, [](int) {
        UniqueFd listener = listen_abstract(socket_name(options_of(0, 2), 0));
        fails(processes, options_of(0, 2, 0.3), ErrorClass::comm_timeout,
              "was still taken by pid " + std::to_string(getpid()) + " of this user", 0.3);
    }));
}

TEST(no_descriptors_left) {
    if (sanitizer_needs_descriptors()) return;
    all_pass(run_processes(2, [](int rank) {  // rank 1 cannot take what it is sent: both fail, and say so
        if (rank == 0) {
            fails(processes, options_of(0, 2), ErrorClass::resource, "rank 1 (pid ");
            return;
        }
        std::vector<UniqueFd> used;
        while (used.size() < 3 || used.back().get() < 60) used.emplace_back(dup(0));
        const rlimit limit{static_cast<rlim_t>(used.back().get() + 3), 4096};  // a socket, a pidfd, nothing more
        CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
        fails(processes, options_of(1, 2), ErrorClass::resource, "ulimit -n");
    }));
}

}  // namespace
