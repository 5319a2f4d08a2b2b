// aclopCompileAndExecute: the few operators that torch_npu calls inside its own functions, which a replacement of an
// aten operator (python/alltoallv_emulator/aten.py) does not reach. All others fail, with their name.
#include <algorithm>
#include <cstring>
#include <span>

#include "acl/arguments.h"
#include "acl/tensor.h"
#include "runtime/memory.h"
#include "runtime/stream.h"

using namespace alltoallv::emulator;

namespace {

struct Tensor {
    aclTensorDesc desc;
    aclDataBuffer buffer;
};

struct Call {
    std::vector<Tensor> inputs, outputs;
    aclopAttr attributes;
};

size_t size_of(aclDataType type) {
    if (const size_t size = aclDataTypeSize(type); size > 0) return size;
    throw Failure(acl_error_rt_feature_not_support, "dataType ", type, " is not emulated");
}

size_t bytes_of(const aclTensorDesc& desc) {
    size_t bytes = size_of(desc.type);
    for (const int64_t dim : desc.dims) bytes *= static_cast<size_t>(dim);
    return bytes;
}

void check_counts(const Call& call, size_t inputs, size_t outputs) {
    if (call.inputs.size() == inputs && call.outputs.size() == outputs) return;
    throw Failure(acl_error_invalid_param, "expected ", inputs, " inputs and ", outputs, " outputs");
}

/// Throws unless the tensor's elements lie in its buffer, on the device.
void check_on_device(const char* name, const Tensor& tensor) {
    const size_t bytes = bytes_of(tensor.desc);
    if (tensor.desc.on_host || bytes > tensor.buffer.bytes)
        throw Failure(acl_error_invalid_param, name, " is on the host, or larger than its buffer");
    check_device_range(name, tensor.buffer.data, bytes);
}

/// An element that is a parameter of an operator. On the host it lives only during the call.
class Value {
  public:
    Value(const Tensor& tensor, aclDataType type) : device_(static_cast<const char*>(tensor.buffer.data)) {
        const size_t element = size_of(type);
        if (tensor.desc.type != type || tensor.buffer.bytes < element)
            throw Failure(acl_error_invalid_param, "the value has not the type of the output");
        if (tensor.desc.on_host)
            host_.assign(device_, device_ + element);
        else
            check_device_range("the value", device_, element);
    }
    const char* data() const { return host_.empty() ? device_ : host_.data(); }

  private:
    const char* device_;
    std::vector<char> host_;
};

void fill_with(char* to, size_t bytes, const char* value, size_t element) {
    for (size_t at = 0; at < bytes; at += element) std::memcpy(to + at, value, element);
}

/// Fill(dims, value): sets every element of the output to the value.
Stream::Task fill(const Call& call) {
    check_counts(call, 2, 1);
    const Tensor& output = call.outputs[0];
    check_on_device("output", output);
    const Value value(call.inputs[1], output.desc.type);
    const size_t element = size_of(output.desc.type), bytes = bytes_of(output.desc);
    return [=, to = static_cast<char*>(output.buffer.data)] {
        fill_with(to, bytes, value.data(), element);
        return 0;
    };
}

/// Returns the elements of an integer tensor on the host.
std::vector<int64_t> integers(const Tensor& tensor) {
    const size_t element = size_of(tensor.desc.type), count = tensor.buffer.bytes / element;
    if (!tensor.desc.on_host || (tensor.desc.type != ACL_INT32 && tensor.desc.type != ACL_INT64))
        throw Failure(acl_error_rt_feature_not_support, "only int32 and int64 of the host are emulated here");
    std::vector<int64_t> values(count);
    for (size_t i = 0; i < count; ++i)
        values[i] = element == 4 ? static_cast<const int32_t*>(tensor.buffer.data)[i]
                                 : static_cast<const int64_t*>(tensor.buffer.data)[i];
    return values;
}

/// PadV3(x, paddings, value), mode "constant": puts x into the output, with `paddings[2 d]` elements of the value
/// before it and `paddings[2 d + 1]` after it in dimension d.
Stream::Task pad(const Call& call) {
    check_counts(call, 3, 1);
    const Tensor &input = call.inputs[0], &output = call.outputs[0];
    check_on_device("x", input);
    check_on_device("output", output);
    if (const auto mode = call.attributes.values.find("mode");
        mode != call.attributes.values.end() && mode->second != "constant")
        throw Failure(acl_error_rt_feature_not_support, "mode '", mode->second, "' is not emulated");
    const std::vector<int64_t> paddings = integers(call.inputs[1]), from = input.desc.dims, to = output.desc.dims;
    bool fits = input.desc.type == output.desc.type && from.size() == to.size() && paddings.size() == 2 * from.size();
    for (size_t d = 0; fits && d < from.size(); ++d)
        fits = paddings[2 * d] >= 0 && paddings[2 * d + 1] >= 0 &&
               from[d] + paddings[2 * d] + paddings[2 * d + 1] == to[d];
    if (!fits) throw Failure(acl_error_invalid_param, "x, paddings and output do not fit");
    const Value value(call.inputs[2], output.desc.type);
    return [=, element = size_of(output.desc.type), bytes = bytes_of(output.desc),
            x = static_cast<const char*>(input.buffer.data), y = static_cast<char*>(output.buffer.data),
            count = bytes_of(input.desc) / size_of(input.desc.type)] {
        fill_with(y, bytes, value.data(), element);
        for (size_t i = 0; i < count; ++i) {
            size_t left = i, at = 0, stride = 1;
            for (size_t d = from.size(); d-- > 0;) {
                at += (left % static_cast<size_t>(from[d]) + static_cast<size_t>(paddings[2 * d])) * stride;
                left /= static_cast<size_t>(from[d]);
                stride *= static_cast<size_t>(to[d]);
            }
            std::memcpy(y + at * element, x + i * element, element);
        }
        return 0;
    };
}

struct Operator {
    const char* type;
    Stream::Task (*prepare)(const Call& call);
};

constexpr Operator operators[] = {{"Fill", fill}, {"PadV3", pad}};

std::vector<Tensor> tensors(int count, const aclTensorDesc* const descs[], const aclDataBuffer* const buffers[]) {
    std::vector<Tensor> result;
    for (int i = 0; i < count; ++i) {
        check_pointer("a tensor's description", descs[i]);
        check_pointer("a tensor's buffer", buffers[i]);
        result.push_back({*descs[i], *buffers[i]});
    }
    return result;
}

}  // namespace

aclError aclopCompileAndExecute(const char* opType, int numInputs, const aclTensorDesc* const inputDesc[],
                                const aclDataBuffer* const inputs[], int numOutputs,
                                const aclTensorDesc* const outputDesc[], aclDataBuffer* const outputs[],
                                const aclopAttr* attr, aclopEngineType, aclopCompileType, const char*,
                                aclrtStream stream) {
    ACL_FUNCTION({
        check_pointer("opType", opType);
        const auto* found = std::find_if(std::begin(operators), std::end(operators),
                                         [&](const Operator& entry) { return std::strcmp(entry.type, opType) == 0; });
        if (found == std::end(operators))
            throw Failure(acl_error_rt_feature_not_support, "operator '", opType,
                          "' is not implemented by the emulator");
        const Call call{tensors(numInputs, inputDesc, inputs), tensors(numOutputs, outputDesc, outputs),
                        attr == nullptr ? aclopAttr{} : *attr};
        stream_of(stream)->enqueue(found->prepare(call));
    });
}

aclError aclopCompileAndExecuteV2(const char* opType, int numInputs, aclTensorDesc* inputDesc[],
                                  aclDataBuffer* inputs[], int numOutputs, aclTensorDesc* outputDesc[],
                                  aclDataBuffer* outputs[], aclopAttr* attr, aclopEngineType engineType,
                                  aclopCompileType compileFlag, const char* opPath, aclrtStream stream) {
    return aclopCompileAndExecute(opType, numInputs, inputDesc, inputs, numOutputs, outputDesc, outputs, attr,
                                  engineType, compileFlag, opPath, stream);
}
