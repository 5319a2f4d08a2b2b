// Prints what CANN wants to know of our operators on a product, aic-SOC-ops-info.json, from their definitions.
//
//     ops_info SOC        linked with op_host/*/cann/*_def.cpp, compiled against definitions/register
#include <algorithm>
#include <cctype>
#include <cstdio>
#include <map>
#include <stdexcept>

#include "register/op_def_registry.h"

namespace {

using Fields = std::map<std::string, std::string>;

std::string quoted(const std::string& text) {
    return '"' + text + '"';  // names and numbers alone
}

std::string object(const Fields& fields) {
    std::string text;
    for (const auto& [name, value] : fields)
        text += (text.empty() ? "" : ", ") + quoted(name) + ": " + (value[0] == '{' ? value : quoted(value));
    return '{' + text + '}';
}

const char* name_of(ge::DataType type) {
    switch (type) {
        case ge::DT_FLOAT:
            return "float32";
        case ge::DT_FLOAT16:
            return "float16";
        case ge::DT_BF16:
            return "bfloat16";
        case ge::DT_INT8:
            return "int8";
        case ge::DT_INT16:
            return "int16";
        case ge::DT_INT32:
            return "int32";
        case ge::DT_INT64:
            return "int64";
    }
    throw std::runtime_error("a type has no name");
}

const char* name_of(ops::Option option) {
    return option == ops::REQUIRED ? "required" : option == ops::OPTIONAL ? "optional" : "dynamic";
}

/// AlltoallvAllToAllV: alltoallv_all_to_all_v, the name of the kernel's file and function.
std::string snake(const std::string& type) {
    std::string name;
    for (const char c : type) {
        if (std::isupper(c) && !name.empty()) name += '_';
        name += static_cast<char>(std::tolower(c));
    }
    return name;
}

std::string flag(bool value) {
    return object({{"flag", value ? "true" : "false"}});
}

std::string tensor(const ops::OpParam& param) {
    std::string types, formats;
    for (const ge::DataType type : param.types) types += (types.empty() ? "" : ",") + std::string(name_of(type));
    for (size_t i = 0; i < param.formats.size(); ++i) formats += i == 0 ? "ND" : ",ND";
    if (param.types.empty() || param.types.size() != param.formats.size())
        throw std::runtime_error(param.name + " has not as many formats as types");
    return object({{"name", param.name},
                   {"paramType", name_of(param.option)},
                   {"dtype", types},
                   {"format", formats},
                   {"unknownshape_format", formats},
                   {"shape", "all"}});
}

std::string operator_text(const ops::OpDef& op) {
    Fields fields = {{"opFile", object({{"value", snake(op.type)}})},
                     {"opInterface", object({{"value", snake(op.type)}})},
                     {"dynamicCompileStatic", flag(true)},
                     {"dynamicFormat", flag(true)},
                     {"dynamicRankSupport", flag(true)},
                     {"dynamicShapeSupport", flag(true)},
                     {"needCheckSupport", flag(false)},
                     {"precision_reduce", flag(false)}};
    const size_t columns = op.inputs[0].types.size();
    size_t n = 0;
    for (const auto* params : {&op.inputs, &op.outputs}) {
        n = 0;
        for (const ops::OpParam& param : *params) {
            if (param.types.size() != columns) throw std::runtime_error(param.name + " has another number of columns");
            fields[(params == &op.inputs ? "input" : "output") + std::to_string(n++)] = tensor(param);
        }
    }
    std::string list;
    for (const ops::OpAttr& attr : op.attrs) {
        list += (list.empty() ? "" : ",") + attr.name;
        Fields own = {{"paramType", name_of(attr.option)}, {"type", attr.type}, {"value", "all"}};
        if (!attr.value.empty()) own["defaultValue"] = attr.value;
        fields["attr_" + attr.name] = object(own);
    }
    fields["attr"] = object({{"list", list}});
    return object(fields);
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 2) {
        std::fprintf(stderr, "usage: ops_info SOC\n");
        return 2;
    }
    Fields all;
    for (const auto& op : ops::definitions())
        if (std::ranges::count(op->core.socs, argv[1]) > 0) all[op->type] = operator_text(*op);
    if (all.empty()) {
        std::fprintf(stderr, "no operator is defined for %s\n", argv[1]);
        return 1;
    }
    std::printf("%s\n", object(all).c_str());
}
