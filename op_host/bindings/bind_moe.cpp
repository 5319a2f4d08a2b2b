// A mixture of experts on the caller's tensors: one call sends tokens to their experts, one brings rows back.
#include <cstring>

#include "bindings/bindings.h"
#include "bindings/checked_call.h"
#include "bindings/guarded.h"
#include "bindings/lock.h"
#include "moe/moving.h"
#include "op_kernel/cpu/half_blocks.h"
#include "runtime/core/terms.h"

namespace alltoallv {
namespace {

using moe::Column;
using moe::Matrix;
using moe::Numbers;
using moe::Options;
using moe::Span;
using moe::Tag;
using Dims = std::vector<int64_t>;

constexpr OpKind carrier = OpKind::all_to_all_v;  // the operator by which rows travel

std::string dtype_name(const std::optional<Operand>& tensor) {
    return tensor ? std::string(name_of(tensor->dtype)) : "None";
}

uint32_t digest(std::string_view text) {
    uint32_t value = 2166136261u;  // FNV-1a
    for (const char c : text) value = (value ^ static_cast<unsigned char>(c)) * 16777619u;
    return value;
}

int64_t terms_of(DType dtype, size_t length, const std::string& text) {
    const std::string all = joined(name_of(dtype), " ", length, " ", text);
    const std::optional<DType> known = only_moves(dtype) ? std::nullopt : std::optional(dtype);
    return word_of(TokenTerms(known, static_cast<int64_t>(length), digest(all)));
}

Matrix matrix_of(const Operand& rows) {
    size_t length = 1;
    for (size_t i = 1; i < rows.shape.size(); ++i) length *= static_cast<size_t>(rows.shape[i]);
    return {pointer<const void>(rows.bytes.address), rows.dtype, static_cast<size_t>(rows.shape[0]), length};
}

std::vector<int64_t> shape_of(std::vector<int64_t> first, const Operand& like) {
    for (size_t i = 1; i < like.shape.size(); ++i) first.push_back(like.shape[i]);
    return first;
}

template <class T>
std::span<const T> values_of(const Operand& tensor) {
    return {pointer<const T>(tensor.bytes.address), tensor.bytes.bytes / sizeof(T)};
}

/// Reads integers of any type.
Numbers integers_of(const char* name, const Operand& tensor) {
    Numbers numbers(static_cast<size_t>(tensor.count()));
    const auto copy = [&]<class T>(T) { std::ranges::copy(values_of<T>(tensor), numbers.begin()); };
    switch (tensor.dtype) {
        case DType::int8:
            copy(int8_t{});
            break;
        case DType::uint8:
            copy(uint8_t{});
            break;
        case DType::int16:
            copy(int16_t{});
            break;
        case DType::uint16:
            copy(uint16_t{});
            break;
        case DType::int32:
            copy(int32_t{});
            break;
        case DType::uint32:
            copy(uint32_t{});
            break;
        case DType::int64:
            copy(int64_t{});
            break;
        case DType::uint64:
            for (const uint64_t number : values_of<uint64_t>(tensor))
                if (number > INT64_MAX)
                    throw invalid_param(1491, name, " holds ", number, ", expected numbers below 2**63");
            copy(uint64_t{});
            break;
        default:
            throw invalid_tensor(2013, ErrorType::INVALID_TENSOR_INI_MATCH, name, " has dtype ", name_of(tensor.dtype),
                                 ", expected integers");
    }
    return numbers;
}

/// Reads weights of a floating-point dtype; nothing for None.
std::optional<Operand> weights_of(const Tensors& tensors, nb::handle tensor) {
    if (tensor.is_none()) return std::nullopt;
    Operand weights = tensors.input("gate_weights", tensor);
    const bool moves = only_moves(weights.dtype);
    const Arithmetic kind = moves ? Arithmetic::none : info(weights.dtype).arithmetic;
    if (kind != Arithmetic::floating && kind != Arithmetic::none)
        throw invalid_tensor(2014, ErrorType::INVALID_TENSOR_INI_MATCH, "gate_weights has dtype ",
                             name_of(weights.dtype), ", expected a floating-point one");
    return weights;
}

std::optional<Dims> shape_of(const std::optional<Operand>& tensor) {
    return tensor ? std::optional(tensor->shape) : std::nullopt;
}

/// Checks the shapes of what is dispatched; returns the numbers of tokens and choices.
std::pair<int64_t, int64_t> check_shapes(const Dims& tokens, const Dims& ids, const std::optional<Dims>& weights) {
    const bool matrix = ids.size() == 1 || (ids.size() == 2 && ids[1] > 0);
    if (tokens.empty() || !matrix || ids[0] != tokens[0])
        throw invalid_tensor(2015, ErrorType::INVALID_TENSOR_DIM, "expert_ids has shape ", tuple_text(ids),
                             " and tokens ", tuple_text(tokens),
                             ", expected [n, k] or [n], with k at least 1, and [n, ...]");
    if (weights && *weights != ids)
        throw invalid_tensor(2016, ErrorType::INVALID_TENSOR_DIM, "gate_weights has shape ", tuple_text(*weights),
                             ", expected ", tuple_text(ids), ", as expert_ids has");
    return {ids[0], ids.size() == 2 ? ids[1] : 1};
}

/// Checks the shapes of what takes the route of `n` tokens with `k` choices.
void check_again(const Dims& tokens, const std::optional<Dims>& weights, int64_t n, int64_t k) {
    if (tokens.empty() || tokens[0] != n)
        throw invalid_tensor(2017, ErrorType::INVALID_TENSOR_DIM, "tokens has shape ", tuple_text(tokens),
                             ", expected ", n, " rows, as dispatched before");
    const Dims all{n, k}, flat{n};
    if (weights && *weights != all && (k != 1 || *weights != flat))
        throw invalid_tensor(2018, ErrorType::INVALID_TENSOR_DIM, "gate_weights has shape ", tuple_text(*weights),
                             ", expected ", tuple_text(all), ", as dispatched before");
}

void check_outputs(const Dims& shape, int64_t rows) {
    if (shape.empty() || shape[0] != rows)
        throw invalid_tensor(2019, ErrorType::INVALID_TENSOR_DIM, "expert_outputs has shape ", tuple_text(shape),
                             ", expected ", rows, " rows, as dispatched");
}

/// Reads a float32, float16 or bfloat16 tensor as float32.
std::vector<float> floats_of(const Operand& tensor) {
    std::vector<float> floats(static_cast<size_t>(tensor.count()));
    if (tensor.dtype == DType::float32) {
        std::ranges::copy(values_of<float>(tensor), floats.begin());
        return floats;
    }
    const bool brain = tensor.dtype == DType::bfloat16;
    if (!brain && tensor.dtype != DType::float16)
        throw invalid_param(1033, "gates have dtype ", name_of(tensor.dtype),
                            ", expected float32, float16 or bfloat16");
    const kernel::HalfBlocks half = kernel::half_blocks(tensor.dtype, kernel::best_isa());
    half.widen(reinterpret_cast<unsigned char*>(floats.data()), pointer<const unsigned char>(tensor.bytes.address),
               floats.size());
    return floats;
}

/// Returns the `width` bytes that weights have of each of the chosen pairs, in that order.
std::vector<std::byte> chosen(const Operand& weights, size_t width, Span order) {
    std::vector<std::byte> gathered(order.size() * width);
    kernel::gather_rows({gathered.data(), width}, {pointer<const void>(weights.bytes.address), width}, order.data(),
                        nullptr, order.size(), width);
    return gathered;
}

/// The route of a dispatch, read from tensors of numbers.
struct RouteTensors {
    RouteTensors(const Tensors& tensors, nb::handle route) {
        const char* const names[] = {"order", "source", "ranks", "token"};
        if (nb::len(route) != 4) throw invalid_param(1034, "a route has ", nb::len(route), " entries, expected 4");
        for (size_t i = 0; i < 4; ++i) {
            all[i] = tensors.input(names[i], route[i]);
            if (all[i].dtype != DType::int64)
                throw invalid_tensor(2020, ErrorType::INVALID_TENSOR_INI_MATCH, names[i], " has dtype ",
                                     name_of(all[i].dtype), ", expected int64");
        }
    }

    Span order() const { return values_of<int64_t>(all[0]); }
    Span source() const { return values_of<int64_t>(all[1]); }
    Span token() const { return values_of<int64_t>(all[3]); }
    size_t lines() const { return static_cast<size_t>(all[2].shape[0]); }
    /// Numbers of every rank: pairs for it, pairs from it, its tokens, its choices.
    Span of_ranks(size_t line) const {
        const auto size = static_cast<size_t>(all[2].shape[1]);
        return values_of<int64_t>(all[2]).subspan(line * size, size);
    }

    std::array<Operand, 4> all;
};

/// Tokens under way to their experts.
class MoeDispatch {
  public:
    MoeDispatch(nb::object adapter, CommunicatorPtr communicator, nb::handle options, nb::handle tokens, nb::handle ids,
                nb::handle weights, nb::handle wide, nb::object likes)
        : adapter_(std::move(adapter)),
          communicator_(std::move(communicator)),
          options_(nb::cast<std::shared_ptr<Options>>(options(communicator_->size()))),
          likes_(std::move(likes)) {
        const Tensors tensors(adapter_);
        tokens_ = tensors.input("tokens", tokens);
        const Operand numbers = tensors.input("expert_ids", ids);
        weights_ = weights_of(tensors, weights);
        const Numbers pairs = integers_of("expert_ids", numbers);
        k_ = check_shapes(tokens_.shape, numbers.shape, shape_of(weights_)).second;
        std::optional<Operand> heavy;
        if (options_->lightest && weights_) heavy = tensors.input("gate_weights", wide(weights));
        sending_ = moe::send(*options_, pairs, k_, heavy ? values_of<double>(*heavy) : std::span<const double>());
        std::string text =
            joined(tuple_text(Shape(tokens_.shape).subspan(1)), " ", dtype_name(weights_), " ", options_->text);
        const Column tags{sending_.tags.data(), sizeof(Tag)};
        prepare(options_->payload, sending_.order, sending_.sends, &tags, text);
    }

    /// Takes a known route, as values.
    MoeDispatch(nb::object adapter, CommunicatorPtr communicator, nb::handle tokens, nb::handle weights,
                nb::handle route)
        : adapter_(std::move(adapter)), communicator_(std::move(communicator)) {
        const Tensors tensors(adapter_);
        route_.emplace(tensors, route);
        const auto rank = static_cast<size_t>(communicator_->rank());
        const int64_t n = route_->of_ranks(2)[rank];
        k_ = route_->of_ranks(3)[rank];
        tokens_ = tensors.input("tokens", tokens);
        weights_ = weights_of(tensors, weights);
        check_again(tokens_.shape, shape_of(weights_), n, k_);
        prepare(std::nullopt, route_->order(), route_->of_ranks(0), nullptr, dtype_name(weights_));
    }

    Communicator& communicator() const { return *communicator_; }

    void start(bool begins) {
        const LockReleased released(*communicator_, moving_->bytes());
        moving_->start(begun_ = begins);
    }

    /// Receives; returns rows, weights, scales, order, source, ranks, token, and rows of each expert.
    nb::object finish() {
        if (begun_) {
            const GilReleased released;
            moving_->wait();
        }
        moe::ReceivePlan arrival;
        Numbers token;
        const moe::Headers& headers = moving_->headers();
        guarded(*communicator_, carrier, [&] {
            moving_->read();
            if (route_) return;
            token = moe::tokens_of(headers);
            arrival = moe::receive(headers.tags(), options_->experts_of(communicator_->rank()), options_->alignment);
        });
        const Span source = route_ ? route_->source() : Span(arrival.source),
                   of_pairs = route_ ? route_->token() : Span(token);
        const Tensors tensors(adapter_);
        const auto count = static_cast<int64_t>(source.size());
        const bool codes = !likes_.is_none();
        const Operand like{
            codes ? nb::object(likes_[0]) : tokens_.tensor, codes ? DType::uint8 : tokens_.dtype, {0, 0}, {}};
        const Operand rows = tensors.make(shape_of({count}, tokens_), like);
        Operand scales, weights;
        if (codes) scales = tensors.make({count}, {nb::object(likes_[1]), DType::float32, {0, 0}, {}});
        if (weights_) weights = tensors.make({count}, *weights_);
        {
            LockReleased released(*communicator_, rows.bytes.bytes);
            if (communicator_->backend() == "tcp") released.release();  // tokens that follow are waited for
            moving_->fill(source, of_pairs, pointer(rows.bytes.address),
                          codes ? pointer(scales.bytes.address) : nullptr);
            if (weights_) {
                const size_t width = size_of(weights_->dtype);
                kernel::gather_rows({pointer(weights.bytes.address), width}, {headers.columns.back().data(), width},
                                    source.data(), nullptr, source.size(), width);
            }
        }
        const auto tensor_of = [](const Operand& tensor) {
            return tensor.tensor.is_valid() ? tensor.tensor : nb::none();
        };
        if (route_) return nb::make_tuple(rows.tensor, tensor_of(weights));
        Numbers ranks, experts;
        const Numbers* const of_ranks[] = {&sending_.sends, &headers.pairs, &headers.tokens, &headers.choices};
        for (const Numbers* each : of_ranks) ranks.insert(ranks.end(), each->begin(), each->end());
        for (const Numbers* each : {&arrival.counts, &arrival.received})
            experts.insert(experts.end(), each->begin(), each->end());
        const auto numbers = [](const Numbers& values) {
            return numpy_array(Span(values), {static_cast<int64_t>(values.size())});
        };
        return nb::make_tuple(rows.tensor, tensor_of(weights), tensor_of(scales), numbers(sending_.order),
                              numbers(arrival.source), numpy_array(Span(ranks), {4, communicator_->size()}),
                              numbers(token),
                              numpy_array(Span(experts), {2, static_cast<int64_t>(arrival.counts.size())}));
    }

  private:
    void prepare(std::optional<CodeFormat> payload, Span order, Span sends, const Column* tags,
                 const std::string& text) {
        const Matrix matrix = matrix_of(tokens_);
        std::vector<std::byte> of_pairs;
        std::vector<Column> columns;
        if (tags != nullptr) columns.push_back(*tags);
        if (weights_) {
            const size_t width = size_of(weights_->dtype);
            of_pairs = chosen(*weights_, width, order);
            columns.push_back({of_pairs.data(), width});
        }
        const LockReleased released(*communicator_, tokens_.bytes.bytes);
        moving_ = std::make_unique<moe::Dispatch>(*communicator_, matrix, payload, k_, order, sends, columns,
                                                  terms_of(matrix.dtype, matrix.length, text));
    }

    nb::object adapter_;
    CommunicatorPtr communicator_;
    std::shared_ptr<const Options> options_;
    nb::object likes_ = nb::none();  // of codes and scales
    Operand tokens_;
    std::optional<Operand> weights_;
    std::optional<RouteTensors> route_;
    int64_t k_ = 1;
    bool begun_ = false;
    moe::SendPlan sending_;
    std::unique_ptr<moe::Dispatch> moving_;
};

/// Rows of experts under way back to their tokens.
class MoeCollect {
  public:
    MoeCollect(nb::object adapter, CommunicatorPtr communicator, nb::handle rows, nb::handle weights, nb::handle gates,
               nb::handle route, int64_t tokens, int64_t k, const std::string& payload, bool undivided,
               const std::string& agreed_terms)
        : adapter_(std::move(adapter)), communicator_(std::move(communicator)), n_(tokens), k_(k) {
        const Tensors tensors(adapter_);
        const RouteTensors route_tensors(tensors, route);
        rows_ = tensors.input("expert_outputs", rows);
        const auto count = static_cast<int64_t>(route_tensors.source().size());
        check_outputs(rows_.shape, count);
        if (!weights.is_none()) weights_ = tensors.input("weights", weights);
        if (!gates.is_none()) factors_ = floats_of(tensors.input("gates", gates));
        moe::Route parts{
            route_tensors.order(), route_tensors.source(), route_tensors.of_ranks(0), route_tensors.of_ranks(1), {}, {},
            route_tensors.token()};
        if (!undivided && route_tensors.lines() == 4) {
            parts.tokens = route_tensors.of_ranks(2);
            parts.choices = route_tensors.of_ranks(3);
        }
        const Matrix matrix = matrix_of(rows_);
        const auto format = payload.empty() ? std::nullopt : std::optional(format_from_name(payload));
        std::optional<Column> column;
        if (weights_) column = {pointer<const void>(weights_->bytes.address), size_of(weights_->dtype)};
        const std::string text = joined(payload, " ", dtype_name(weights_), " ", agreed_terms);
        moving_ =
            std::make_unique<moe::Collect>(*communicator_, matrix, format, gates.is_none() ? nullptr : factors_.data(),
                                           column, moe::chunks(parts, tokens, k, matrix.width()),
                                           static_cast<size_t>(k), terms_of(matrix.dtype, matrix.length, text));
    }

    Communicator& communicator() const { return *communicator_; }

    void start(bool begins) {
        if (!(begun_ = begins)) return;
        const LockReleased released(*communicator_, moving_->bytes());
        moving_->begin();
    }

    /// Receives; returns tokens and weights, and whether the rows of a token have been added.
    nb::object finish() {
        const Tensors tensors(adapter_);
        const bool adds = moving_->adds();
        const Operand tokens = tensors.make(shape_of(adds ? Numbers{n_} : Numbers{n_, k_}, rows_), rows_);
        Operand weights;
        if (weights_) weights = tensors.make({n_, k_}, *weights_);
        {
            LockReleased released(*communicator_, std::max(rows_.bytes.bytes, tokens.bytes.bytes));
            if (begun_) released.release();  // a call in the background is waited for
            moving_->finish(pointer(tokens.bytes.address), weights_ ? pointer(weights.bytes.address) : nullptr);
        }
        return nb::make_tuple(tokens.tensor, weights_ ? weights.tensor : nb::none(), adds);
    }

  private:
    nb::object adapter_;
    CommunicatorPtr communicator_;
    Operand rows_;
    std::optional<Operand> weights_;
    std::vector<float> factors_;
    int64_t n_, k_;
    bool begun_ = false;
    std::unique_ptr<moe::Collect> moving_;
};

/// Rows of several tensors side by side, as one exchange: what deep_ep sends.
nb::object exchange_columns(nb::object adapter, CommunicatorPtr communicator, const std::vector<nb::object>& objects,
                            nb::handle index, size_t chosen_parts, const Numbers& sends,
                            const std::optional<Numbers>& recvs, const std::vector<int>& fills, int64_t least,
                            int64_t terms) {
    const Tensors tensors(adapter);
    std::vector<Operand> parts;
    size_t stride = 0;
    std::optional<moe::Exchanged> came;
    guarded(*communicator, carrier, [&] {
        const Operand which = tensors.input("index", index);
        const Span rows = values_of<int64_t>(which);
        std::vector<Matrix> columns;
        for (const nb::object& each : objects) {
            parts.push_back(tensors.input("x", each));
            columns.push_back(matrix_of(parts.back()));
            stride += moe::row_bytes(columns.back().width());
        }
        const LockReleased released(*communicator, rows.size() * stride);
        Block buffer = Arena::instance().allocate(rows.size() * stride);
        size_t begin = 0;
        for (size_t i = 0; i < columns.size(); ++i) {
            const size_t width = columns[i].width();
            Numbers each;
            for (size_t row = 0; i >= chosen_parts && row < rows.size(); ++row)
                each.push_back(static_cast<int64_t>(row));
            kernel::gather_rows({buffer.data() + begin, stride}, columns[i].bytes(),
                                i < chosen_parts ? rows.data() : each.data(), nullptr, rows.size(), width);
            begin += moe::row_bytes(width);
        }
        came.emplace(std::move(buffer), stride, sends, recvs ? std::optional<Span>(*recvs) : std::nullopt, terms);
    });
    {
        const LockReleased released(*communicator, came->bytes());
        came->start(*communicator, false);
    }
    const Span arrived = came->recvs();
    const auto count = std::accumulate(arrived.begin(), arrived.end(), int64_t{0}), all = std::max(count, least);
    nb::list outputs;
    std::vector<Operand> outs;
    for (const Operand& part : parts) outs.push_back(tensors.make(shape_of({all}, part), part));
    {
        const LockReleased released(*communicator, came->bytes());
        Numbers rows(static_cast<size_t>(count));
        std::iota(rows.begin(), rows.end(), int64_t{0});
        size_t begin = 0;
        for (size_t i = 0; i < outs.size(); ++i) {
            const size_t width = matrix_of(parts[i]).width(), filled = static_cast<size_t>(count) * width;
            const kernel::ConstRows from{static_cast<const char*>(came->rows().data) + begin, stride};
            kernel::gather_rows({pointer(outs[i].bytes.address), width}, from, rows.data(), nullptr, rows.size(),
                                width);
            if (outs[i].bytes.bytes > filled)
                std::memset(pointer<char>(outs[i].bytes.address) + filled, fills[i], outs[i].bytes.bytes - filled);
            begin += moe::row_bytes(width);
        }
    }
    for (const Operand& out : outs) outputs.append(out.tensor);
    return nb::make_tuple(outputs, Numbers(arrived.begin(), arrived.end()));
}

/// Prepares a call, whose failure is announced, and runs it; or begins it and returns what has a method finish().
template <class Moving, class... Arguments>
nb::object moved(CommunicatorPtr communicator, bool begins, nb::object adapter, Arguments&&... arguments) {
    Communicator& raw = *communicator;
    auto call = guarded(raw, carrier, [&] {
        return std::make_unique<Moving>(std::move(adapter), std::move(communicator),
                                        std::forward<Arguments>(arguments)...);
    });
    call->start(begins);
    return begins ? nb::cast(call.release(), nb::rv_policy::take_ownership) : call->finish();
}

std::shared_ptr<Options> options_of(int64_t experts, const std::vector<Numbers>& placed,
                                    const std::vector<bool>& active, nb::handle capacity, bool lightest,
                                    int64_t alignment, const std::string& payload, bool codes, std::string text) {
    auto options = std::make_shared<Options>();
    options->slots.assign(static_cast<size_t>(experts), -1);
    int64_t place = 0;
    for (size_t rank = 0; rank < placed.size(); ++rank) {
        for (const int64_t expert : placed[rank]) {
            if (active[rank]) options->slots[static_cast<size_t>(expert)] = place;
            ++place;
        }
        options->ends.push_back(place);
    }
    if (PyLong_Check(capacity.ptr()))
        options->rows = nb::cast<int64_t>(capacity);
    else if (!capacity.is_none())
        options->factor = nb::cast<double>(capacity);
    options->lightest = lightest;
    options->alignment = alignment;
    if (!payload.empty()) options->payload = format_from_name(payload);
    options->codes = codes;
    options->text = std::move(text);
    return options;
}

Numbers numbers_of(nb::handle array) {
    return integers_of("expert_ids", Tensors(nb::none()).input("expert_ids", array));
}

nb::object array_of(Span numbers) {
    return numpy_array(numbers, {static_cast<int64_t>(numbers.size())});
}

/// What a device packs: see moe::Packed. `numbers`: choices, or with `sends` pairs in order.
nb::object device_pack(const std::shared_ptr<Options>& options, nb::handle numbers, std::optional<Numbers> sends,
                       nb::handle priority, nb::handle weights, int64_t tokens, int64_t k, size_t width,
                       int64_t terms) {
    const Tensors tensors(nb::none());
    moe::SendPlan plan;
    std::vector<Column> columns;
    if (sends) {
        plan.order = numbers_of(numbers);
        plan.sends = *sends;
    } else {
        std::optional<Operand> heavy;
        if (!priority.is_none()) heavy = tensors.input("gate_weights", priority);
        plan =
            moe::send(*options, numbers_of(numbers), k, heavy ? values_of<double>(*heavy) : std::span<const double>());
        columns.push_back({plan.tags.data(), sizeof(Tag)});
    }
    std::vector<std::byte> of_pairs;
    if (!weights.is_none()) {
        const Operand column = tensors.input("gate_weights", weights);
        const auto bytes = static_cast<size_t>(column.shape[1]);
        of_pairs = chosen(column, bytes, plan.order);
        columns.push_back({of_pairs.data(), bytes});
    }
    const moe::Packed all = moe::pack(plan.order, plan.sends, tokens, k, columns, width, terms, false);
    const auto stride = static_cast<int64_t>(all.stride);
    return nb::make_tuple(array_of(plan.order), plan.sends, all.counts,
                          numpy_array(std::span(all.headers), {static_cast<int64_t>(all.header_at.size()), stride}),
                          array_of(all.header_at), array_of(all.token), array_of(all.token_at));
}

/// What a device unpacks; `fetch` gives chosen rows of bytes.
nb::object device_unpack(const std::shared_ptr<Options>& options, nb::handle fetch, const Numbers& recvs,
                         std::optional<size_t> width, size_t stride, int64_t terms, int rank, nb::handle source,
                         nb::handle token) {
    const moe::Fetch rows = [&](Span which, std::byte* out) {
        const nb::object fetched = fetch(array_of(which));
        const Operand bytes = Tensors(nb::none()).input("rows", fetched);
        if (bytes.bytes.bytes != which.size() * stride)
            throw invalid_param(1035, "fetch returned other rows than requested");
        if (bytes.bytes.bytes > 0) std::memcpy(out, pointer<const void>(bytes.bytes.address), bytes.bytes.bytes);
    };
    std::vector<size_t> widths;
    if (source.is_none()) widths.push_back(sizeof(Tag));
    if (width) widths.push_back(*width);
    const moe::Headers headers = moe::unpack(rows, recvs, widths, stride, terms, rank);
    moe::ReceivePlan arrival;
    Numbers tokens;
    if (source.is_none()) {
        tokens = moe::tokens_of(headers);
        arrival = moe::receive(headers.tags(), options->experts_of(rank), options->alignment);
    } else {
        tokens = numbers_of(token);
        arrival.source = numbers_of(source);
    }
    const Numbers line = moe::lines(headers, tokens, recvs, std::vector<bool>(recvs.size()));
    Numbers index, experts = arrival.counts;
    for (const int64_t pair : arrival.source) index.push_back(pair < 0 ? -1 : line[static_cast<size_t>(pair)]);
    experts.insert(experts.end(), arrival.received.begin(), arrival.received.end());
    nb::object column = nb::none();
    if (width)
        column = numpy_array(std::span<const std::byte>(headers.columns.back()),
                             {static_cast<int64_t>(tokens.size()), static_cast<int64_t>(*width)});
    return nb::make_tuple(array_of(arrival.source), array_of(tokens), headers.pairs, headers.tokens, headers.choices,
                          numpy_array(Span(experts), {2, static_cast<int64_t>(arrival.counts.size())}), column,
                          array_of(index));
}

}  // namespace

void bind_moe(nb::module_& m) {
    nb::class_<Options>(m, "MoeOptions", "What a dispatcher was made with, for the ranks of one group.")
        .def(nb::new_(&options_of), "experts"_a, "placed"_a, "active"_a, "capacity"_a.none(), "lightest"_a,
             "alignment"_a, "payload"_a, "codes"_a, "text"_a,
             "Of checked values; active: of each rank, whether its experts get rows; payload '': rows travel as they "
             "are; text: what ranks agree on.");
    nb::class_<MoeDispatch>(m, "MoeDispatch", "Tokens under way to their experts.")
        .def("finish", &MoeDispatch::finish, "Waits, and returns what the call returns.");
    nb::class_<MoeCollect>(m, "MoeCollect", "Rows of experts under way back to their tokens.")
        .def("finish", &MoeCollect::finish, "Waits, and returns what the call returns.");
    m.def(
        "moe_dispatch",
        [](nb::object adapter, CommunicatorPtr communicator, nb::handle options, nb::handle tokens, nb::handle ids,
           nb::handle weights, nb::handle wide, nb::object likes, bool begins) {
            return nb::steal<nb::any>(moved<MoeDispatch>(std::move(communicator), begins, std::move(adapter), options,
                                                         tokens, ids, weights, wide, std::move(likes))
                                          .release());
        },
        "adapter"_a.none(), "communicator"_a, "options"_a, "tokens"_a, "ids"_a, "weights"_a.none(), "wide"_a,
        "likes"_a.none(), "begins"_a,
        "Sends tokens to their experts; returns rows, weights, scales, and as arrays order, source, ranks, token, and "
        "rows of every expert. `options(size)` returns the MoeOptions, `wide(weights)` weights as float64, where they "
        "decide what is dropped; `likes`: tensors of the dtypes of codes and scales, if experts get those; `begins`: "
        "returns a MoeDispatch.");
    m.def(
        "moe_spread",
        [](nb::object adapter, CommunicatorPtr communicator, nb::handle tokens, nb::handle weights, nb::handle route) {
            return nb::steal<nb::any>(
                moved<MoeDispatch>(std::move(communicator), false, std::move(adapter), tokens, weights, route)
                    .release());
        },
        "adapter"_a.none(), "communicator"_a, "tokens"_a, "weights"_a.none(), "route"_a,
        "Sends other tokens by the route of a dispatch; returns rows and weights.");
    m.def(
        "moe_collect",
        [](nb::object adapter, CommunicatorPtr communicator, nb::handle rows, nb::handle weights, nb::handle gates,
           nb::handle route, int64_t tokens, int64_t k, const std::string& payload, bool undivided,
           const std::string& agreed_terms, bool begins) {
            return nb::steal<nb::any>(moved<MoeCollect>(std::move(communicator), begins, std::move(adapter), rows,
                                                        weights, gates, route, tokens, k, payload, undivided,
                                                        agreed_terms)
                                          .release());
        },
        "adapter"_a.none(), "communicator"_a, "rows"_a, "weights"_a.none(), "gates"_a.none(), "route"_a, "tokens"_a,
        "k"_a, "payload"_a = "", "undivided"_a = false, "agreed_terms"_a = "", "begins"_a = false,
        "Brings rows times their gates back; returns the sums over each token's choices, the weights, and whether rows "
        "have been added: if not, the first has the rows of all choices. `undivided`: in one piece; `agreed_terms`: "
        "what "
        "else ranks agree on; `begins`: returns a MoeCollect.");
    m.def(
        "moe_terms",
        [](const std::string& dtype, size_t length, const std::string& text) {
            return terms_of(dtype_from_name(dtype), length, text);
        },
        "dtype"_a, "length"_a, "text"_a, "What ranks agree on that move rows, for `terms` of an exchange.");
    m.def(
        "moe_pack",
        [](const std::shared_ptr<Options>& options, nb::handle numbers, std::optional<Numbers> sends,
           nb::handle priority, nb::handle weights, int64_t tokens, int64_t k, size_t width, int64_t terms) {
            return nb::steal<nb::any>(
                device_pack(options, numbers, std::move(sends), priority, weights, tokens, k, width, terms).release());
        },
        "options"_a.none(), "numbers"_a, "sends"_a.none(), "priority"_a.none(), "weights"_a.none(), "tokens"_a, "k"_a,
        "width"_a, "terms"_a,
        "What a device sends: order, pairs and rows for every rank, headers as rows of bytes, their rows in the "
        "buffer, the tokens behind them and theirs. `numbers`: choices, or with `sends` the pairs in order.");
    m.def(
        "moe_unpack",
        [](const std::shared_ptr<Options>& options, nb::handle fetch, const Numbers& recvs, std::optional<size_t> width,
           size_t stride, int64_t terms, int rank, nb::handle source, nb::handle token) {
            return nb::steal<nb::any>(
                device_unpack(options, fetch, recvs, width, stride, terms, rank, source, token).release());
        },
        "options"_a.none(), "fetch"_a, "recvs"_a, "width"_a.none(), "stride"_a, "terms"_a, "rank"_a,
        "source"_a.none() = nb::none(), "token"_a.none() = nb::none(),
        "Reads the headers that a device received, whose rows `fetch` returns: source, token, pairs, tokens and "
        "choices of every rank, rows of every expert, weights as bytes, and each expert's row among the received.");
    m.def(
        "moe_columns",
        [](nb::object adapter, CommunicatorPtr communicator, const std::vector<nb::object>& parts, nb::handle index,
           size_t chosen_parts, const Numbers& sends, const std::optional<Numbers>& recvs,
           const std::vector<int>& fills, int64_t least, int64_t terms) {
            return nb::steal<nb::any>(exchange_columns(std::move(adapter), std::move(communicator), parts, index,
                                                       chosen_parts, sends, recvs, fills, least, terms)
                                          .release());
        },
        "adapter"_a.none(), "communicator"_a, "parts"_a, "index"_a, "chosen"_a, "sends"_a, "recvs"_a.none(), "fills"_a,
        "least"_a, "terms"_a,
        "Sends rows of several tensors side by side: rows `index` of the first `chosen`, all rows of the others. "
        "Returns a list of what arrived of each, at least `least` rows, the last ones of bytes `fills`, and how many "
        "came from each rank; without `recvs` it learns that.");
    m.def("moe_check_shapes", &check_shapes, "tokens"_a, "ids"_a, "weights"_a.none(),
          "Checks shapes of a dispatch; returns the numbers of tokens and choices.");
    m.def("moe_check_again", &check_again, "tokens"_a, "weights"_a.none(), "n"_a, "k"_a,
          "Checks shapes of tokens and weights that take the route of others.");
    m.def("moe_check_outputs", &check_outputs, "shape"_a, "rows"_a, "Checks the shape of what experts made of rows.");
    m.def(
        "moe_pieces",
        [](std::optional<int64_t> back, std::optional<int64_t> there) {
            const auto before = std::pair(moe::chunk_bytes, moe::following_bytes);
            moe::chunk_bytes = back.value_or(before.first);
            moe::following_bytes = there.value_or(before.second);
            return before;
        },
        "back"_a = nb::none(), "there"_a = nb::none(),
        "Sets about how many bytes go in a piece, back and behind a header; returns the values before. For tests.");
}

}  // namespace alltoallv
