#include "runtime/control/trace.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <utility>

#include "runtime/core/hold.h"
#include "runtime/core/hooks.h"

namespace alltoallv {
namespace {

constexpr size_t header_bytes = 4096, step_bytes = size_t{1} << 20, most_bytes = size_t{1} << 30;

std::mutex folder_mutex;
std::string current_folder;

std::string host_name() {
    char name[256] = {};
    return gethostname(name, sizeof name - 1) == 0 ? name : "unknown";
}

/// Makes a text usable as part of a file name.
std::string plain(std::string text) {
    std::ranges::replace_if(text, [](unsigned char c) { return !std::isalnum(c) && c != '.' && c != '-'; }, '_');
    return text;
}

template <class Table>
std::string names_of(const Table& table) {
    std::string json;
    for (const auto& row : table) json += (json.empty() ? "[" : ", ") + json_string(std::string(row.name));
    return json + "]";
}

}  // namespace

std::atomic<uint64_t> Tracer::generation{0};

std::string set_trace_folder(const std::string& folder) {
    Tracer::take_environment();
    const std::lock_guard lock(folder_mutex);
    const uint64_t now = Tracer::generation.load(std::memory_order_relaxed), on = folder.empty() ? 0 : 1;
    Tracer::generation.store(now + 1 + (now + 1 + on) % 2, std::memory_order_release);
    return std::exchange(current_folder, folder);
}

void Tracer::take_environment() {
    static const bool once = [] {
        const char* folder = std::getenv("ALLTOALLV_TRACE");
        if (folder == nullptr || *folder == 0) return false;
        current_folder = folder;
        generation.store(1, std::memory_order_release);
        return true;
    }();
    (void)once;
}

Tracer::Tracer(std::string domain, int rank, int size)
    : domain_(std::move(domain)),
      rank_(rank),
      size_(size),
      stride_(sizeof(TraceRecord) + static_cast<size_t>(size) * sizeof(int64_t)) {
    take_environment();
}

Tracer::~Tracer() {
    for (const auto& file : files_)
        if (file->fd) (void)!ftruncate(file->fd.get(), static_cast<off_t>(file->used));
}

TraceRecord* Tracer::claim(uint64_t seq, OpKind op, DType dtype, Clock::time_point time) {
    std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock) {
        Hold::let_go_now();  // the thread that has the mutex may be waiting for it, to warn
        lock.lock();
    }
    if (const uint64_t now = generation.load(std::memory_order_acquire); now != opened_) {
        std::string folder;
        {
            const std::lock_guard of_folder(folder_mutex);
            folder = current_folder;
        }
        opened_ = now;
        const auto known = std::ranges::find(files_, folder, [](const auto& file) { return file->folder; });
        if (known != files_.end()) {
            std::rotate(known, known + 1, files_.end());
        } else if (!folder.empty()) {
            open(folder);
        }
    }
    if (files_.empty()) return nullptr;
    File& file = *files_.back();
    if (!file.fd || !grow(file, file.used + stride_)) return nullptr;
    auto* record = reinterpret_cast<TraceRecord*>(file.memory.data() + file.used);
    file.used += stride_;
    record->seq = seq;
    record->dtype = static_cast<uint32_t>(dtype);
    record->element = static_cast<uint32_t>(size_of(dtype));
    record->op = static_cast<uint16_t>(op);
    record->begin_ns.store(flight_ns(time), std::memory_order_release);
    return record;
}

void Tracer::end(TraceRecord& record, bool ok, uint64_t bytes, uint64_t now_ns) {
    record.bytes = bytes;
    record.state = static_cast<uint8_t>(ok ? FlightState::done : FlightState::failed);
    record.end_ns.store(now_ns, std::memory_order_release);
}

/// Opens the files. A folder that is not writable is reported once; the program continues.
void Tracer::open(const std::string& folder) {
    static std::atomic<int> number{0};
    std::error_code ignored;  // the file then cannot be opened
    std::filesystem::create_directories(folder, ignored);
    auto& file = *files_.emplace_back(std::make_unique<File>(File{folder, {}, {}, 0, 0}));
    const std::string name = folder + "/" + plain(domain_) + "-rank" + std::to_string(rank_) + "-" +
                             plain(host_name()) + "-" + std::to_string(getpid()) + "-" + std::to_string(++number) +
                             ".trace";
    UniqueFd fd(::open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
    if (!fd) {
        if (hooks().warn) hooks().warn("nothing is traced: " + name + " cannot be written: " + strerror(errno));
        return;
    }
    file.memory = Mapping(fd.get(), most_bytes);  // pages beyond the file's end are not touched before it grows
    file.fd = std::move(fd);
    if (!grow(file, header_bytes)) return;
    const std::string text = header();
    std::memcpy(file.memory.data(), text.data(), std::min(text.size(), header_bytes));
    file.used = header_bytes;
}

/// Returns false if the disk or the file is full; tracing then stops.
bool Tracer::grow(File& file, size_t size) {
    if (size <= file.size) return true;
    const size_t wanted = (size + step_bytes - 1) / step_bytes * step_bytes;
    if (wanted > most_bytes || posix_fallocate(file.fd.get(), 0, static_cast<off_t>(wanted)) != 0) {
        if (hooks().warn) hooks().warn("nothing more of domain '" + domain_ + "' is traced: disk or file are full");
        (void)!ftruncate(file.fd.get(), static_cast<off_t>(std::max(file.used, file.size)));
        file.fd = {};
        return false;
    }
    file.memory.populate_pages(file.size, wanted - file.size);  // a page fault costs more than many records
    file.size = wanted;
    return true;
}

std::string Tracer::header() const {
    const std::chrono::nanoseconds unix_time = std::chrono::system_clock::now().time_since_epoch();
    return "{\"domain\": " + json_string(domain_) + ", \"rank\": " + std::to_string(rank_) +
           ", \"size\": " + std::to_string(size_) + ", \"pid\": " + std::to_string(getpid()) +
           ", \"host\": " + json_string(host_name()) + ", \"stride\": " + std::to_string(stride_) +
           ", \"steady_ns\": " + std::to_string(flight_ns()) + ", \"unix_ns\": " + std::to_string(unix_time.count()) +
           ", \"operators\": " + names_of(op_table) + ", \"dtypes\": " + names_of(dtype_table) + "}\n";
}

}  // namespace alltoallv
