"""Our declarations of ACL and HCCL, and the emulator's symbols, against the headers in torch_npu's wheel.

A generated program includes the wheel's headers in a namespace, with every function renamed, and ours outside of it,
and compares: values of constants and enumerators, sizes and offsets of structures, results and arguments of functions.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from npu_starts import wheel

import alltoallv_emulator as emulator

ROOT = Path(__file__).resolve().parents[2]
UNIMPLEMENTED = sorted((ROOT / "emulator" / "acl").glob("unimplemented_*.inc"))
OURS = {
    path: ROOT / folder / path
    for folder, path in (
        ("op_host", "runtime/abi/acl.h"),
        ("emulator", "acl/acl_api.h"),
        ("emulator", "acl/acl_op.h"),
        ("op_host", "runtime/abi/hccl.h"),
        ("emulator", "hccl/hccl_api.h"),
    )
}
# Of our own making: what they describe has no name in the wheel's headers, or a name without rule.
NOT_IN_THE_WHEEL = {"HcclCommConfigInfo"}
CONSTANTS = {
    "hccl_root_info_bytes": "HCCL_ROOT_INFO_BYTES",
    "hccl_comm_name_bytes": "COMM_NAME_MAX_LENGTH",
    "hccl_comm_config_magic": "HCCL_COMM_CONFIG_MAGIC_WORD",
    "hccl_comm_config_version": "HCCL_COMM_CONFIG_VERSION",
    "hccl_config_not_set": "HCCL_COMM_BUFFSIZE_CONFIG_NOT_SET",
}

COMPARE = r"""
template <class A, class B> constexpr bool same();
template <class A, class B> struct Same {
    static constexpr bool value = [] {
        if constexpr (std::is_enum_v<A> && std::is_enum_v<B>) return sizeof(A) == sizeof(B);
        else if constexpr (std::is_class_v<A>) return std::is_class_v<B>;
        else if constexpr (std::is_union_v<A>) return std::is_union_v<B>;
        else return std::is_same_v<A, B>;
    }();
};
template <class A, class B> struct Same<A*, B*> { static constexpr bool value = same<A, B>(); };
template <class R, class... A, class S, class... B> struct Same<R(A...), S(B...)> {
    static constexpr bool value = [] {
        if constexpr (sizeof...(A) != sizeof...(B)) return false;
        else return (same<R, S>() && ... && same<A, B>());
    }();
};
template <class R, class... A, class S, class... B> struct Same<R(A..., ...), S(B..., ...)> {
    static constexpr bool value = Same<R(A...), S(B...)>::value;
};
template <class A, class B> constexpr bool same() {
    return std::is_const_v<A> == std::is_const_v<B> && Same<std::remove_cv_t<A>, std::remove_cv_t<B>>::value;
}
template <class F> struct Result;
template <class R, class... A> struct Result<R(A...)> { using type = R; };
template <class R, class... A> struct Result<R(A..., ...)> { using type = R; };
"""

CONFIG = r"""
int main() {  // what HcclCommConfigInit writes, and hccl_default_config
    wheel::HcclCommConfig theirs{};
    wheel::HcclCommConfigInit(&theirs);
    const HcclCommConfig ours = hccl_default_config();
    int wrong = 0;
    const auto compare = [&](const char* name, const void* a, const void* b, size_t bytes) {
        if (std::memcmp(a, b, bytes) == 0) return;
        std::fprintf(stderr, "%s differs\n", name);
        wrong = 1;
    };
FIELDS
    return wrong;
}
"""


def without_comments(text: str) -> str:
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    return re.sub(r"//[^\n]*", "", text)


def declared_by_the_wheel() -> set[str]:
    """Every function that acl/*.h and hccl.h declare."""
    folder = wheel() / "include" / "third_party"
    names = set()
    for header in [*(folder / "acl/inc/acl").glob("*.h"), folder / "hccl/inc/hccl/hccl.h"]:
        text = re.sub(
            r"^\s*#(.*\\\n)*.*$", "", without_comments(header.read_text(errors="replace")), flags=re.MULTILINE
        )
        text = re.sub(r"typedef[^;{]*;", "", text)
        text = re.sub(r"inline[^;{]*\{", "{", text)
        names |= set(re.findall(r"\b((?:acl|Hccl)\w+)\s*\([^;{}]*?\)\s*;", text))
    return {name for name in names if not name.startswith("HcclCommConfigInit")}


def program(ours: dict[str, str]) -> str:
    """The comparison with these texts of our headers, by file name."""
    text = without_comments("\n".join(ours.values()))
    functions = re.findall(r"\b((?:acl|Hccl)\w+)\([^;{}]*\);", text)
    enumerators = re.findall(r"\b([A-Z][A-Z0-9_]+) = -?\d", text)
    constants = {name: name.upper() for name in re.findall(r"constexpr \w+ (acl_\w+) =", text)} | CONSTANTS
    structs = dict(re.findall(r"^struct (\w+) \{\n(.*?)^\};", text, flags=re.MULTILINE | re.DOTALL))
    assert len(functions) > 120
    assert len(enumerators) > 100
    assert len(structs) > 6
    unimplemented = re.findall(
        r"^(FAILS|EMPTY|UNDEFINED)\(((?!rt)\w+)\)",
        "\n".join(path.read_text() for path in UNIMPLEMENTED),
        flags=re.MULTILINE,
    )
    all_functions = [*functions, *(name for _, name in unimplemented)]
    # Overloads for C++ call functions of the global namespace.
    lines = ["#define INC_EXTERNAL_ACL_ACL_RT_API_H_"]
    lines += [f"#include <{name}>" for name in ("cstddef", "cstdint", "cstdio", "cstring", "type_traits", "stdbool.h")]
    lines += [f"#define {name} wheel_{name}" for name in all_functions]
    lines += ["namespace wheel {"]
    headers = ("acl", "acl_op", "acl_op_compiler", "acl_prof", "acl_tdt", "acl_tdt_queue", "acl_dump", "acl_platform")
    headers += ("acl_rt_memory_soma",)
    lines += [f'#include "acl/{name}.h"' for name in headers]
    lines += ['#include "acl/super_kernel.h"', '#include "hccl/hccl.h"']
    compared = [*enumerators, *constants.values()]
    lines += [f"constexpr long value_of_{name} = static_cast<long>({name});" for name in compared]
    lines += ["}"]
    lines += [f"#undef {name}" for name in [*all_functions, *compared]]
    lines += [re.sub(r'#pragma once|#include "(runtime/abi|acl|hccl)/.*', "", ours[name]) for name in OURS]
    lines += [COMPARE]
    pairs = {**{name: name for name in enumerators}, **constants}
    for name, theirs in pairs.items():
        lines.append(f'static_assert(static_cast<long>(::{name}) == wheel::value_of_{theirs}, "{name}");')
    for name, body in structs.items():
        if name in NOT_IN_THE_WHEEL:
            continue
        lines.append(f'static_assert(sizeof(::{name}) == sizeof(wheel::{name}), "size of {name}");')
        for field in re.findall(r"(\w+)(?:\[\w+\])?;", body):
            for what in (f"offsetof(::{name}, {field})", f"sizeof(::{name}::{field})"):
                lines.append(f'static_assert({what} == {what.replace("::" + name, "wheel::" + name, 1)}, "{what}");')
    for name in functions:
        lines.append(f'static_assert(same<decltype(::{name}), decltype(wheel::wheel_{name})>(), "{name}");')
    for kind, name in unimplemented:
        result = f"Result<decltype(wheel::wheel_{name})>::type"
        test = {
            "FAILS": f"std::is_same_v<{result}, int>",
            "EMPTY": f"!std::is_same_v<{result}, int> && !std::is_enum_v<{result}>",
            "UNDEFINED": f"std::is_enum_v<{result}> || std::is_same_v<{result}, uint32_t>",
        }[kind]
        lines.append(f'static_assert(({test}) && !std::is_floating_point_v<{result}>, "result of {name}");')
    fields = re.findall(r"(\w+)(?:\[\w+\])?;", structs["HcclCommConfig"])
    compare = [f'    compare("{name}", &theirs.{name}, &ours.{name}, sizeof ours.{name});' for name in fields]
    return "\n".join([*lines, CONFIG.replace("FIELDS", "\n".join(compare))])


def compiled(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    source = folder / "abi.cpp"
    source.write_text(text)
    include = wheel() / "include"
    folders = (include, include / "third_party/acl/inc", include / "third_party/hccl/inc")
    command = [os.environ.get("CXX", "c++"), "-std=c++20", "-w", *(f"-I{path}" for path in folders)]
    command += [str(source), "-o", str(folder / "abi")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def our_headers() -> dict[str, str]:
    return {name: path.read_text() for name, path in OURS.items()}


def test_declarations_are_the_wheels(tmp_path: Path) -> None:
    result = compiled(program(our_headers()), tmp_path)
    assert result.returncode == 0, "\n".join(line for line in result.stderr.splitlines() if "error" in line)[:4000]
    subprocess.run([str(tmp_path / "abi")], check=True)


def looked_up_by_torch_npu() -> set[str]:
    """Beyond its headers: names in its library, of functions that it asks the loader for."""
    content = (wheel() / "lib" / "libtorch_npu.so").read_bytes()
    found = re.findall(rb"(?<=\0)(?:Hccl[A-Z]|aclrt[A-Z]|aclmdl[A-Z]|acltdt[A-Z])[A-Za-z0-9]+(?=\0)", content)
    # Names of torch_npu's own: of its operators, its classes, and "…Face" of its wrappers.
    own = {"HcclAllgather", "HcclAllgatherBase", "HcclAllgatherTogather", "HcclAllreduce", "HcclReduceScatterBase"}
    names = {name.decode() for name in found} - own - {"HcclCommList"}
    names = {name for name in names if not name.endswith("Face")}
    assert {"HcclCommSymWinRegister", "HcclAlltoAllV", "aclrtSynchronizeStream"} <= names
    return names


@pytest.mark.parametrize(("names_of", "least"), [(looked_up_by_torch_npu, 81), (declared_by_the_wheel, 651)])
def test_every_function_exists(names_of: Callable[[], set[str]], least: int) -> None:
    libraries = [ctypes.CDLL(str(emulator.library_folder() / name)) for name in emulator.LIBRARY_NAMES]
    names = names_of()
    assert len(names) >= least
    missing = [name for name in sorted(names) if not any(hasattr(library, name) for library in libraries)]
    assert missing == []


def test_libatb_has_what_torch_npus_library_of_operators_needs() -> None:
    plugin = wheel() / "lib" / "libop_plugin_atb.so"
    symbols = subprocess.run(["nm", "-D", "--undefined-only", plugin], check=True, capture_output=True, text=True)
    needed = [name for name in symbols.stdout.split() if name.startswith("_ZN3atb")]
    assert len(needed) >= 12
    library = ctypes.CDLL(str(emulator.library_folder() / "libatb.so"))
    assert [name for name in needed if not hasattr(library, name)] == []


def test_what_has_no_meaning_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    library = ctypes.CDLL(str(emulator.library_folder() / "libascendcl.so"))
    library.aclGetRecentErrMsg.restype = ctypes.c_char_p
    assert library.aclmdlLoadFromFile() == 207000
    message = "aclmdlLoadFromFile: is not implemented by the emulator"
    assert library.aclGetRecentErrMsg().decode().startswith(message)
    assert library.aclGetRecentErrMsg() == b""
    assert message in capfd.readouterr().err
    library.aclmdlGetInputDataType.restype = ctypes.c_int
    assert library.aclmdlGetInputDataType() == -1  # ACL_DT_UNDEFINED: 0 is a type
