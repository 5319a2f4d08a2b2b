/// \file flight.h
/// \brief The flight record: the last operators of ranks, to find out later what each of them was doing.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/base/dtype.h"
#include "runtime/base/processors.h"
#include "runtime/core/collective.h"

namespace alltoallv {

/// Number of operators that a rank remembers.
inline constexpr size_t flight_length = 64;

enum class FlightState : uint8_t { running, done, failed };

struct FlightOperator {
    uint64_t seq = 0;
    OpKind op{};
    DType dtype{};
    FlightState state = FlightState::running;
    uint64_t bytes = 0, start_ns = 0, end_ns = 0;
};

struct FlightOfRank {
    int rank = 0;
    uint64_t pid = 0;
    bool left = false;
    std::vector<FlightOperator> operators;  ///< by `seq`
};

/// Returns nanoseconds of the clock of `start_ns` and `end_ns`.
uint64_t flight_ns(Clock::time_point time = Clock::now());
inline int64_t now_ns() {
    return static_cast<int64_t>(flight_ns());
}

/// Returns a JSON string; a domain's name may contain any byte.
std::string json_string(const std::string& text);

/// Returns as JSON what rank `rank` of `size` knows of `ranks`.
std::string flight_json(const std::string& domain, int rank, int size, const std::vector<FlightOfRank>& ranks);

}  // namespace alltoallv
