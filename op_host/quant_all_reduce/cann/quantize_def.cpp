// What CANN knows of the two local operators: inputs, outputs, attributes, products. Never compiled against CANN.
#include "register/op_def_registry.h"

namespace ops {

/// Columns of one table: the type of x decides nothing about codes and scales.
class AlltoallvQuantize : public OpDef {
  public:
    explicit AlltoallvQuantize(const char* name) : OpDef(name) {
        Input("x")
            .ParamType(REQUIRED)
            .DataType({ge::DT_FLOAT, ge::DT_FLOAT16, ge::DT_BF16})
            .Format({ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND});
        Output("codes")
            .ParamType(REQUIRED)
            .DataType({ge::DT_INT8, ge::DT_INT8, ge::DT_INT8})
            .Format({ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND});
        Output("scales")
            .ParamType(REQUIRED)
            .DataType({ge::DT_FLOAT, ge::DT_FLOAT, ge::DT_FLOAT})
            .Format({ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND});
        Attr("group_size").AttrType(OPTIONAL).Int(128);
        AICore().AddConfig("ascend910b");
        AICore().AddConfig("ascend910_93");
    }
};

/// The type of the output is that of the attribute: ACL's numbers, as in the tiling.
class AlltoallvDequantizeSum : public OpDef {
  public:
    explicit AlltoallvDequantizeSum(const char* name) : OpDef(name) {
        Input("codes")
            .ParamType(REQUIRED)
            .DataType({ge::DT_INT8, ge::DT_INT8, ge::DT_INT8})
            .Format({ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND});
        Input("scales")
            .ParamType(REQUIRED)
            .DataType({ge::DT_FLOAT, ge::DT_FLOAT, ge::DT_FLOAT})
            .Format({ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND});
        Output("out")
            .ParamType(REQUIRED)
            .DataType({ge::DT_FLOAT, ge::DT_FLOAT16, ge::DT_BF16})
            .Format({ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND});
        Attr("group_size").AttrType(OPTIONAL).Int(128);
        Attr("out_dtype").AttrType(OPTIONAL).Int(0);
        AICore().AddConfig("ascend910b");
        AICore().AddConfig("ascend910_93");
    }
};

OP_ADD(AlltoallvQuantize);
OP_ADD(AlltoallvDequantizeSum);

}  // namespace ops
