// Faults that tests inject.
//
// Rules are separated by semicolons: FUNCTION[@RANK][#CALL]=ACTION[:NUMBER]. FUNCTION may end in '*'. RANK is the
// process's; CALL counts the function's calls in this process from 1. Without them a rule holds on every rank and for
// every call. Examples: "HcclAlltoAllV=zeros", "HcclAllReduce@1#3=fail:4", "HcclCommInitRootInfoConfig@2=die".
#pragma once

#include <optional>
#include <string>

namespace alltoallv::emulator {

enum class Action {
    fail,   ///< the call returns NUMBER and does nothing
    async,  ///< the task fails on its stream with HcclResult NUMBER after the peers have done their part
    delay,  ///< the call (of a collective: the task) starts NUMBER milliseconds late
    zeros,  ///< the task of a collective fills the output with zeros and succeeds
    skip,   ///< the task of a collective does nothing and succeeds: the peers wait in vain
    die,    ///< the process gets SIGKILL (of a collective: when its task runs)
};

struct Fault {
    Action action;
    int number = 0;
};

/// Adds rules; an empty text removes all of them. Throws std::invalid_argument.
void set_faults(const std::string& rules);

/// Counts a call of `function` and returns the fault that applies to it.
std::optional<Fault> fault_of(const char* function);

/// Applies the faults of a function call: delay, die, and fail, for which it returns a number other than 0. `deferred`
/// leaves faults of a stream's task to the caller.
int apply_at_call(const char* function, const std::optional<Fault>& fault);

/// Ends the process, for the fault `die`.
[[noreturn]] void die(const char* function);

}  // namespace alltoallv::emulator
