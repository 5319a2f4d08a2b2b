// What CANN knows of the quantized all-reduce. Never compiled against CANN.
#include "register/op_def_registry.h"

namespace ops {

class AlltoallvQuantAllReduce : public OpDef {
  public:
    explicit AlltoallvQuantAllReduce(const char* name) : OpDef(name) {
        Input("x")
            .ParamType(REQUIRED)
            .DataType({ge::DT_FLOAT, ge::DT_FLOAT16, ge::DT_BF16})
            .Format({ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND});
        Output("out")
            .ParamType(REQUIRED)
            .DataType({ge::DT_FLOAT, ge::DT_FLOAT16, ge::DT_BF16})
            .Format({ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND});
        Attr("group").AttrType(REQUIRED).String();
        Attr("group_size").AttrType(OPTIONAL).Int(128);
        AICore().AddConfig("ascend910b");
        AICore().AddConfig("ascend910_93");
        MC2().HcclGroup("group");
    }
};

OP_ADD(AlltoallvQuantAllReduce);

}  // namespace ops
