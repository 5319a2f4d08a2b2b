/// \file moving.h
/// \brief Moves the tokens of a mixture of experts in host memory, to their experts and back, as routing.h says.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "moe/routing.h"
#include "op_kernel/cpu/coded_rows.h"
#include "runtime/core/communicator.h"
#include "runtime/core/request.h"
#include "runtime/shm/arena.h"

namespace alltoallv::moe {

/// Contiguous rows of a tensor, which somebody else keeps.
struct Matrix {
    const void* data = nullptr;
    DType dtype{};
    size_t rows = 0, length = 0;

    size_t width() const { return length * size_of(dtype); }
    kernel::ConstRows bytes() const { return {data, width()}; }
};

/// How rows of a matrix travel: as they are, or as codes of a format.
class RowForm {
  public:
    /// Throws invalid_tensor if rows of the dtype have no codes.
    RowForm(DType dtype, size_t length, std::optional<CodeFormat> payload);

    size_t width() const { return coded_ ? coded_->bytes() : values_; }
    const std::optional<kernel::CodedRows>& coded() const { return coded_; }

    /// Row i of `out` becomes row index[i] of `in`, row i without an index, times its factor, if there are some.
    void encode(kernel::Rows out, const Matrix& in, const int64_t* index, const float* factors, size_t count) const;

    /// Row where[i] of `out`, or row i, becomes the values of row index[i] of `in`; -1: zeros.
    void decode(void* out, kernel::ConstRows in, const int64_t* index, const int64_t* where, size_t count) const;

    /// Row i of `out` becomes the sum of the `terms` rows index[i * terms ...] of `in`; -1: zeros.
    void sum(void* out, kernel::ConstRows in, const int64_t* index, size_t terms, size_t count) const;

  private:
    DType dtype_;
    size_t length_, values_;
    std::optional<kernel::CodedRows> coded_;
};

/// An exchange of rows of bytes, which lives as long as it is under way.
class Exchanged {
  public:
    /// Rows of `stride` bytes for ranks with equal terms, packed in rank order. Without `recvs` it learns them.
    Exchanged(Block rows, size_t stride, Span sends, std::optional<Span> recvs, int64_t terms);

    /// `begins`: it runs in the background, else it is done when this returns.
    void start(Communicator& communicator, bool begins);
    void wait() const;

    // What arrived, once waited for.
    kernel::ConstRows rows() const;
    Span recvs() const;    ///< rows from every rank
    size_t bytes() const;  ///< sent, or received if that is more

  private:
    struct State;
    std::shared_ptr<State> state_;
    WorkPtr work_;
};

/// Tokens under way to their experts.
class Dispatch {
  public:
    /// What travels, prepared: `order`, `sends`, `columns` are as for `pack`. The tokens' memory stays until `fill`.
    /// A dispatch by a known route has no tags among the columns.
    Dispatch(Communicator& communicator, const Matrix& tokens, std::optional<CodeFormat> payload, int64_t k, Span order,
             Span sends, std::span<const Column> columns, int64_t terms);

    size_t bytes() const { return buffer_.bytes(); }
    void start(bool begins);
    void wait() const { exchanged_->wait(); }

    /// Reads the headers that arrived.
    void read();
    const Headers& headers() const { return headers_; }

    /// Fills the experts' rows: their values in `rows`, or codes there and `scales`. `token`: of each pair.
    void fill(Span source, Span token, void* rows, void* scales);

  private:
    bool follows(int64_t tokens) const { return follow(apart_, tokens, packed_.stride); }
    void code_until(size_t end);
    Exchanged begin(const Remainder& chunk);
    void place(kernel::ConstRows from, Span index, const int64_t* where, void* rows, void* scales) const;
    kernel::ConstRows coded_rows() const;

    Communicator& communicator_;
    const Matrix tokens_;
    const RowForm form_;
    const bool apart_;
    const int64_t terms_;
    std::vector<size_t> widths_;
    Packed packed_;
    Block coded_, buffer_;  // codes of the tokens, if they have some; what goes with the headers
    size_t done_ = 0;       // tokens that have been coded
    std::optional<Exchanged> exchanged_;
    Headers headers_;
};

/// Rows of experts under way back to their tokens, where the rows of one token are added.
class Collect {
  public:
    /// `factors`: of all rows, by which they are multiplied before. `weights`: a column that travels along. The memory
    /// of all three stays until `finish`.
    Collect(Communicator& communicator, const Matrix& rows, std::optional<CodeFormat> payload, const float* factors,
            std::optional<Column> weights, std::vector<Chunk> chunks, size_t k, int64_t terms);

    /// True if the core adds such rows; otherwise `finish` gives the rows of all choices, to be added elsewhere.
    bool adds() const { return adds_; }
    size_t bytes() const { return matrix_.rows * form_.width(); }

    /// Sends all chunks in the background.
    void begin();

    /// Sends what has not begun, receives, and fills the tokens `[n, length]`, or `[n, k, length]`, and the weights
    /// `[n, k]`, if there are some.
    void finish(void* tokens, void* weights);

  private:
    Exchanged send(const Chunk& chunk, bool begins) const;

    Communicator& communicator_;
    const Matrix matrix_;
    const RowForm form_;
    const float* const factors_;
    const std::optional<Column> weights_;
    const std::vector<Chunk> chunks_;
    const size_t k_;
    const int64_t terms_;
    const bool adds_;
    std::vector<Exchanged> begun_;
};

}  // namespace alltoallv::moe
