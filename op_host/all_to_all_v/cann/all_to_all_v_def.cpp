// What CANN knows of all-to-all-v with counts in device memory. Never compiled against CANN.
#include <vector>

#include "register/op_def_registry.h"

namespace ops {

/// With `expects` recv_counts is read, and not written. `capacity`, the rows of out, is for graphs alone.
class AlltoallvAllToAllV : public OpDef {
  public:
    explicit AlltoallvAllToAllV(const char* name) : OpDef(name) {
        const std::vector<ge::DataType> moved = {ge::DT_FLOAT, ge::DT_FLOAT16, ge::DT_BF16, ge::DT_INT8,
                                                 ge::DT_INT16, ge::DT_INT32,   ge::DT_INT64};
        const std::vector<ge::Format> format(moved.size(), ge::FORMAT_ND);
        const std::vector<ge::DataType> int64(moved.size(), ge::DT_INT64), int32(moved.size(), ge::DT_INT32);
        Input("x").ParamType(REQUIRED).DataType(moved).Format(format);
        Input("send_counts").ParamType(REQUIRED).DataType(int64).Format(format);
        Input("sdispls").ParamType(OPTIONAL).DataType(int64).Format(format);
        Output("out").ParamType(REQUIRED).DataType(moved).Format(format);
        Output("recv_counts").ParamType(REQUIRED).DataType(int64).Format(format);
        Output("status").ParamType(REQUIRED).DataType(int32).Format(format);
        Attr("group").AttrType(REQUIRED).String();
        Attr("expects").AttrType(OPTIONAL).Bool(false);
        Attr("capacity").AttrType(REQUIRED).Int();
        AICore().AddConfig("ascend910b");
        AICore().AddConfig("ascend910_93");
        MC2().HcclGroup("group");
    }
};

OP_ADD(AlltoallvAllToAllV);

}  // namespace ops
