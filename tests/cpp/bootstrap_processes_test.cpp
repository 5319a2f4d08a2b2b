/// \file bootstrap_processes_test.cpp
/// \brief What befalls only processes: ended, stopped and forked ranks, strangers, other users, exhausted limits.
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cstddef>
#include <cstring>

#include "bootstrap/bootstrap_protocol.h"
#include "bootstrap_fixture.h"

using namespace testing;

namespace {

void killed() {
    for (const int victim : {0, 1}) {
        const std::vector<int> statuses = run_processes(3, [&](int rank) {
            BootstrapOptions options = options_of(rank, 4);
            int calls = 0;
            options.poll = [&] {
                if (rank != victim || ++calls < 4) return;
                if (open_pidfd(getpid()) && fork() == 0) {  // a child that lives on with the sockets changes nothing
                    sleep(2);
                    _exit(0);
                }
                raise(SIGKILL);
            };
            fails(processes, options, ErrorClass::peer_lost, "rank " + std::to_string(victim) + " (pid ");
        });
        for (int rank = 0; rank < 3; ++rank) {
            CHECK_EQ(statuses[static_cast<size_t>(rank)], rank == victim ? 128 + SIGKILL : 0);
        }
    }
}

/// A child forked while the domain opens inherits its sockets. That must not keep the name.
void forked_meanwhile() {
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

void stopped_root() {
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

void silent_and_malformed() {
    all_pass(run_processes(1, [](int) {
        const pid_t root = spawn("root", [] { check_membership(processes, options_of(0, 2)); });
        std::vector<UniqueFd> strangers;
        while (strangers.size() < 20) {
            Connection connection = connect_abstract(socket_name(options_of(0, 2), 0));
            if (connection.error != 0) continue;
            if (strangers.size() % 2 == 1) try_send(connection.socket.get(), "no message of ours, but long enough");
            strangers.push_back(std::move(connection.socket));
        }
        Hello hello = hello_of(options_of(1, 2));
        std::string truncated = encode_hello(hello);
        truncated.resize(truncated.size() - 3);
        try_send(strangers[0].get(), truncated);
        check_membership(processes, options_of(1, 2));
        CHECK_EQ(wait_for(root), 0);
    }));
    all_pass(run_processes(1, [](int) {  // another release
        const pid_t root = spawn("root", [] {
            fails(processes, options_of(0, 2), ErrorClass::invalid_param, "rank 1 speaks version 9 of the bootstrap");
        });
        Connection connection;
        do {
            connection = connect_abstract(socket_name(options_of(0, 2), 0));
        } while (connection.error != 0);
        std::string hello = encode_hello(hello_of(options_of(1, 2)));
        hello[4] = 9;  // the version, on a little-endian machine
        try_send(connection.socket.get(), hello);
        wait_readable(connection.socket.get());
        Message message;
        CHECK(try_receive(connection.socket.get(), message) == IoStatus::done);
        CHECK(message.data.find("same release") != std::string::npos);
        CHECK_EQ(wait_for(root), 0);
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

/// Another user holds three of our names in three ways, then knocks at the fourth, where the root listens.
void another_user() {
    if (geteuid() != 0) {
        std::printf("  NOT RUN: becoming another user needs root, this is uid %u\n", geteuid());
        return;
    }
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
            try_send(knock.socket.get(), encode_hello(hello_of(options_of(1, 2))));
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

void name_taken_by_ourselves() {
    all_pass(run_processes(1, [](int) {
        UniqueFd listener = listen_abstract(socket_name(options_of(0, 2), 0));
        fails(processes, options_of(0, 2, 0.3), ErrorClass::comm_timeout,
              "was still taken by pid " + std::to_string(getpid()) + " of this user", 0.3);
    }));
}

void no_descriptors_left() {
#if defined(__SANITIZE_ADDRESS__)
    std::printf(
        "  NOT RUN: the sanitizer opens descriptors itself to check an object, and takes failure for a bad one\n");
    return;
#endif
    all_pass(run_processes(2, [](int rank) {  // rank 1 cannot take what it is sent: both fail, and say so
        if (rank == 0) {
            fails(processes, options_of(0, 2), ErrorClass::backend_unavailable, "rank 1 (pid ");
            return;
        }
        std::vector<UniqueFd> used;
        while (used.size() < 3 || used.back().get() < 60) used.emplace_back(dup(0));
        const rlimit limit{static_cast<rlim_t>(used.back().get() + 3), 4096};  // a socket, a pidfd, nothing more
        CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
        fails(processes, options_of(1, 2), ErrorClass::backend_unavailable, "ulimit -n");
    }));
}

}  // namespace

int main(int argc, char** argv) {
    return run_all(argc, argv,
                   {{"killed", killed},
                    {"forked meanwhile", forked_meanwhile},
                    {"stopped root", stopped_root},
                    {"silent and malformed", silent_and_malformed},
                    {"another user", another_user},
                    {"name taken by ourselves", name_taken_by_ourselves},
                    {"no descriptors left", no_descriptors_left}});
}
