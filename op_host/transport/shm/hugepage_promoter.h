/// \file hugepage_promoter.h
/// \brief Inputs in private memory that peers read again and again are brought together in huge pages.
///
/// For a peer's read the kernel looks up and holds every page, which takes as long as copying 4 KiB. Whoever gives back
/// memory and gets it anew has small pages again.
#pragma once

#include <array>
#include <cstddef>

namespace alltoallv {

/// Not thread-safe.
class HugepagePromoter {
  public:
    /// Peers have read this one.
    void note(const void* input, size_t bytes);

  private:
    static constexpr int convincing = 3;    // reads of an input: what has been read twice may never be again
    static constexpr int until_next = 256;  // reads

    struct Input {
        const void* data = nullptr;
        size_t bytes = 0;
        int reads = 0;
    };

    std::array<Input, 16> latest_;
    size_t oldest_ = 0;
};

}  // namespace alltoallv
