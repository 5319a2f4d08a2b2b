#include "runtime/simulated/simulated_world.h"
#include "runtime/core/mismatch.h"

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <numeric>
#include <optional>

#include "op_kernel/cpu/reduce.h"
#include "runtime/core/request.h"
#include "runtime/core/strided_region.h"

namespace alltoallv {
namespace {

/// What one rank asks for, or why it cannot.
struct Seat {
    OpKind op;
    DType dtype = DType::uint8;
    const Exchange* exchange = nullptr;
    const Reduction* reduction = nullptr;
    std::optional<Error> failure{};
};

/// One operator of all ranks.
struct Round {
    explicit Round(int size) : seats(static_cast<size_t>(size)) {}

    std::vector<std::optional<Seat>> seats;
    size_t came = 0;
    bool done = false;
    std::optional<Error> error{};
    std::condition_variable settled{};
};

std::string rank_text(size_t rank) {
    return "rank " + std::to_string(rank);
}

class World {
  public:
    World(int size, std::string domain) : size_(size), domain_(std::move(domain)) {}

    /// Takes a rank's part in operator `number`; with `waits` it returns when all ranks' are done.
    void meet(int rank, uint64_t number, Seat seat, double timeout, bool waits) {
        std::unique_lock lock(mutex_);
        if (ended_) throw *ended_;
        std::shared_ptr<Round>& place = rounds_[number];
        if (!place) place = std::make_shared<Round>(size_);
        const std::shared_ptr<Round> round = place;
        const OpKind op = seat.op;
        round->seats[static_cast<size_t>(rank)] = std::move(seat);
        if (++round->came == round->seats.size()) {
            rounds_.erase(number);
            lock.unlock();  // nobody else changes it now; an output may need Python's lock
            settle(*round, describe(op, number));
            lock.lock();
            round->done = true;
            round->settled.notify_all();
        } else if (waits) {
            await(lock, *round, describe(op, number), timeout);
        }
        if (waits && round->error) throw *round->error;
    }

    void end(const Error& reason) {
        const std::lock_guard lock(mutex_);
        end_locked(reason);
    }

    bool ended() const {
        const std::lock_guard lock(mutex_);
        return ended_.has_value();
    }

  private:
    std::string describe(OpKind op, uint64_t number) const {
        return "domain '" + domain_ + "', operator #" + std::to_string(number) + " " + std::string(name_of(op));
    }

    void end_locked(const Error& reason) {
        if (!ended_) ended_ = reason;
        for (const auto& [number, round] : rounds_) round->settled.notify_all();
    }

    void await(std::unique_lock<std::mutex>& lock, Round& round, const std::string& where, double timeout) {
        const auto complete = [&] { return round.came == round.seats.size(); };
        const auto over = [&] { return round.done || (ended_ && !complete()); };
        const auto limit = std::chrono::duration<double>(timeout);
        if (!round.settled.wait_for(lock, limit, [&] { return over() || complete(); })) {
            std::string absent;
            for (size_t j = 0; j < round.seats.size() && absent.size() < 200; ++j)
                if (!round.seats[j]) absent += (absent.empty() ? "" : ", ") + std::to_string(j);
            end_locked(comm_timeout(4041, where, ": these ranks did not come in ", timeout, " s: ", absent));
        }
        round.settled.wait(lock, over);
        if (!round.done) throw *ended_;
    }

    void settle(Round& round, const std::string& where) const {
        try {
            for (const std::optional<Seat>& seat : round.seats)
                if (seat->failure) throw *seat->failure;
            compare(round, where);
            if (round.seats[0]->exchange != nullptr)
                exchange(round, where);
            else
                reduce(round);
        } catch (const Error& error) {
            round.error = error;
        } catch (const std::bad_alloc&) {
            round.error = resource_error(5017, "no memory for what " + where + " needs");
        }
    }

    static void compare(const Round& round, const std::string& where) {
        const Seat& first = *round.seats[0];
        for (size_t j = 1; j < round.seats.size(); ++j) {
            const Seat& seat = *round.seats[j];
            const auto differ = [&](const std::string& of_first, const std::string& of_this) {
                return peer_mismatch(3013, where + ": rank 0 " + of_first + ", " + rank_text(j) + " " + of_this);
            };
            if (seat.op != first.op)
                throw differ("calls " + std::string(name_of(first.op)), "calls " + std::string(name_of(seat.op)));
            if (seat.dtype != first.dtype)
                throw differ("has dtype " + std::string(name_of(first.dtype)),
                             "has dtype " + std::string(name_of(seat.dtype)));
            const auto terms = [](const Seat& of) {
                using Numbers = std::vector<int64_t>;
                if (const Exchange* const x = of.exchange) return Numbers{x->root, x->row, x->terms, x->moves};
                const Reduction& r = *of.reduction;
                return Numbers{r.root,   total_count(r), static_cast<int64_t>(r.reduce_op),
                               r.leaves, r.ordered,      r.exclusive};
            };
            if (terms(seat) != terms(first))
                throw differ("has " + list_text(terms(first)), "has " + list_text(terms(seat)));
        }
    }

    static void exchange(const Round& round, const std::string& where) {
        const size_t size = round.seats.size(), element = size_of(round.seats[0]->dtype);
        const auto of = [&](size_t j) -> const Exchange& { return *round.seats[j]->exchange; };
        for (size_t j = 0; j < size; ++j)
            for (size_t i = 0; i < size && !of(j).recv_counts.empty(); ++i)
                if (of(i).send_counts[j] != of(j).recv_counts[i])
                    throw counts_disagree(where, rank_text(i), of(i).send_counts[j], rank_text(j),
                                          of(j).recv_counts[i]);
        for (size_t j = 0; j < size; ++j) {
            const Exchange& to = of(j);
            std::vector<int64_t> counts, packed(size);
            char* output = static_cast<char*>(to.output);
            if (to.recv_counts.empty()) {
                for (size_t i = 0; i < size; ++i) counts.push_back(of(i).send_counts[j]);
                pack(counts, packed);
                output = static_cast<char*>(to.allocate(counts));
            }
            const std::span<const int64_t> takes = counts.empty() ? to.recv_counts : std::span<const int64_t>(counts);
            for (size_t i = 0; to.moves && i < size; ++i) {
                if (takes[i] == 0) continue;
                const auto place = [&](const Exchange& x, int64_t displ) {
                    return displ * static_cast<int64_t>(x.byte_displs ? 1 : element);
                };
                const auto of_one = static_cast<int64_t>(element);
                const int64_t at = counts.empty() ? place(to, to.rdispls[i]) : packed[i] * of_one;
                copy_region(region_of(output + at, of_one, to.recv_steps, i),
                            region_of(static_cast<const char*>(of(i).input) + place(of(i), of(i).sdispls[j]), of_one,
                                      of(i).send_steps, j),
                            static_cast<size_t>(takes[i]) * element);
            }
        }
    }

    /// Computes the result once, apart from the inputs, of which outputs may be the same memory.
    static void reduce(const Round& round) {
        const Reduction& first = *round.seats[0]->reduction;
        if (!first.moves) return;
        const size_t element = size_of(first.dtype), bytes = static_cast<size_t>(total_count(first)) * element;
        std::vector<const void*> inputs;
        for (const std::optional<Seat>& seat : round.seats)
            for (size_t k = 0; k < inputs_per_rank(first); ++k)
                inputs.push_back(static_cast<const char*>(seat->reduction->input) + k * bytes);
        std::vector<char> result(bytes);
        kernel::reduce(first.dtype, first.reduce_op, result.data(), inputs.data(), inputs.size(), bytes / element,
                       first.leaves == 0 ? kernel::Order::sequence : kernel::Order::tree);
        for (size_t j = 0; j < round.seats.size(); ++j) {
            const Part part = result_part(*round.seats[j]->reduction, static_cast<int>(j));
            if (part.bytes > 0) std::memcpy(round.seats[j]->reduction->output, result.data() + part.begin, part.bytes);
        }
    }

    const int size_;
    const std::string domain_;
    mutable std::mutex mutex_;
    std::map<uint64_t, std::shared_ptr<Round>> rounds_;  // that not all ranks have come to
    std::optional<Error> ended_;
};

class SimulatedCommunicator final : public Communicator {
  public:
    SimulatedCommunicator(std::shared_ptr<World> world, int rank, int size, const std::string& domain, double timeout)
        : Communicator(rank, size, domain, CallQueue::Waiters::help), world_(std::move(world)), timeout_(timeout) {}
    ~SimulatedCommunicator() override {
        destroy_quietly();
        queue_.reset();
    }

    std::string backend() const override { return "simulated"; }
    void exchange(const Exchange& x, double timeout) override { run({x.op, x.dtype, &x, nullptr}, timeout); }
    void reduce(const Reduction& r, double timeout) override { run({r.op, r.dtype, nullptr, &r}, timeout); }
    void set_timeout(double seconds) override { timeout_ = seconds; }
    bool usable() const override { return !has_ended() && !world_->ended(); }
    std::string flight_record() const override { return "{}"; }

    void fail(OpKind op, const Error& error, bool /*of_caller*/) override {
        check_usable();
        queue_->run_or_submit([this, op, error] {
            failed_.fetch_add(1, std::memory_order_relaxed);
            world_->meet(rank(), ++number_, {op, DType::uint8, nullptr, nullptr, error}, 0, false);
        });
    }

    void abort(const std::string& reason) override {
        world_->end(
            peer_lost(4022, "domain '" + domain() + "': rank " + std::to_string(rank()) + " aborted: " + reason));
    }

  private:
    void run(Seat seat, double timeout) {
        check_usable();
        const CallQueue::Slot slot(*queue_, size() > 1);
        check_usable();
        world_->meet(rank(), ++number_, std::move(seat), timeout < 0 ? timeout_.load() : timeout, true);
        operators_.fetch_add(1, std::memory_order_relaxed);
    }

    void leave() override { destroyed_.store(true, std::memory_order_release); }

    const std::shared_ptr<World> world_;
    std::atomic<double> timeout_;
    uint64_t number_ = 0;  // of this rank's last operator
};

}  // namespace

std::vector<CommunicatorPtr> simulate(int size, const std::string& domain, double timeout) {
    const auto world = std::make_shared<World>(size, domain);
    std::vector<CommunicatorPtr> all;
    for (int rank = 0; rank < size; ++rank)
        all.push_back(make_communicator<SimulatedCommunicator>(world, rank, size, domain, timeout));
    return all;
}

}  // namespace alltoallv
