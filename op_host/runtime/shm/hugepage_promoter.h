/// \file hugepage_promoter.h
/// \brief Moves inputs in private memory that peers read again and again into huge pages.
///
/// For a peer's read the kernel looks up and pins every page, which takes as long as copying 4 KiB. Memory that is
/// freed and allocated again has small pages again.
#pragma once

#include <array>
#include <cstddef>

namespace alltoallv {

/// Not thread-safe.
class HugepagePromoter {
  public:
    /// Records that peers have read this input.
    void note(const void* input, size_t bytes);

  private:
    static constexpr int convincing = 3;    // reads of an input; after only two it may never be read again
    static constexpr int until_next = 256;  // number of reads

    struct Input {
        const void* data = nullptr;
        size_t bytes = 0;
        int reads = 0;
    };

    std::array<Input, 16> latest_;
    size_t oldest_ = 0;
};

}  // namespace alltoallv
