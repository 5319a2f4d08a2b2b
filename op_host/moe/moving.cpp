#include "moe/moving.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "runtime/base/error.h"

namespace alltoallv::moe {
namespace {

constexpr size_t scale_bytes = 4;  // before the codes of a row

size_t row_count(Span rows) {
    return static_cast<size_t>(std::accumulate(rows.begin(), rows.end(), int64_t{0}));
}

kernel::Rows at(kernel::Rows rows, size_t row) {
    return {static_cast<char*>(rows.data) + row * rows.stride, rows.stride};
}

Block allocate(size_t bytes) {
    return Arena::instance().allocate(bytes);
}

}  // namespace

RowForm::RowForm(DType dtype, size_t length, std::optional<CodeFormat> payload)
    : dtype_(dtype), length_(length), values_(length * size_of(dtype)) {
    if (!payload) return;
    if (only_moves(dtype) || !info(dtype).quantizes)
        throw invalid_tensor(2012, ErrorType::INVALID_TENSOR_INI_MATCH, "rows have dtype ", name_of(dtype),
                             ", expected float32, float16 or bfloat16 for codes");
    const size_t group = info(*payload).group_size;
    coded_ = kernel::CodedRows{{*payload, group == 0 ? std::max(length, size_t{1}) : group}, dtype, length};
    coded_->format.check();
}

void RowForm::encode(kernel::Rows out, const Matrix& in, const int64_t* index, const float* factors,
                     size_t count) const {
    if (coded_)
        coded_->encode(out, in.bytes(), index, factors, count);
    else if (factors != nullptr)
        kernel::weigh_rows(dtype_, out, in.bytes(), index, factors, count, length_);
    else
        kernel::gather_rows(out, in.bytes(), index, nullptr, count, values_);
}

void RowForm::decode(void* out, kernel::ConstRows in, const int64_t* index, const int64_t* where, size_t count) const {
    if (coded_)
        coded_->decode({out, values_}, in, index, where, count, Overflow::saturate);
    else
        kernel::gather_rows({out, values_}, in, index, where, count, values_);
}

void RowForm::sum(void* out, kernel::ConstRows in, const int64_t* index, size_t terms, size_t count) const {
    if (coded_)
        coded_->sum({out, values_}, in, index, terms, count);
    else
        kernel::sum_rows(dtype_, {out, values_}, in, index, terms, count, length_);
}

// Exchanges

struct Exchanged::State {
    State(Block sent, size_t stride, Span sends, std::optional<Span> recvs, int64_t terms)
        : request(OpKind::all_to_all_v, static_cast<int>(sends.size())), from(std::move(sent)), bytes(stride) {
        const auto fill = [&](Span rows, std::span<int64_t> counts, std::span<int64_t> displs) {
            std::ranges::copy(rows, counts.begin());
            to_elements(counts, static_cast<int64_t>(stride));
            alltoallv::pack(counts, displs);
        };
        fill(sends, request.send_counts(), request.sdispls());
        if (recvs) {
            arrived.assign(recvs->begin(), recvs->end());
            fill(*recvs, request.recv_counts(), request.rdispls());
            to = allocate(row_count(*recvs) * stride);
        }
        request.learns = !recvs;
        request.terms = terms;
        request.row = static_cast<int64_t>(stride);
    }

    void run(Communicator& communicator) {
        Exchange exchange = request.exchange(DType::uint8, from.data(), to.data());
        exchange.allocate = [this](std::span<const int64_t> counts) -> void* {
            for (const int64_t count : counts) arrived.push_back(count / static_cast<int64_t>(bytes));
            to = allocate(row_count(arrived) * bytes);
            return to.data();
        };
        communicator.exchange(exchange, -1);
    }

    Request request;
    Block from, to;
    const size_t bytes;  // of a row
    Numbers arrived;
};

Exchanged::Exchanged(Block rows, size_t stride, Span sends, std::optional<Span> recvs, int64_t terms)
    : state_(std::make_shared<State>(std::move(rows), stride, sends, recvs, terms)) {}

void Exchanged::start(Communicator& communicator, bool begins) {
    if (!begins) {
        state_->run(communicator);
        return;
    }
    // The queue belongs to the communicator and ends before it.
    work_ = communicator.begin(OpKind::all_to_all_v, [state = state_, &communicator] { state->run(communicator); });
}

size_t Exchanged::bytes() const {
    return std::max(state_->from.bytes(), state_->to.bytes());
}

void Exchanged::wait() const {
    if (work_ != nullptr) work_->wait(-1);
}

kernel::ConstRows Exchanged::rows() const {
    return {state_->to.data(), state_->bytes};
}

Span Exchanged::recvs() const {
    return state_->arrived;
}

// To the experts

Dispatch::Dispatch(Communicator& communicator, const Matrix& tokens, std::optional<CodeFormat> payload, int64_t k,
                   Span order, Span sends, std::span<const Column> columns, int64_t terms)
    : communicator_(communicator),
      tokens_(tokens),
      form_(tokens.dtype, tokens.length, payload),
      apart_(communicator.backend() == "tcp"),
      terms_(terms) {
    for (const Column& column : columns) widths_.push_back(column.width);
    const auto n = static_cast<int64_t>(tokens.rows);
    const bool late = follow(apart_, n, row_bytes(form_.width()));
    packed_ = pack(order, sends, n, k, columns, form_.width(), terms, late);
    if (form_.coded()) {
        coded_ = allocate(tokens.rows * form_.width());
        if (!late) code_until(tokens.rows);
    }
    const size_t stride = packed_.stride;
    buffer_ = allocate(row_count(packed_.counts) * stride);
    for (size_t i = 0; i < packed_.header_at.size(); ++i)
        std::memcpy(buffer_.data() + static_cast<size_t>(packed_.header_at[i]) * stride,
                    packed_.headers.data() + i * stride, stride);
    kernel::gather_rows({buffer_.data(), stride}, coded_rows(), packed_.token.data(), packed_.token_at.data(),
                        packed_.token.size(), form_.width());
}

kernel::ConstRows Dispatch::coded_rows() const {
    return form_.coded() ? kernel::ConstRows{coded_.data(), form_.width()} : tokens_.bytes();
}

void Dispatch::code_until(size_t end) {
    if (!form_.coded() || end <= done_) return;
    Matrix rest = tokens_;
    rest.data = static_cast<const char*>(tokens_.data) + done_ * tokens_.width();
    form_.encode(at({coded_.data(), form_.width()}, done_), rest, nullptr, nullptr, end - done_);
    done_ = end;
}

void Dispatch::start(bool begins) {
    exchanged_.emplace(std::move(buffer_), packed_.stride, packed_.counts, std::nullopt, terms_);
    exchanged_->start(communicator_, begins);
}

void Dispatch::read() {
    const kernel::ConstRows rows = exchanged_->rows();
    const Fetch fetch = [&](Span which, std::byte* out) {
        kernel::gather_rows({out, rows.stride}, rows, which.data(), nullptr, which.size(), rows.stride);
    };
    headers_ = unpack(fetch, exchanged_->recvs(), widths_, packed_.stride, terms_, communicator_.rank());
}

Exchanged Dispatch::begin(const Remainder& chunk) {
    code_until(static_cast<size_t>(chunk.until));
    Numbers counts;
    for (const Numbers& going : chunk.going) counts.push_back(static_cast<int64_t>(going.size()));
    Block rows = allocate(row_count(counts) * packed_.stride);
    size_t row = 0;
    for (const Numbers& going : chunk.going) {
        kernel::gather_rows(at({rows.data(), packed_.stride}, row), coded_rows(), going.data(), nullptr, going.size(),
                            form_.width());
        row += going.size();
    }
    Exchanged call(std::move(rows), packed_.stride, counts, Span(chunk.recvs), terms_);
    call.start(communicator_, true);
    return call;
}

void Dispatch::place(kernel::ConstRows from, Span index, const int64_t* where, void* rows, void* scales) const {
    if (scales == nullptr) return form_.decode(rows, from, index.data(), where, index.size());
    kernel::gather_rows({scales, scale_bytes}, from, index.data(), where, index.size(), scale_bytes);
    const kernel::ConstRows codes{static_cast<const char*>(from.data) + scale_bytes, from.stride};
    kernel::gather_rows({rows, tokens_.length}, codes, index.data(), where, index.size(), tokens_.length);
}

void Dispatch::fill(Span source, Span token, void* rows, void* scales) {
    std::vector<bool> late;
    for (const int64_t tokens : headers_.tokens) late.push_back(follows(tokens));
    const Numbers line = lines(headers_, token, exchanged_->recvs(), late);
    const auto row_of = [](const Numbers& rows_of, int64_t pair) {
        return pair < 0 ? -1 : rows_of[static_cast<size_t>(pair)];
    };
    Numbers index;
    if (std::ranges::find(late, true) == late.end()) {
        for (const int64_t pair : source) index.push_back(row_of(line, pair));
        return place(exchanged_->rows(), index, nullptr, rows, scales);
    }
    const int rank = communicator_.rank();
    const std::vector<Remainder> divided = remainders(headers_, token, packed_.tokens_of, late, rank, packed_.stride);
    std::vector<Exchanged> begun;
    for (const Remainder& chunk : divided) begun.push_back(begin(chunk));
    const Numbers there = places(source, static_cast<int64_t>(token.size()));
    Numbers where;
    std::vector<bool> comes_later;
    for (size_t j = 0; j < late.size(); ++j)
        comes_later.insert(comes_later.end(), static_cast<size_t>(headers_.pairs[j]), late[j]);
    for (size_t i = 0; i < source.size(); ++i) {
        if (source[i] >= 0 && comes_later[static_cast<size_t>(source[i])]) continue;
        index.push_back(row_of(line, source[i]));
        where.push_back(static_cast<int64_t>(i));
    }
    place(exchanged_->rows(), index, where.data(), rows, scales);
    if (late[static_cast<size_t>(rank)]) {
        const auto begin = static_cast<ptrdiff_t>(row_count(Span(headers_.pairs).first(static_cast<size_t>(rank))));
        const auto count = static_cast<size_t>(headers_.pairs[static_cast<size_t>(rank)]);
        place(coded_rows(), token.subspan(static_cast<size_t>(begin), count), there.data() + begin, rows, scales);
    }
    for (size_t i = 0; i < divided.size(); ++i) {
        begun[i].wait();
        where.clear();
        for (const int64_t pair : divided[i].pairs) where.push_back(there[static_cast<size_t>(pair)]);
        place(begun[i].rows(), divided[i].rows, where.data(), rows, scales);
    }
}

// And back

Collect::Collect(Communicator& communicator, const Matrix& rows, std::optional<CodeFormat> payload,
                 const float* factors, std::optional<Column> weights, std::vector<Chunk> chunks, size_t k,
                 int64_t terms)
    : communicator_(communicator),
      matrix_(rows),
      form_(rows.dtype, rows.length, payload),
      factors_(factors),
      weights_(weights),
      chunks_(std::move(chunks)),
      k_(k),
      terms_(terms),
      adds_(payload || k == 1 || (!only_moves(rows.dtype) && info(rows.dtype).arithmetic != Arithmetic::none)) {}

Exchanged Collect::send(const Chunk& chunk, bool begins) const {
    const size_t width = row_bytes(form_.width()), count = chunk.rows.size();
    const size_t stride = width + (weights_ ? row_bytes(weights_->width) : 0);
    Block rows = allocate(count * stride);
    std::vector<float> factors;
    for (size_t i = 0; factors_ != nullptr && i < count; ++i)
        factors.push_back(factors_[static_cast<size_t>(chunk.rows[i])]);
    form_.encode({rows.data(), stride}, matrix_, chunk.rows.data(), factors_ == nullptr ? nullptr : factors.data(),
                 count);
    if (weights_)
        kernel::gather_rows({rows.data() + width, stride}, {weights_->data, weights_->width}, chunk.rows.data(),
                            nullptr, count, weights_->width);
    Exchanged call(std::move(rows), stride, chunk.sends, Span(chunk.recvs), terms_);
    call.start(communicator_, begins);
    return call;
}

void Collect::begin() {
    for (const Chunk& chunk : chunks_) begun_.push_back(send(chunk, true));
}

void Collect::finish(void* tokens, void* weights) {
    char* const out = static_cast<char*>(tokens);
    const bool moves = k_ == 1 && !form_.coded();  // bit for bit
    for (size_t i = 0; i < chunks_.size(); ++i) {
        const Chunk& chunk = chunks_[i];
        const Exchanged came = begun_.empty() ? send(chunk, false) : begun_[i];
        came.wait();
        const auto first = static_cast<size_t>(chunk.first), count = static_cast<size_t>(chunk.last - chunk.first);
        const int64_t* const index = chunk.places.data();
        if (adds_ && !moves)
            form_.sum(out + first * matrix_.width(), came.rows(), index, k_, count);
        else
            form_.decode(out + first * k_ * matrix_.width(), came.rows(), index, nullptr, count * k_);
        if (!weights_) continue;
        const kernel::ConstRows column{static_cast<const char*>(came.rows().data) + row_bytes(form_.width()),
                                       came.rows().stride};
        kernel::gather_rows({static_cast<char*>(weights) + first * k_ * weights_->width, weights_->width}, column,
                            index, nullptr, count * k_, weights_->width);
    }
}

}  // namespace alltoallv::moe
