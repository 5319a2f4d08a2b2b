// What torch_npu's libop_plugin_atb.so needs of ATB to be loaded: it then registers the operators `atb::` with their
// schemas. The emulator computes them by formulas (python/alltoallv/npu_ops/atb.py), so nobody gets here but by a call
// of ATB itself, which is refused.
#include <cstdint>

#include "runtime/failure.h"

#pragma GCC visibility push(default)
namespace atb {

class Context;
class Operation;
struct Tensor;

namespace infer {
struct ElewiseParam;
struct GroupTopkParam;
struct LinearParam;
struct PagedAttentionParam;
struct ReshapeAndCacheParam;
struct RmsNormParam;
struct RopeParam;
struct SelfAttentionParam;
}  // namespace infer

namespace {
int refuse(const char* name) {
    constexpr int internal_error = 3;  // ATB's ERROR_INTERNAL_ERROR
    alltoallv::emulator::report(name, internal_error, "is not implemented by the emulator");
    return internal_error;
}
}  // namespace

int CreateContext(Context** context);
int DestroyContext(Context* context);
int DestroyOperation(Operation* operation);
template <class Param>
int CreateOperation(const Param& param, Operation** operation);
struct Utils {
    static uint64_t GetTensorSize(const Tensor& tensor);
};

int CreateContext(Context**) {
    return refuse("atb::CreateContext");
}

int DestroyContext(Context*) {
    return refuse("atb::DestroyContext");
}

int DestroyOperation(Operation*) {
    return refuse("atb::DestroyOperation");
}

uint64_t Utils::GetTensorSize(const Tensor&) {
    refuse("atb::Utils::GetTensorSize");
    return 0;
}

template <class Param>
int CreateOperation(const Param&, Operation**) {
    return refuse("atb::CreateOperation");
}

template int CreateOperation(const infer::ElewiseParam&, Operation**);
template int CreateOperation(const infer::GroupTopkParam&, Operation**);
template int CreateOperation(const infer::LinearParam&, Operation**);
template int CreateOperation(const infer::PagedAttentionParam&, Operation**);
template int CreateOperation(const infer::ReshapeAndCacheParam&, Operation**);
template int CreateOperation(const infer::RmsNormParam&, Operation**);
template int CreateOperation(const infer::RopeParam&, Operation**);
template int CreateOperation(const infer::SelfAttentionParam&, Operation**);

}  // namespace atb
#pragma GCC visibility pop
