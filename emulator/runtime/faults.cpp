#include "runtime/faults.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <unordered_map>
#include <vector>

#include "runtime/failure.h"
#include "runtime/settings.h"

namespace alltoallv::emulator {
namespace {

struct Rule {
    std::string function;  // may end in '*'
    int rank = -1;         // -1 means any
    int call = 0;          // 0 means any
    Fault fault;

    bool matches(const std::string& name, int of_rank, int of_call) const {
        const bool open = function.back() == '*';
        const bool named = open ? name.starts_with(function.substr(0, function.size() - 1)) : name == function;
        return named && (rank < 0 || rank == of_rank) && (call == 0 || call == of_call);
    }
};

struct Faults {
    std::mutex mutex;
    std::vector<Rule> rules;
    std::unordered_map<std::string, int> calls;
};

Faults& faults = *new Faults;  // never destroyed: threads use it to the end

struct ActionInfo {
    const char* name;
    Action action;
    bool needs_number, on_stream;
};
constexpr ActionInfo actions[] = {{"fail", Action::fail, true, false},   {"async", Action::async, true, true},
                                  {"delay", Action::delay, true, false}, {"zeros", Action::zeros, false, true},
                                  {"skip", Action::skip, false, true},   {"die", Action::die, false, false}};

Rule parse(const std::string& text) {
    const auto wrong = [&](const std::string& why) {
        return std::invalid_argument("fault '" + text + "': " + why +
                                     "; expected FUNCTION[@RANK][#CALL]=fail:N|async:N|delay:MS|zeros|skip|die");
    };
    const auto number = [&](const std::string& digits) {
        int value = 0;
        const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
        if (error == std::errc::result_out_of_range) throw wrong("a number is too large");
        if (error != std::errc{} || end != digits.data() + digits.size() || value < 0)
            throw wrong("'" + digits + "' is not a number");
        return value;
    };
    const size_t equal = text.find('=');
    if (equal == std::string::npos) throw wrong("there is no '='");
    const std::string head = text.substr(0, equal), action = text.substr(equal + 1);
    const auto part = [&](char mark) {  // from behind the mark to the next one
        const size_t begin = head.find(mark) + 1;
        return head.substr(begin, head.find_first_of("@#", begin) - begin);
    };
    Rule rule;
    rule.function = head.substr(0, head.find_first_of("@#"));
    if (rule.function.empty()) throw wrong("there is no function");
    if (head.find('@') != std::string::npos) rule.rank = number(part('@'));
    if (head.find('#') != std::string::npos) rule.call = number(part('#'));
    const size_t colon = action.find(':');
    const std::string name = action.substr(0, colon);
    const auto* known = std::ranges::find(actions, name, &ActionInfo::name);
    if (known == std::end(actions)) throw wrong("'" + name + "' is not an action");
    if (colon != std::string::npos) rule.fault.number = number(action.substr(colon + 1));
    if (known->needs_number && rule.fault.number == 0) throw wrong("'" + name + "' needs a number other than 0");
    if (!known->needs_number && colon != std::string::npos) throw wrong("'" + name + "' takes no number");
    if (known->on_stream && !rule.function.starts_with("Hccl")) throw wrong("'" + name + "' is for HCCL's collectives");
    rule.fault.action = known->action;
    return rule;
}

/// Returns the text without spaces around it.
std::string stripped(const std::string& text) {
    const size_t begin = std::min(text.find_first_not_of(' '), text.size());
    return text.substr(begin, text.find_last_not_of(' ') + 1 - begin);
}

}  // namespace

void set_faults(const std::string& rules) {
    std::vector<Rule> parsed;
    std::istringstream stream(rules);
    for (std::string text; std::getline(stream, text, ';');)
        if (const std::string rule = stripped(text); !rule.empty()) parsed.push_back(parse(rule));
    const std::lock_guard lock(faults.mutex);
    if (parsed.empty()) faults.rules.clear();
    faults.rules.insert(faults.rules.end(), parsed.begin(), parsed.end());
    faults.calls.clear();
}

std::optional<Fault> fault_of(const char* function) {
    (void)settings();  // reads the rules of the environment
    const std::lock_guard lock(faults.mutex);
    if (faults.rules.empty()) return std::nullopt;
    const int call = ++faults.calls[function];
    const int rank = process_rank();
    for (const Rule& rule : faults.rules)
        if (rule.matches(function, rank, call)) return rule.fault;
    return std::nullopt;
}

int apply_at_call(const char* function, const std::optional<Fault>& fault) {
    if (!fault) return 0;
    if (fault->action == Action::die) die(function);
    if (fault->action == Action::delay) std::this_thread::sleep_for(std::chrono::milliseconds(fault->number));
    if (fault->action != Action::fail) return 0;
    return report(function, fault->number, "fails because a fault was requested");
}

void die(const char* function) {
    std::fprintf(stderr, "[alltoallv emulator] %s: the process dies because a fault was requested\n", function);
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

}  // namespace alltoallv::emulator
