// Binds communicators between hosts: they agree over TCP and move data by shared memory within a host, else by a mover.
#include <algorithm>
#include <numeric>

#include "bindings/bindings.h"
#include "bindings/text.h"
#include "runtime/base/place.h"
#include "runtime/bootstrap/registry.h"
#include "runtime/control/liveness.h"
#include "runtime/core/hooks.h"
#include "runtime/hosts/tcp_communicator.h"
#include "runtime/hosts/tcp_connections.h"
#include "runtime/hosts/tcp_mesh.h"
#include "runtime/shm/arena.h"
#include "runtime/shm/shm_communicator.h"

namespace alltoallv {
namespace {

/// A Python engine, such as MPI: an object with `name`, `begin`, `progress`, `missing` and `close` like the methods of
/// `Mover`; it takes pieces as tuples of rank, address and bytes.
class PythonMover final : public Mover {
  public:
    explicit PythonMover(nb::object engine) : engine_(std::move(engine)) {}
    ~PythonMover() override {
        const GilHeld acquire;
        engine_.reset();
    }

    std::string name() const override {
        const GilHeld acquire;
        return nb::cast<std::string>(engine_.attr("name"));
    }
    void begin(std::span<const Outgoing> out, std::span<const Incoming> in) override {
        const GilHeld acquire;
        engine_.attr("begin")(listed(out), listed(in));
    }
    bool progress() override {
        const GilHeld acquire;
        return nb::cast<bool>(engine_.attr("progress")());
    }
    std::vector<int> missing() const override {
        const GilHeld acquire;
        return nb::cast<std::vector<int>>(engine_.attr("missing")());
    }
    void close() override {
        const GilHeld acquire;
        engine_.attr("close")();
    }

  private:
    template <class Piece>
    static nb::list listed(std::span<const Piece> pieces) {
        nb::list list;
        for (const Piece& piece : pieces)
            list.append(nb::make_tuple(piece.rank, reinterpret_cast<uintptr_t>(piece.data), piece.bytes));
        return list;
    }

    nb::object engine_;
};

/// Gives a communicator the engines that carry its data. Collective.
CommunicatorPtr equip(const CommunicatorOptions& options, const std::shared_ptr<TcpCommunicator>& tcp,
                      std::unique_ptr<Mover> between) {
    try {
        const auto look = [&] {
            if (!tcp->usable()) gather_texts(*tcp, "");  // throws the error that has ended it
        };
        Carriers carriers;
        std::vector<int> on_host, others;
        for (int j = 0; j < options.size; ++j) (tcp->on_this_host(j) ? on_host : others).push_back(j);
        if (on_host.size() > 1) {
            CommunicatorOptions local = options;
            local.rank = static_cast<int>(std::find(on_host.begin(), on_host.end(), options.rank) - on_host.begin());
            local.size = static_cast<int>(on_host.size());
            local.job = tcp->local_job();
            local.names = on_host;
            local.processes = {};
            for (const int j : on_host) local.processes.push_back(tcp->processes()[static_cast<size_t>(j)]);
            carriers.within = make_shm_part(local, look);
            carriers.on_host = on_host;
        } else {
            carriers.memory = std::make_shared<ArenaBudget>(Arena::instance(), options.budget_bytes());
        }
        TcpConnectionsOptions connections;
        connections.rank = options.rank;
        connections.secret = tcp->secret();
        std::vector<int> all(static_cast<size_t>(options.size));
        std::iota(all.begin(), all.end(), 0);
        std::erase(all, options.rank);
        connections.peers = {all};
        if (between == nullptr) connections.peers.push_back(carriers.within ? others : all);
        connections.timeout = options.timeout;
        connections.poll = [&, alive = Liveness::poll(options)] {
            look();
            alive();
        };
        connections.gather = [&](const std::string& card) { return gather_texts(*tcp, card); };
        std::vector<std::vector<UniqueFd>> sockets = connect_ranks(connections);
        if (between == nullptr) between = std::make_unique<TcpMesh>(std::move(sockets[1]));
        carriers.between = std::move(between);
        tcp->carry_by(std::move(carriers), std::move(sockets[0]));
        gather_texts(*tcp, "+");  // so that either all ranks have it or none
    } catch (const Error& error) {
        tcp->give_up(error);
        throw;
    } catch (const nb::python_error& error) {
        const auto [type, text] = words_of(error.value());
        tcp->abort(type + ": " + text);
        throw;
    } catch (const std::exception& error) {
        tcp->abort(error.what());
        throw;
    }
    return tcp;
}

}  // namespace

void bind_hosts(nb::module_& m) {
    m.def("this_place", &this_place, "Equal for processes that can share memory.");
    m.def(
        "hosts_communicator",
        [](const CommunicatorOptions& options, const std::string& host, int port) {
            return find_or_make_communicator(options, [&](const CommunicatorOptions& of) {
                return equip(of, make_tcp_communicator(of, TcpAddress{host, port}), nullptr);
            });
        },
        ReleaseGil(), "options"_a, "host"_a, "port"_a,
        "The communicator of ranks on several hosts, made if need be: rank 0 listens at that port of that host until "
        "all have come. Data go over TCP between hosts, through shared memory inside.");
    m.def(
        "engine_communicator",
        [](const CommunicatorOptions& options, const std::function<std::vector<nb::bytes>(nb::bytes)>& gather,
           nb::object engine) -> CommunicatorPtr {
            std::unique_ptr<Mover> between;
            if (!engine.is_none()) between = std::make_unique<PythonMover>(std::move(engine));
            const GatherBytes gather_bytes = [&](const std::string& own) {
                const GilHeld acquire;
                std::vector<std::string> all;
                for (const nb::bytes& text : gather(nb::bytes(own.data(), own.size())))
                    all.emplace_back(text.c_str(), text.size());
                return all;
            };
            const GilReleased release;
            std::string failure;
            const auto communicator = make_tcp_communicator(options, gather_bytes, failure);
            if (!communicator)
                throw backend_unavailable(5005, "domain '", options.domain,
                                          "' found no way between its hosts: ", failure);
            return destroyed_with_all(equip(options, communicator, std::move(between)));
        },
        "options"_a, "gather"_a, "engine"_a.none(),
        "A new communicator of ranks on several hosts that have an engine already: `gather` hands everybody the bytes "
        "that all ranks give, in their order; `engine` carries the data, None: TCP.");
}

}  // namespace alltoallv
