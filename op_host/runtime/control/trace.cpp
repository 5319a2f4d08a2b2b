#include "runtime/control/trace.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <new>
#include <utility>

#include "runtime/core/held_lock.h"
#include "runtime/core/hooks.h"

namespace alltoallv {
namespace {

constexpr size_t header_bytes = 4096, step_bytes = size_t{1} << 20;

std::mutex target_mutex;
TraceTarget current_target;

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

TraceTarget set_trace_target(TraceTarget target) {
    Tracer::take_environment();
    const std::lock_guard lock(target_mutex);
    const uint64_t now = Tracer::generation.load(std::memory_order_relaxed), on = target.folder.empty() ? 0 : 1;
    Tracer::generation.store(now + 1 + (now + 1 + on) % 2, std::memory_order_release);
    return std::exchange(current_target, std::move(target));
}

void Tracer::take_environment() {
    static const bool once = [] {
        const char* folder = std::getenv("ALLTOALLV_TRACE");
        if (folder == nullptr || *folder == 0) return false;
        current_target.folder = folder;
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

std::unique_lock<std::mutex> Tracer::locked() {
    std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock) {
        HeldLock::release_now();  // the thread that has the mutex may be waiting for it, to warn
        lock.lock();
    }
    return lock;
}

/// No failure of the trace is one of the operator.
TraceRecord* Tracer::claim(uint64_t seq, OpKind op, DType dtype, Clock::time_point time, int32_t peer) {
    const auto lock = locked();
    try {
        File* const into = file();
        if (into == nullptr) return nullptr;
        Slot& slot = free_slot();
        if (!place(*into, slot)) return nullptr;
        auto* const record = reinterpret_cast<TraceRecord*>(&slot + 1);
        std::memset(static_cast<void*>(record), 0, stride_);
        record->seq = seq;
        record->dtype = static_cast<uint32_t>(dtype);
        record->element = static_cast<uint32_t>(size_of(dtype));
        record->op = static_cast<uint16_t>(op);
        record->begin_ns = flight_ns(time);
        record->peer = peer;
        slot.file = into;
        slot.busy = true;
        write(slot);
        return record;
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

/// Returns the file into which operators go now; null if there is none.
Tracer::File* Tracer::file() {
    if (const uint64_t now = generation.load(std::memory_order_acquire); now != opened_) {
        TraceTarget target;
        {
            const std::lock_guard of_target(target_mutex);
            target = current_target;
        }
        opened_ = now;
        const auto known = std::ranges::find(files_, target.folder, [](const auto& one) { return one->target.folder; });
        if (known != files_.end()) {
            std::rotate(known, known + 1, files_.end());
            files_.back()->target = target;
        } else if (!target.folder.empty()) {
            open(target);
        }
    }
    return files_.empty() || !files_.back()->fd ? nullptr : files_.back().get();
}

Tracer::Slot& Tracer::free_slot() {
    for (const auto& one : slots_)
        if (auto& slot = *reinterpret_cast<Slot*>(one.get()); !slot.busy) return slot;
    slots_.push_back(std::make_unique<std::byte[]>(sizeof(Slot) + stride_));
    return *new (slots_.back().get()) Slot{};
}

/// Gives a record its place in the file.
bool Tracer::place(File& file, Slot& slot) {
    if (!mend(file) || !grow(file, file.used + stride_)) return false;
    slot.offset = std::exchange(file.used, file.used + stride_);
    return true;
}

void Tracer::write(Slot& slot) {
    (void)!::pwrite(slot.file->fd.get(), &slot + 1, stride_, static_cast<off_t>(slot.offset));
}

void Tracer::update(TraceRecord& record) {
    const auto lock = locked();
    Slot& slot = slot_of(record);
    if (slot.file->fd && slot.offset != gone) write(slot);
}

void Tracer::end(TraceRecord& record, TraceState state, uint64_t bytes, uint64_t now_ns) {
    record.bytes = bytes;
    record.state = state;
    record.end_ns = now_ns;
    const auto lock = locked();
    Slot& slot = slot_of(record);
    if (slot.file->fd && (slot.offset != gone || place(*slot.file, slot))) write(slot);
    slot.busy = false;
}

/// Returns where the records end that have not been cut off. Behind them are zeros, and records that ended since.
size_t Tracer::whole(const File& file) const {
    const size_t at_once = std::max(size_t{64} << 10, stride_) / stride_;
    std::vector<char> records(at_once * stride_);
    char first = 0;
    if (::pread(file.fd.get(), &first, 1, 0) != 1 || first == 0) return header_bytes;
    for (size_t at = header_bytes;;) {
        const ssize_t got = ::pread(file.fd.get(), records.data(), records.size(), static_cast<off_t>(at));
        for (size_t i = 0; i < at_once; ++i, at += stride_) {
            TraceRecord record;
            if (got < static_cast<ssize_t>((i + 1) * stride_)) return at;
            std::memcpy(static_cast<void*>(&record), records.data() + i * stride_, sizeof record);
            if (at >= file.used) return file.used;
            if (record.begin_ns == 0) return std::max(at, header_bytes + stride_) - stride_;  // the last may be a part
        }
    }
}

/// If another program has cut the file, goes on behind what is left of it, and says in its header what is lost. Returns
/// false if there is no room for that.
bool Tracer::mend(File& file) {
    struct stat now{};
    if (::fstat(file.fd.get(), &now) != 0 || static_cast<size_t>(now.st_size) == file.size) return true;
    const size_t kept = whole(file);
    const bool first = file.lost == 0;
    file.lost += (file.used - kept) / stride_;
    for (const auto& one : slots_)
        if (auto& slot = *reinterpret_cast<Slot*>(one.get());
            slot.busy && slot.file == &file && slot.offset != gone && slot.offset >= kept) {
            slot.offset = gone;
            --file.lost;  // it is written again at its end
        }
    (void)!::ftruncate(file.fd.get(), static_cast<off_t>(kept));
    file.used = kept;
    file.size = 0;  // so that it grows
    if (!grow(file, file.used)) return false;
    write_header(file);
    if (first && hooks().warn)
        hooks().warn("the trace of domain '" + domain_ + "' has been cut by another program: " +
                     std::to_string(file.lost) + " operators of rank " + std::to_string(rank_) + " are lost");
    return true;
}

/// Opens the files. A folder that is not writable is reported once; the program continues.
void Tracer::open(const TraceTarget& target) {
    static std::atomic<int> number{0};
    std::error_code ignored;  // the file then cannot be opened
    std::filesystem::create_directories(target.folder, ignored);
    auto& file = *files_.emplace_back(std::make_unique<File>(File{target, {}, 0, 0, 0}));
    const std::string name = target.folder + "/" + plain(domain_) + "-rank" + std::to_string(rank_) + "-" +
                             plain(host_name()) + "-" + std::to_string(getpid()) + "-" + std::to_string(++number) +
                             ".trace";
    UniqueFd fd(::open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
    if (!fd) {
        if (hooks().warn) hooks().warn("nothing is traced: " + name + " cannot be written: " + strerror(errno));
        return;
    }
    file.fd = std::move(fd);
    if (!grow(file, header_bytes)) return;
    write_header(file);
    file.used = header_bytes;
}

void Tracer::write_header(const File& file) const {
    std::string text = header(file);
    text.resize(header_bytes);
    (void)!::pwrite(file.fd.get(), text.data(), text.size(), 0);
}

/// Returns false if the disk or the file is full; tracing then stops.
bool Tracer::grow(File& file, size_t size) {
    if (size <= file.size) return true;
    const size_t most = file.target.most_bytes;
    const size_t wanted = std::min((size + step_bytes - 1) / step_bytes * step_bytes, most);
    if (size > most || posix_fallocate(file.fd.get(), 0, static_cast<off_t>(wanted)) != 0) {
        if (hooks().warn)
            hooks().warn("nothing more of domain '" + domain_ + "' is traced: " +
                         (size > most ? "the file has most_bytes, " + std::to_string(most) : "the disk is full"));
        (void)!ftruncate(file.fd.get(), static_cast<off_t>(std::max(file.used, file.size)));
        file.fd = {};
        return false;
    }
    file.size = wanted;
    return true;
}

std::string Tracer::header(const File& file) const {
    const std::chrono::nanoseconds unix_time = std::chrono::system_clock::now().time_since_epoch();
    return "{\"domain\": " + json_string(domain_) + ", \"rank\": " + std::to_string(rank_) +
           ", \"size\": " + std::to_string(size_) + ", \"pid\": " + std::to_string(getpid()) +
           ", \"host\": " + json_string(host_name()) + ", \"stride\": " + std::to_string(stride_) +
           ", \"lost\": " + std::to_string(file.lost) + ", \"steady_ns\": " + std::to_string(flight_ns()) +
           ", \"unix_ns\": " + std::to_string(unix_time.count()) + ", \"operators\": " + names_of(op_table) +
           ", \"dtypes\": " + names_of(dtype_table) + "}\n";
}

}  // namespace alltoallv
