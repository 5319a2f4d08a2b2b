// What our definitions of operators say to CANN, kept instead of registered, so that the package's json comes from the
// definitions themselves, and a machine without CANN can read them. Written from what the definitions use.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

namespace ge {

/// CANN's graph and ACL have the same numbers.
enum DataType { DT_FLOAT = 0, DT_FLOAT16 = 1, DT_INT8 = 2, DT_INT32 = 3, DT_INT16 = 6, DT_INT64 = 9, DT_BF16 = 27 };
enum Format { FORMAT_ND = 2 };

}  // namespace ge

namespace ops {

enum Option { REQUIRED, OPTIONAL, DYNAMIC };

struct OpParam {
    std::string name;
    Option option = REQUIRED;
    std::vector<ge::DataType> types;
    std::vector<ge::Format> formats;

    OpParam& ParamType(Option o) {
        option = o;
        return *this;
    }
    OpParam& DataType(const std::vector<ge::DataType>& t) {
        types = t;
        return *this;
    }
    OpParam& Format(const std::vector<ge::Format>& f) {
        formats = f;
        return *this;
    }
};

struct OpAttr {
    std::string name;
    Option option = REQUIRED;
    std::string type, value;

    OpAttr& AttrType(Option o) {
        option = o;
        return *this;
    }
    void Int() { type = "int"; }
    void Int(int64_t v) {
        type = "int";
        value = std::to_string(v);
    }
    void Bool(bool v) {
        type = "bool";
        value = v ? "true" : "false";
    }
    void String() { type = "str"; }
};

struct OpAICore {
    std::vector<std::string> socs;
    void AddConfig(const char* soc) { socs.emplace_back(soc); }
};

struct OpMC2 {
    std::vector<std::string> groups;
    void HcclGroup(const char* attribute) { groups.emplace_back(attribute); }
};

class OpDef {
  public:
    explicit OpDef(const char* type_) : type(type_) {}

    std::string type;
    std::deque<OpParam> inputs, outputs;
    std::deque<OpAttr> attrs;
    OpAICore core;
    OpMC2 mc2;

  protected:
    OpParam& Input(const char* name) { return added(inputs, name); }
    OpParam& Output(const char* name) { return added(outputs, name); }
    OpAttr& Attr(const char* name) { return added(attrs, name); }
    OpAICore& AICore() { return core; }
    OpMC2& MC2() { return mc2; }

  private:
    template <class T>
    static T& added(std::deque<T>& list, const char* name) {
        list.emplace_back().name = name;
        return list.back();
    }
};

/// All operators of the program.
inline std::vector<std::unique_ptr<OpDef>>& definitions() {
    static std::vector<std::unique_ptr<OpDef>> all;
    return all;
}

}  // namespace ops

#define OP_ADD(Class)                                                  \
    [[maybe_unused]] static const bool Class##_is_kept = [] {          \
        ops::definitions().push_back(std::make_unique<Class>(#Class)); \
        return true;                                                   \
    }()
