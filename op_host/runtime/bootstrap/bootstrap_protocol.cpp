// Messages, checks and error texts of the bootstrap.
#include "runtime/bootstrap/bootstrap_protocol.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <map>

#include "runtime/base/seconds_text.h"
#include "runtime/bootstrap/unix_socket.h"
#include "runtime/core/regions.h"

namespace alltoallv {

namespace {

constexpr uint32_t magic = 0x76326132;  // "2a2v"
constexpr int max_ranks = 4096;
constexpr size_t max_text_bytes = 8192;  // job, domain and settings each; the three fit in one message

// The beginning of every message, equal in all versions.
struct Prefix {
    uint32_t magic, version, kind;
    int32_t value;
};

struct HelloBody {
    int32_t size;
    uint32_t job_bytes, domain_bytes, settings_bytes;
    uint64_t control_bytes;
};

template <class T>
std::string_view bytes_of(const T& value) {
    return {reinterpret_cast<const char*>(&value), sizeof(T)};
}

template <class T>
bool take(std::string_view& from, T& value) {
    if (from.size() < sizeof(T)) return false;
    std::memcpy(&value, from.data(), sizeof(T));
    from.remove_prefix(sizeof(T));
    return true;
}

bool take(std::string_view& from, std::string& text, size_t bytes) {
    if (from.size() < bytes) return false;
    text.assign(from.substr(0, bytes));
    from.remove_prefix(bytes);
    return true;
}

std::map<std::string, std::string> parse_settings(std::string_view text) {
    std::map<std::string, std::string> settings;
    while (!text.empty()) {
        const std::string_view item = text.substr(0, text.find(';'));
        text.remove_prefix(std::min(text.size(), item.size() + 1));
        if (item.empty()) continue;
        const size_t equals = std::min(item.find('='), item.size());
        settings[std::string(item.substr(0, equals))] = item.substr(std::min(item.size(), equals + 1));
    }
    return settings;
}

std::string rank_text(int rank) {
    return "rank " + std::to_string(rank);
}

std::string own_name(const BootstrapOptions& options) {
    return "rank " + std::to_string(name_of(options, options.rank)) + " (pid " + std::to_string(getpid()) + ")";
}

void check_settings(const BootstrapOptions& joining, const BootstrapOptions& present) {
    const auto theirs = parse_settings(joining.settings), ours = parse_settings(present.settings);
    auto keys = ours;
    keys.insert(theirs.begin(), theirs.end());
    const auto say = [](const auto& settings, const std::string& key) {
        const auto entry = settings.find(key);
        return entry == settings.end() ? key + " unset" : key + " = '" + entry->second + "'";
    };
    for (const auto& [key, unused] : keys) {
        const std::string their = say(theirs, key), our = say(ours, key);
        if (their == our) continue;
        throw invalid_param(1087, rank_text(joining.rank), " has ", their, ", ", rank_text(present.rank), " has ", our,
                            ": settings of domain '", present.domain, "' must be equal on every rank");
    }
}

}  // namespace

std::string encode(MessageKind kind, int32_t value, std::string_view body) {
    std::string data(bytes_of(Prefix{magic, protocol_version, static_cast<uint32_t>(kind), value}));
    return data.append(body);
}

std::optional<Packet> decode(std::string_view data) {
    Prefix prefix{};
    if (!take(data, prefix) || prefix.magic != magic) return std::nullopt;
    return Packet{prefix.version, static_cast<MessageKind>(prefix.kind), prefix.value, data};
}

std::string encode_failure(const Error& error, const BootstrapOptions& options) {
    const auto code = static_cast<int32_t>(error.code());
    std::string text(error.what());
    const bool own = error.kind() == ErrorClass::backend_unavailable || error.kind() == ErrorClass::resource;
    if (own && !text.starts_with("rank ")) text = own_name(options) + ": " + text;
    return encode(MessageKind::failure, static_cast<int32_t>(error.kind()),
                  std::string(bytes_of(code)).append(text, 0, max_message_bytes / 2));
}

Error decode_failure(const Packet& packet) {
    std::string_view body = packet.body;
    int32_t code = 0;
    if (!take(body, code) || packet.value < 0 || packet.value > static_cast<int32_t>(ErrorClass::resource))
        return peer_lost(4005, "a rank failed during bootstrap with a message that cannot be read");
    return {static_cast<ErrorClass>(packet.value), static_cast<ErrorType>(code), std::string(body)};
}

std::string encode_hello(const BootstrapOptions& options) {
    const auto bytes = [](const std::string& text) { return static_cast<uint32_t>(text.size()); };
    const HelloBody body{options.size, bytes(options.job), bytes(options.domain), bytes(options.settings),
                         options.control_bytes};
    return encode(MessageKind::hello, options.rank,
                  joined(bytes_of(body), options.job, options.domain, options.settings));
}

std::optional<BootstrapOptions> decode_hello(const Packet& packet) {
    if (packet.kind != MessageKind::hello) return std::nullopt;
    BootstrapOptions hello;
    hello.rank = packet.value;
    if (packet.version != protocol_version) return hello;
    HelloBody fixed{};
    std::string_view body = packet.body;
    if (!take(body, fixed) || !take(body, hello.job, fixed.job_bytes) ||
        !take(body, hello.domain, fixed.domain_bytes) || !take(body, hello.settings, fixed.settings_bytes)) {
        return std::nullopt;
    }
    hello.size = fixed.size;
    hello.control_bytes = fixed.control_bytes;
    return hello;
}

void check_options(const BootstrapOptions& options) {
    if (options.size < 1 || options.size > max_ranks)
        throw invalid_param(1088, "size is ", options.size, ", expected 1 to ", max_ranks);
    if (options.rank < 0 || options.rank >= options.size)
        throw no_rank("rank", std::to_string(options.rank), options.size);
    if (!(options.timeout >= 0)) throw invalid_param(1090, "timeout is ", options.timeout, ", expected seconds >= 0");
    for (const auto& [name, text] : {std::pair{"job", &options.job}, std::pair{"domain", &options.domain},
                                     std::pair{"settings", &options.settings}}) {
        if (text->size() > max_text_bytes) {
            throw invalid_param(1013, name, " has ", text->size(), " bytes, expected at most ", max_text_bytes);
        }
    }
}

std::optional<Error> why_no_member(uint32_t version, const BootstrapOptions& joining, const BootstrapOptions& present) {
    const std::string their = rank_text(joining.rank), our = rank_text(present.rank);
    if (version != protocol_version) {
        return invalid_param(1091, their, " speaks version ", version, " of the bootstrap, ", our, " version ",
                             protocol_version, ": every rank must use the same release of alltoallv");
    }
    if (joining.domain != present.domain || joining.job != present.job) {
        return invalid_param(1092, their, " asks for another domain or job than ", our, ", whose domain is '",
                             present.domain, "'");
    }
    return std::nullopt;
}

void check_joining(const BootstrapOptions& joining, const BootstrapOptions& present) {
    const std::string their = rank_text(joining.rank), our = rank_text(present.rank);
    const std::string domain = "domain '" + present.domain + "'";
    if (joining.size != present.size) {
        throw invalid_param(1093, their, " says the ", domain, " has ", joining.size, " ranks, ", our, " says ",
                            present.size);
    }
    if (joining.rank < 0 || joining.rank >= present.size)
        throw invalid_param(1094, their, " joined ", domain, ", expected ranks 0 to ", present.size - 1);
    if (joining.control_bytes != present.control_bytes) {
        throw invalid_param(1095, their, " wants a control segment of ", joining.control_bytes, " bytes for ", domain,
                            ", ", our, " one of ", present.control_bytes);
    }
    check_settings(joining, present);
}

Error joined_twice(const BootstrapOptions& joining, pid_t first, pid_t second) {
    const std::string who = first == second ? "from two threads of pid " + std::to_string(first)
                                            : "as pid " + std::to_string(first) + " and pid " + std::to_string(second);
    return invalid_param(1096, rank_text(joining.rank), " joined domain '", joining.domain, "' twice, ", who);
}

Error absent_error(const BootstrapOptions& options, double seconds, const std::vector<int>& ranks,
                   const std::string& had_not, const std::string& why) {
    std::string list;
    for (const int rank : ranks) list += (list.empty() ? "" : ", ") + std::to_string(name_of(options, rank));
    return comm_timeout(4006, "after ", seconds_text(seconds), (ranks.size() == 1 ? " rank " : " ranks "), list, " of ",
                        options.size, " ", had_not, " ", describe(options), why, options.cure);
}

Error gave_up_error(const BootstrapOptions& options) {
    return peer_lost(4007, own_name(options), " gave up while joining ", describe(options));
}

std::string describe(const BootstrapOptions& options) {
    return "domain '" + options.domain + "' (job '" + options.job + "')";
}

UniqueFd make_control_segment(size_t bytes) {
#ifndef MFD_NOEXEC_SEAL
    constexpr unsigned MFD_NOEXEC_SEAL = 8;  // Linux 6.3; required where executable memfds are forbidden
#endif
    constexpr unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
    UniqueFd fd(::memfd_create("alltoallv-control", flags | MFD_NOEXEC_SEAL));
    if (!fd && errno == EINVAL) fd.reset(::memfd_create("alltoallv-control", flags));
    if (!fd) throw system_error("cannot create the shared control segment", errno);
    if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0)
        throw system_error("cannot size the shared control segment to " + std::to_string(bytes) + " bytes", errno);
    // Nobody may resize it: access beyond the end of the file would kill a process that has mapped it.
    if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
        throw system_error("cannot seal the shared control segment", errno);
    return fd;
}

Patience::Patience(const BootstrapOptions& options)
    : poll_(options.poll), deadline_(after(options.timeout)), polled_(Clock::now()), warning_(options.warn_after) {}

void Patience::tick() {
    const auto now = Clock::now();
    if (now - polled_ < std::chrono::milliseconds(50)) return;
    polled_ = now;
    if (poll_) poll_();
}

void Patience::warn(const std::function<Error(double)>& absent) {
    if (!expired()) warning_.look([&](double seconds) { return std::string(absent(seconds).what()); });
}

int Patience::slice_ms(int limit_ms) const {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline_ - Clock::now());
    return static_cast<int>(std::clamp<int64_t>(left.count(), 0, std::min(limit_ms, 50)));
}

}  // namespace alltoallv
