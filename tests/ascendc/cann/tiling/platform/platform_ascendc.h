// See ../../register/op_impl_registry.h.
#pragma once

#include "register/op_impl_registry.h"

namespace platform_ascendc {

class PlatformAscendC {
  public:
    explicit PlatformAscendC(const gert::Context* context) : context_(context) {}
    uint32_t GetCoreNumAiv() const { return context_->cores; }
    uint32_t GetLibApiWorkSpaceSize() const { return 16u << 20; }

  private:
    const gert::Context* context_;
};

}  // namespace platform_ascendc
