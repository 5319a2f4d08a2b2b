#include "runtime/settings.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stdexcept>

#include "runtime/faults.h"

namespace alltoallv::emulator {
namespace {

constexpr double most = 1e9;

double number(const std::string& name, const std::string& text) {
    char* end = nullptr;
    const double value = std::strtod(text.c_str(), &end);
    if (text.empty() || *end != 0 || !(std::abs(value) <= most))
        throw std::invalid_argument(name + " is '" + text + "', expected a number up to 1e9");
    return value;
}

int version(const std::string& text) {
    int major = 0, minor = 0, release = 0, length = 0;
    const int read = std::sscanf(text.c_str(), "%2d.%2d.%2d%n", &major, &minor, &release, &length);
    if (read != 3 || length != static_cast<int>(text.size()) || major < 0 || minor < 0 || release < 0)
        throw std::invalid_argument("cann_version is '" + text + "', expected MAJOR.MINOR.RELEASE, such as 8.5.0");
    return 10000 * major + 100 * minor + release;
}

int devices(const std::string& name, const std::string& text) {
    const double count = number(name, text);
    if (count < 0 || count > 1024) throw std::invalid_argument("devices is " + text + ", expected 0 to 1024");
    return static_cast<int>(count);
}

struct Setting {
    const char* name;
    void (*assign)(Settings& settings, const std::string& name, const std::string& value);
};

/// Assigns a number.
template <auto member>
constexpr auto as_number = [](Settings& settings, const std::string& name, const std::string& value) {
    using Value = decltype((settings.*member).load());
    settings.*member = static_cast<Value>(number(name, value));
};

constexpr Setting all_settings[] = {
    {"devices", [](auto& settings, auto& name, auto& value) { settings.devices = devices(name, value); }},
    {"memory_mb", as_number<&Settings::memory_mb>},
    {"task_delay_us", as_number<&Settings::task_delay_us>},
    {"connect_timeout", as_number<&Settings::connect_timeout>},
    {"exec_timeout", as_number<&Settings::exec_timeout>},
    {"late_counts", as_number<&Settings::late_counts>},
    {"verbose", as_number<&Settings::verbose>},
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
        if (value == nullptr) continue;
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
    throw std::invalid_argument("'" + name + "' is no setting of the emulator");
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
