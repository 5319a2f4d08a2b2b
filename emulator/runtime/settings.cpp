#include "runtime/settings.h"

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stdexcept>

#include "runtime/faults.h"

namespace alltoallv::emulator {
namespace {

constexpr const char* names[] = {"devices",     "memory_mb", "task_delay_us", "connect_timeout", "exec_timeout",
                                 "late_counts", "verbose",   "cann_version",  "faults"};

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

void assign(Settings& settings, const std::string& name, const std::string& value) {
    if (name == "faults") {
        set_faults(value);
    } else if (name == "devices") {
        const double count = number(name, value);
        if (count < 0 || count > 1024) throw std::invalid_argument("devices is " + value + ", expected 0 to 1024");
        settings.devices = static_cast<int>(count);
    } else if (name == "memory_mb") {
        settings.memory_mb = static_cast<int64_t>(number(name, value));
    } else if (name == "task_delay_us") {
        settings.task_delay_us = static_cast<int64_t>(number(name, value));
    } else if (name == "connect_timeout") {
        settings.connect_timeout = number(name, value);
    } else if (name == "exec_timeout") {
        settings.exec_timeout = number(name, value);
    } else if (name == "late_counts") {
        settings.late_counts = number(name, value) != 0;
    } else if (name == "verbose") {
        settings.verbose = number(name, value) != 0;
    } else if (name == "cann_version") {
        settings.cann_version = version(value);
    } else {
        throw std::invalid_argument("'" + name + "' is no setting of the emulator");
    }
}

std::string variable(const std::string& name) {
    std::string text = "ALLTOALLV_EMULATOR_";
    for (const char c : name) text += static_cast<char>(c >= 'a' && c <= 'z' ? c - 'a' + 'A' : c);
    return text;
}

/// Reads the environment. Its errors must look different from the program's.
Settings* from_environment() {
    auto* settings = new Settings;  // never destroyed: streams use it until the process ends
    for (const char* name : names) {
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
    assign(settings(), name, value);
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
