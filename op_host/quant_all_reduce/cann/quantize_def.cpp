// What CANN knows of the local operators: inputs, outputs, attributes, products. Types are columns of one table;
// inputs, attributes and outputs are aclnn's, in its order, then attributes for graphs alone. Never compiled
// against CANN.
#include <vector>

#include "register/op_def_registry.h"

namespace ops {

/// Codes of 4 bits are also bytes, of two codes each.
class AlltoallvQuantize : public OpDef {
  public:
    explicit AlltoallvQuantize(const char* name) : OpDef(name) {
        const std::vector<ge::DataType> x = {ge::DT_FLOAT, ge::DT_FLOAT16, ge::DT_BF16};
        const std::vector<ge::Format> format(x.size(), ge::FORMAT_ND);
        Input("x").ParamType(REQUIRED).DataType(x).Format(format);
        Output("codes").ParamType(REQUIRED).DataType(std::vector<ge::DataType>(x.size(), ge::DT_INT8)).Format(format);
        Output("scales").ParamType(REQUIRED).DataType(std::vector<ge::DataType>(x.size(), ge::DT_FLOAT)).Format(format);
        Attr("bits").AttrType(OPTIONAL).Int(8);
        Attr("group_size").AttrType(OPTIONAL).Int(128);
        AICore().AddConfig("ascend910b");
        AICore().AddConfig("ascend910_93");
    }
};

/// The output has as many elements as `count` says, of the type `out_dtype`: a number of ACL's.
class AlltoallvDequantizeSum : public OpDef {
  public:
    explicit AlltoallvDequantizeSum(const char* name) : OpDef(name) {
        const std::vector<ge::DataType> out = {ge::DT_FLOAT, ge::DT_FLOAT16, ge::DT_BF16};
        const std::vector<ge::Format> format(out.size(), ge::FORMAT_ND);
        Input("codes").ParamType(REQUIRED).DataType(std::vector<ge::DataType>(out.size(), ge::DT_INT8)).Format(format);
        Input("scales")
            .ParamType(REQUIRED)
            .DataType(std::vector<ge::DataType>(out.size(), ge::DT_FLOAT))
            .Format(format);
        Output("out").ParamType(REQUIRED).DataType(out).Format(format);
        Attr("bits").AttrType(OPTIONAL).Int(8);
        Attr("group_size").AttrType(OPTIONAL).Int(128);
        Attr("out_dtype").AttrType(OPTIONAL).Int(0);
        Attr("count").AttrType(REQUIRED).Int();
        AICore().AddConfig("ascend910b");
        AICore().AddConfig("ascend910_93");
    }
};

/// Codes of several ranks that share scale and offset; the output has the type `out_dtype`.
class AlltoallvSharedScaleSum : public OpDef {
  public:
    explicit AlltoallvSharedScaleSum(const char* name) : OpDef(name) {
        std::vector<ge::DataType> scale, out;
        for (const ge::DataType to : {ge::DT_FLOAT, ge::DT_FLOAT16, ge::DT_BF16}) {
            for (const ge::DataType of_scale : {ge::DT_FLOAT, ge::DT_FLOAT16, ge::DT_BF16}) {
                scale.push_back(of_scale);
                out.push_back(to);
            }
        }
        const std::vector<ge::Format> format(out.size(), ge::FORMAT_ND);
        Input("x").ParamType(REQUIRED).DataType(std::vector<ge::DataType>(out.size(), ge::DT_INT8)).Format(format);
        Input("scale").ParamType(REQUIRED).DataType(scale).Format(format);
        Input("offset").ParamType(REQUIRED).DataType(scale).Format(format);
        Output("out").ParamType(REQUIRED).DataType(out).Format(format);
        Attr("out_dtype").AttrType(OPTIONAL).Int(0);
        AICore().AddConfig("ascend910b");
        AICore().AddConfig("ascend910_93");
    }
};

OP_ADD(AlltoallvQuantize);
OP_ADD(AlltoallvDequantizeSum);
OP_ADD(AlltoallvSharedScaleSum);

}  // namespace ops
