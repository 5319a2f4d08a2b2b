#include "runtime/settings.h"

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <utility>

#include "runtime/faults.h"

namespace alltoallv::emulator {
namespace {

double number(const std::string& name, const std::string& text) {
    char* end = nullptr;
    const double value = std::strtod(text.c_str(), &end);
    if (text.empty() || *end != 0) throw std::invalid_argument(name + " is '" + text + "', expected a number");
    return value;
}

int version(const std::string& text) {
    int major = 0, minor = 0, release = 0, length = 0;
    const int read = std::sscanf(text.c_str(), "%2d.%2d.%2d%n", &major, &minor, &release, &length);
    if (read != 3 || length != static_cast<int>(text.size()) || major < 0 || minor < 0 || release < 0)
        throw std::invalid_argument("cann_version is '" + text + "', expected MAJOR.MINOR.RELEASE, such as 8.5.0");
    return 10000 * major + 100 * minor + release;
}

Order order(const std::string& text) {
    constexpr std::pair<const char*, Order> names[] = {
        {"rank", Order::rank}, {"ring", Order::ring}, {"halving", Order::halving}, {"length", Order::length}};
    for (const auto& [name, value] : names)
        if (text == name) return value;
    throw std::invalid_argument("order is '" + text + "', expected rank, ring, halving or length");
}

struct Setting {
    const char* name;
    void (*assign)(Settings& settings, const std::string& name, const std::string& value);
};

/// Assigns a number from 0 to a bound; -1, where it means that nothing is set, is `unset`.
template <auto member, int64_t most, bool unset = false>
constexpr auto as_number = [](Settings& settings, const std::string& name, const std::string& text) {
    const double value = number(name, text);
    if (!(value >= 0 && value <= most) && !(unset && value == -1))
        throw std::invalid_argument(name + " is " + text + ", expected 0 to " + std::to_string(most));
    using Value = decltype((settings.*member).load());
    settings.*member = static_cast<Value>(value);
};

constexpr Setting all_settings[] = {
    {"devices", as_number<&Settings::devices, 1024>},
    {"memory_mb", as_number<&Settings::memory_mb, 1 << 30>},
    {"task_delay_us", as_number<&Settings::task_delay_us, 1 << 30>},
    {"connect_timeout", as_number<&Settings::connect_timeout, 1 << 30, true>},
    {"exec_timeout", as_number<&Settings::exec_timeout, 1 << 30, true>},
    {"order", [](auto& settings, auto&, auto& value) { settings.order = order(value); }},
    {"late_counts", as_number<&Settings::late_counts, 1>},
    {"capturing", as_number<&Settings::capturing, 1>},
    {"verbose", as_number<&Settings::verbose, 1>},
    {"cann_version", [](auto& settings, auto&, auto& value) { settings.cann_version = version(value); }},
    {"faults", [](auto&, auto&, auto& value) { set_faults(value); }},
};

std::string variable(const std::string& name) {
    std::string text = "ALLTOALLV_EMULATOR_";
    for (const char c : name) text += static_cast<char>(c >= 'a' && c <= 'z' ? c - 'a' + 'A' : c);
    return text;
}

/// Reads the environment. Its errors must look different from the program's.
Settings* from_environment() {
    auto* settings = new Settings;  // never destroyed: streams use it until the process ends
    for (const auto& [name, assign] : all_settings) {
        const char* value = std::getenv(variable(name).c_str());
        if (value == nullptr || *value == 0) continue;
        try {
            assign(*settings, name, value);
        } catch (const std::exception& error) {
            std::fprintf(stderr, "[alltoallv emulator] environment variable %s: %s\n", variable(name).c_str(),
                         error.what());
            std::_Exit(2);
        }
    }
    return settings;
}

}  // namespace

Settings& settings() {
    static Settings* instance = from_environment();
    return *instance;
}

void set(const std::string& name, const std::string& value) {
    for (const Setting& setting : all_settings)
        if (name == setting.name) return setting.assign(settings(), name, value);
    throw std::invalid_argument("'" + name + "' is not a setting of the emulator");
}

int process_rank() {
    for (const char* name : {"RANK", "ALLTOALLV_RANK"})
        if (const char* text = std::getenv(name); text != nullptr && *text != 0) return std::atoi(text);
    return -1;
}

}  // namespace alltoallv::emulator

int AlltoallvEmulatorSet(const char* name, const char* value) {
    try {
        if (name == nullptr || value == nullptr) throw std::invalid_argument("name and value must not be null");
        alltoallv::emulator::set(name, value);
        return 0;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "[alltoallv emulator] AlltoallvEmulatorSet: %s\n", error.what());
        return -1;
    }
}
