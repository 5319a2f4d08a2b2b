// What CANN knows of the quantized all-reduce. Types are columns of one table. Never compiled against CANN.
#include <vector>

#include "register/op_def_registry.h"

namespace ops {

/// With `scale` and `offset` x has int8 codes that share them on all ranks; without, ranks have scales of their own.
/// `world_size` and `out_dtype` are for graphs alone.
class AlltoallvQuantAllReduce : public OpDef {
  public:
    explicit AlltoallvQuantAllReduce(const char* name) : OpDef(name) {
        std::vector<ge::DataType> x, scale, out;
        for (const ge::DataType to : {ge::DT_FLOAT, ge::DT_FLOAT16, ge::DT_BF16}) {
            for (const ge::DataType from : {ge::DT_FLOAT, ge::DT_FLOAT16, ge::DT_BF16, ge::DT_INT8}) {
                x.push_back(from);
                scale.push_back(ge::DT_FLOAT);
                out.push_back(to);
            }
        }
        const std::vector<ge::Format> format(x.size(), ge::FORMAT_ND);
        Input("x").ParamType(REQUIRED).DataType(x).Format(format);
        Input("scale").ParamType(OPTIONAL).DataType(scale).Format(format);
        Input("offset").ParamType(OPTIONAL).DataType(scale).Format(format);
        Output("out").ParamType(REQUIRED).DataType(out).Format(format);
        Output("status").ParamType(REQUIRED).DataType(std::vector<ge::DataType>(x.size(), ge::DT_INT32)).Format(format);
        Attr("group").AttrType(REQUIRED).String();
        Attr("bits").AttrType(OPTIONAL).Int(8);
        Attr("group_size").AttrType(OPTIONAL).Int(128);
        Attr("average").AttrType(OPTIONAL).Bool(false);
        Attr("saturate").AttrType(OPTIONAL).Bool(true);
        Attr("world_size").AttrType(REQUIRED).Int();
        Attr("out_dtype").AttrType(OPTIONAL).Int(0);
        AICore().AddConfig("ascend910b");
        AICore().AddConfig("ascend910_93");
        MC2().HcclGroup("group");
    }
};

OP_ADD(AlltoallvQuantAllReduce);

}  // namespace ops
