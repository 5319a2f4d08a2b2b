// Calls in order: from several threads, synchronous and queued, interrupted, and taken down.
#include "runtime/core/call_queue.h"

#include <chrono>

#include "check.h"
#include "runtime/core/hooks.h"

using namespace alltoallv;

namespace {

using std::chrono::milliseconds;

TEST(one_at_a_time) {
    CallQueue queue;
    int inside = 0, calls = 0;  // plain: the turns are what guards them
    std::vector<std::thread> callers;
    for (int i = 0; i < 4; ++i) {
        callers.emplace_back([&] {
            for (int k = 0; k < 500; ++k) {
                const CallQueue::Slot slot(queue);
                ++inside;
                if (inside == 1) ++calls;
                --inside;
            }
        });
    }
    std::vector<WorkPtr> works;
    for (int k = 0; k < 500; ++k) {
        works.push_back(queue.submit([&] {
            const CallQueue::Slot nested(queue);  // holds the turn already
            ++inside;
            if (inside == 1) ++calls;
            --inside;
        }));
    }
    for (std::thread& caller : callers) caller.join();
    for (const WorkPtr& work : works) CHECK(work->wait(20));
    CHECK_EQ(calls, 2500);
    CHECK(!queue.busy());
}

/// Both of two threads whose calls are there at once know of it, and nobody else.
TEST(overlapping) {
    CallQueue queue;
    for (int round = 0; round < 1000; ++round) {
        auto first = std::make_unique<CallQueue::Slot>(queue, true);
        CHECK(!first->overlaps() && !first->is_joined());
        bool overlaps = false;
        std::thread other([&] {
            const CallQueue::Slot second(queue, true);
            overlaps = second.overlaps() && !second.is_joined();
        });
        while (!first->is_joined()) {  // leave as soon as the other is there
        }
        first.reset();
        other.join();
        CHECK(overlaps);
    }
    const WorkPtr pending = queue.submit([] { std::this_thread::sleep_for(milliseconds(5)); });
    const CallQueue::Slot after(queue, true);  // behind what is queued, which is no call of another thread
    CHECK(!after.overlaps() && !after.is_joined());
}

TEST(in_order) {
    CallQueue queue;
    std::vector<int> order;
    std::vector<WorkPtr> works;
    std::atomic<bool> go = false;
    for (int i = 0; i < 20; ++i) {
        works.push_back(queue.submit([&order, &go, i] {
            while (i % 5 == 4 && !go) std::this_thread::yield();
            order.push_back(2 * i);
        }));
        if (i % 5 != 4) {
            works.push_back(queue.submit([&order, i] { order.push_back(2 * i + 1); }));
            continue;
        }
        CHECK(queue.busy());
        go = true;
        const CallQueue::Slot slot(queue);  // waits for all that were queued before
        CHECK_EQ(order.size(), static_cast<size_t>(2 * i + 1));
        order.push_back(2 * i + 1);
        go = false;
    }
    for (const WorkPtr& work : works) CHECK(work->wait(20));
    for (int i = 0; i < 40; ++i) CHECK_EQ(order[static_cast<size_t>(i)], i);
}

TEST(works_tell) {
    CallQueue queue;
    std::atomic<bool> go = false;
    CHECK(!CallQueue::on_worker());
    bool on_worker = false;
    const WorkPtr slow = queue.submit([&] {
        on_worker = CallQueue::on_worker();
        while (!go) std::this_thread::yield();
    });
    const WorkPtr bad = queue.submit([] { throw std::runtime_error("no"); });
    const WorkPtr next = queue.submit([] {});
    CHECK(!slow->wait(0.05) && !slow->done() && !slow->error());
    go = true;
    CHECK(slow->wait(-1) && slow->done() && !slow->error() && on_worker);
    for (int i = 0; i < 2; ++i)  // it throws as often as it is asked
        CHECK_EQ(testing::thrown([&] { bad->wait(20); }), std::string("no"));
    CHECK(bad->done() && bad->error());
    CHECK(next->wait(20));
}

TEST(destructor_finishes) {
    int done = 0;
    WorkPtr last;
    {
        CallQueue queue;
        for (int i = 0; i < 10; ++i) {
            last = queue.submit([&] {
                std::this_thread::sleep_for(milliseconds(1));
                ++done;
            });
        }
    }
    CHECK_EQ(done, 10);
    CHECK(last->done());
}

/// Who waits runs what is queued, in order and in turn; what nobody waits for is run all the same.
TEST(waiters_help) {
    CallQueue queue(CallQueue::Waiters::help);
    queue.submit([] {})->wait(20);  // its thread dozes from now on
    const auto me = std::this_thread::get_id();
    int here = 0, calls = 0;
    for (int i = 0; i < 2000; ++i) {
        const auto call = [&, i] {
            const CallQueue::Slot nested(queue);
            here += std::this_thread::get_id() == me && !CallQueue::on_worker();
            CHECK(calls == 2 * i || calls == 2 * i + 1);
            ++calls;
        };
        queue.submit(call);
        CHECK(queue.submit(call)->wait(-1));
    }
    CHECK_EQ(calls, 4000);
    CHECK(here > 2000);
    std::atomic<bool> ran = false;
    queue.submit([&] { ran = true; });
    testing::eventually([&] { return ran.load(); });
}

/// The queue ends while another thread runs its last call.
TEST(helped_to_the_end) {
    std::atomic<bool> begun = false, done = false;
    WorkPtr work;
    std::thread helper;
    {
        CallQueue queue(CallQueue::Waiters::help);
        queue.submit([] {})->wait(20);
        work = queue.submit([&] {
            begun = true;
            std::this_thread::sleep_for(milliseconds(50));
            done = true;
        });
        helper = std::thread([&] { work->wait(-1); });
        while (!begun) std::this_thread::yield();
    }
    CHECK(done && work->done());
    helper.join();
}

/// Ctrl-C in a call that a waiter runs ends the wait with it, once, and the call with an error.
TEST(helper_interrupted) {
    CallQueue queue(CallQueue::Waiters::help);
    for (int i = 0; i < 50; ++i) {
        queue.submit([] {})->wait(20);
        const auto me = std::this_thread::get_id();
        bool here = false;
        const WorkPtr work = queue.submit([&] {
            here = std::this_thread::get_id() == me;
            if (here) throw std::runtime_error("interrupted");
        });
        const std::string first = testing::thrown([&] { work->wait(-1); });
        const std::string second = testing::thrown([&] { work->wait(-1); });
        CHECK_EQ(first == "interrupted", here);
        CHECK_EQ(second.find("the call was interrupted") != std::string::npos, here);
    }
    CHECK(!queue.busy());
}

/// Ctrl-C while waiting for the turn: the call ends with it, and those behind it get theirs.
TEST(interrupted) {
    CallQueue queue;
    std::atomic<bool> go = false;
    std::atomic<int> interrupts = 0;
    queue.on_interrupt = [&] {
        ++interrupts;
        go = true;  // as an abort would end what holds the turn
    };
    const WorkPtr blocker = queue.submit([&] {
        while (!go) std::this_thread::yield();
    });
    hooks().poll = [] { throw std::runtime_error("interrupted"); };
    CHECK_EQ(testing::thrown([&] { const CallQueue::Slot slot(queue); }), std::string("interrupted"));
    hooks().poll = nullptr;
    CHECK_EQ(interrupts.load(), 1);
    CHECK(blocker->wait(20));
    {
        const CallQueue::Slot slot(queue);
    }
    CHECK(queue.submit([] {})->wait(20));
    CHECK(!queue.busy());
}

}  // namespace
