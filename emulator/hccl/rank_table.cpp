#include "hccl/rank_table.h"

#include <regex>
#include <set>

#include "runtime/abi/hccl.h"
#include "runtime/failure.h"

namespace alltoallv::emulator {
namespace {

/// Returns all values of a key, anywhere in the text. Numbers are strings in a rank table.
std::vector<std::string> values_of(const std::string& text, const std::string& key) {
    const std::regex pattern("\"" + key + "\"\\s*:\\s*\"([^\"]*)\"");
    std::vector<std::string> values;
    for (std::sregex_iterator match(text.begin(), text.end(), pattern), end; match != end; ++match)
        values.push_back((*match)[1]);
    return values;
}

template <class... Parts>
Failure wrong(const Parts&... why) {
    return Failure(HCCL_E_PARA, "the rank table is not valid: ", why...);
}

std::string only(const std::string& text, const std::string& key) {
    const std::vector<std::string> values = values_of(text, key);
    if (values.size() != 1) throw wrong("it has ", values.size(), " strings \"", key, "\", expected 1");
    return values[0];
}

}  // namespace

uint32_t ranks_of_table(const std::string& text) {
    const std::string status = only(text, "status");
    if (status == "initializing") throw Failure(HCCL_E_UNAVAIL, "the rank table's status is 'initializing'");
    if (status != "completed") throw wrong("status is '", status, "', expected 'completed'");
    const std::string version = only(text, "version");
    if (version != "1.0" && version != "1.2") throw wrong("version is '", version, "', expected '1.0' or '1.2'");
    const std::vector<std::string> ranks = values_of(text, "rank_id");
    std::set<unsigned long> seen;
    for (const std::string& rank : ranks) {
        const bool digits = !rank.empty() && rank.find_first_not_of("0123456789") == std::string::npos;
        if (!digits || rank.size() > 9 || !seen.insert(std::stoul(rank)).second || std::stoul(rank) >= ranks.size())
            throw wrong("rank_id '", rank, "' is not a number, occurs twice, or is not below ", ranks.size());
    }
    if (ranks.empty()) throw wrong("there is no \"rank_id\"");
    if (values_of(text, "device_id").size() != ranks.size()) throw wrong("not every rank has a \"device_id\"");
    return static_cast<uint32_t>(ranks.size());
}

}  // namespace alltoallv::emulator
