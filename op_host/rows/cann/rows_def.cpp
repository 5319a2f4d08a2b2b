// What CANN knows of the operators that move rows by indices. Types are columns of one table. Never compiled against
// CANN.
#include <vector>

#include "register/op_def_registry.h"

namespace ops {

/// `out` is also read: rows that no index names keep what it holds.
class RowMover : public OpDef {
  public:
    explicit RowMover(const char* name) : OpDef(name) {
        const std::vector<ge::DataType> moved = {ge::DT_FLOAT, ge::DT_FLOAT16, ge::DT_BF16, ge::DT_INT8,
                                                 ge::DT_INT16, ge::DT_INT32,   ge::DT_INT64};
        const std::vector<ge::Format> format(moved.size(), ge::FORMAT_ND);
        Input("x").ParamType(REQUIRED).DataType(moved).Format(format);
        Input("index")
            .ParamType(REQUIRED)
            .DataType(std::vector<ge::DataType>(moved.size(), ge::DT_INT32))
            .Format(format);
        Output("out").ParamType(REQUIRED).DataType(moved).Format(format);
        AICore().AddConfig("ascend910b");
        AICore().AddConfig("ascend910_93");
    }
};

class AlltoallvGatherRows : public RowMover {
  public:
    explicit AlltoallvGatherRows(const char* name) : RowMover(name) {}
};

/// The output has `rows` rows.
class AlltoallvScatterRows : public RowMover {
  public:
    explicit AlltoallvScatterRows(const char* name) : RowMover(name) { Attr("rows").AttrType(REQUIRED).Int(); }
};

OP_ADD(AlltoallvGatherRows);
OP_ADD(AlltoallvScatterRows);

}  // namespace ops
