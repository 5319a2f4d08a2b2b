"""CANN's form of the operators, as far as it runs without CANN: definitions, infer shape, tiling, and the package.

CANN's headers are replaced by our own account of what our sources use of them, so this says that these do what they
mean, and not that CANN takes them.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import compiled
import numpy as np
import pytest
from kernels_on_twin import DATA_PLACE, STATUSES, TYPES, Windows, on_ranks, run

from alltoallv.testing import quantized as reference

ROOT = compiled.ROOT
HEADERS = Path(__file__).with_name("cann")
DEFINITIONS = ROOT / "cmake" / "cann" / "definitions"
SOCS = ("ascend910b", "ascend910_93")
INT8, INT32, INT64 = 2, 3, 9
HCCL_BUFFSIZE = 2  # MB; a window has twice as much


def ops_info(folder: Path) -> dict[str, Any]:
    """What the program of that name prints for each product."""
    program = folder / "ops_info"
    sources = sorted((ROOT / "op_host").glob("*/cann/*_def.cpp"))
    source = compiled.as_one(folder / "ops_info.cpp", ROOT / "cmake" / "cann" / "ops_info.cpp", *sources)
    done = compiled.run_compiler(source, "-o", str(program), folders=[DEFINITIONS])
    assert done.returncode == 0, done.stderr
    unknown = subprocess.run([program, "ascend310p"], capture_output=True, text=True, check=False)
    assert (unknown.returncode, unknown.stderr) == (1, "no operator is defined for ascend310p\n")
    return {
        soc: json.loads(subprocess.run([program, soc], capture_output=True, text=True, check=True).stdout)
        for soc in SOCS
    }


def test_info_of_operators_comes_from_their_definitions(tmp_path: Path) -> None:
    info = ops_info(tmp_path)
    assert info["ascend910b"] == info["ascend910_93"]
    found = info["ascend910b"]
    quantize = found["AlltoallvQuantize"]
    nd = "ND,ND,ND"
    assert quantize["input0"] == {
        "name": "x", "paramType": "required", "dtype": "float32,float16,bfloat16", "format": nd,
        "unknownshape_format": nd, "shape": "all",
    }  # fmt: skip
    assert (quantize["output0"]["dtype"], quantize["output1"]["dtype"]) == ("int8,int8,int8", "float32,float32,float32")
    assert quantize["attr"] == {"list": "bits,group_size"}
    assert quantize["attr_bits"] == {"paramType": "optional", "type": "int", "defaultValue": "8", "value": "all"}
    reduce = found["AlltoallvQuantAllReduce"]
    assert reduce["attr_group"] == {"paramType": "required", "type": "str", "value": "all"}
    assert reduce["input1"]["paramType"] == "optional"
    for name, operator in found.items():
        columns = {len(operator[key]["dtype"].split(",")) for key in operator if key.startswith(("input", "output"))}
        assert len(columns) == 1, name
    assert found["AlltoallvAllToAllV"]["opFile"] == {"value": "alltoallv_all_to_all_v"}
    assert found["AlltoallvQuantAllReduce"]["attr_saturate"] == {
        "paramType": "optional", "type": "bool", "defaultValue": "true", "value": "all",
    }  # fmt: skip
    check_definitions(found)


def declared() -> dict[str, list[str]]:
    """The parameters of each operator's first call of aclnn, as C has them, without what all have."""
    operators = {}
    for header in sorted((ROOT / "op_host").glob("*/op_api/*.h")):
        for name, text in re.findall(r"aclnn(\w+)GetWorkspaceSize\(([^)]*)\);", header.read_text()):
            parameters = [re.sub(r"const ", "", parameter).split() for parameter in text.split(",")]
            assert [kind for kind, _ in parameters[-2:]] == ["uint64_t*", "aclOpExecutor**"]
            named = [(kind, re.sub(r"([A-Z])", r"_\1", each).lower()) for kind, each in parameters[:-2]]
            operators[name] = [" ".join(each) for each in named]
    return operators


def check_definitions(found: dict[str, Any]) -> None:
    """CANN's definitions and aclnn have the same tensors and options in the same order. Behind those, a definition has
    what only a graph must be told to infer shapes and types.
    """
    for_graphs = {"count", "capacity", "out_dtype", "rows", "world_size"}
    types = {"int": "int64_t", "bool": "bool", "str": "char*"}
    defined = {}
    for name, operator in found.items():
        attributes = [each for each in operator["attr"]["list"].split(",") if each]
        own = [each for each in attributes if each not in for_graphs]
        assert attributes[: len(own)] == own, name
        tensors = {kind: [f"aclTensor* {operator[key]['name']}" for key in sorted(operator) if key.startswith(kind)]
                   for kind in ("input", "output")}  # fmt: skip
        options = [f"{types[operator[f'attr_{each}']['type']]} {each}" for each in own]
        defined[name] = [*tensors["input"], *options, *tensors["output"]]
    assert declared() == defined


class Host:
    """Infer shape and tiling of all operators."""

    def __init__(self, folder: Path):
        sources = sorted([*(ROOT / "op_host").glob("*/cann/*_infershape.cpp"),
                          *(ROOT / "op_host").glob("*/cann/*_tiling.cpp"),
                          *(ROOT / "op_host").glob("runtime/window/*.cpp")])  # fmt: skip
        source = compiled.as_one(folder / "all.cpp", HEADERS / "host.cpp", *sources)
        target = compiled.library(source, folder / "host.so", [HEADERS, DEFINITIONS, ROOT / "op_host"])
        self.function = ctypes.CDLL(str(target)).alltoallv_cann_run

    def __call__(
        self, op: str, inputs: list[tuple[Any, int]], outputs: int, attributes: list[int], cores: int = 4
    ) -> tuple[list[tuple[list[int], int]], int, np.ndarray[Any, Any]]:
        """Inputs are shapes, or None, and types; returns shapes and types of outputs, cores, and the tiling."""
        shapes = [n for shape, _ in inputs for n in ([-1] if shape is None else [len(shape), *shape])]
        result, tiling = np.zeros(64, np.int64), np.zeros(4096, np.uint8)
        size = self.function(
            op.encode(), len(inputs), (ctypes.c_int64 * len(shapes))(*shapes),
            (ctypes.c_int * len(inputs))(*(kind for _, kind in inputs)), outputs,
            (ctypes.c_int64 * len(attributes))(*attributes), len(attributes), cores,
            ctypes.c_void_p(result.ctypes.data), ctypes.c_void_p(tiling.ctypes.data),
        )  # fmt: skip
        if size < 0:
            raise ValueError(("infer shape", "infer type", "tiling")[-size - 1])
        numbers, made = iter(result.tolist()), []
        for _ in range(outputs):
            dims = [next(numbers) for _ in range(next(numbers))]
            made.append((dims, next(numbers)))
        return made, next(numbers), tiling[:size]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    return Host(tmp_path_factory.mktemp("host"))


@pytest.mark.parametrize("bits", [8, 4])
def test_local_operators_run_with_their_tiling(host: Host, bits: int) -> None:
    x = np.random.default_rng(bits).standard_normal(1000).astype(np.float32)
    group, ranks = 77, 2
    expected = reference.quantize(x, group, bits)
    made, cores, tiling = host("AlltoallvQuantize", [([8, 125], 0)], 2, [bits, group])
    assert made == [([8, 125] if bits == 8 else [expected.codes.size], INT8), ([13], 0)]
    assert cores == 4
    codes, scales = np.zeros(expected.codes.size, np.uint8), np.zeros(13, np.float32)
    run("alltoallv_quantize", cores, x, codes, scales, tiling)
    assert (codes.tobytes(), scales.tobytes()) == (expected.codes.tobytes(), expected.scales.tobytes())

    out, acl_type = TYPES["bfloat16"]
    inputs = [([ranks, codes.size], INT8), ([ranks, 13], 0)]
    made, cores, tiling = host("AlltoallvDequantizeSum", inputs, 1, [bits, group, acl_type, x.size])
    assert made == [([x.size], acl_type)]
    y = np.zeros(x.size, out)
    run("alltoallv_dequantize_sum", cores, np.tile(codes, ranks), np.tile(scales, ranks), y, tiling)
    assert y.tobytes() == reference.cast(reference.dequantize_sum([expected] * ranks), out).tobytes()


def test_shared_scale_and_rows_run_with_their_tiling(host: Host) -> None:
    rng = np.random.default_rng(0)
    x, scale, offset = rng.integers(-128, 128, (3, 100)).astype(np.int8), np.array([0.5, 3], np.float32), np.ones(1)
    half = scale.astype(np.float16)
    inputs = [(list(x.shape), INT8), ([2], TYPES["float16"][1]), ([1], TYPES["float16"][1])]
    made, cores, tiling = host("AlltoallvSharedScaleSum", inputs, 1, [0], cores=3)
    assert (made, cores) == ([([100], 0)], 3)
    y = np.zeros(100, np.float32)
    run("alltoallv_shared_scale_sum", cores, x, half, offset.astype(np.float16), y, tiling)
    expected = reference.shared_scale_all_reduce([row.reshape(-1, 2) for row in x], scale, 1.0, dtype="float32")[0]
    assert y.tobytes() == expected.tobytes()

    rows, index = rng.integers(0, 1 << 15, (7, 2, 3)).astype(np.int16), np.array([6, 0, -1, 3, 3], np.int32)
    made, cores, tiling = host("AlltoallvGatherRows", [([7, 2, 3], 6), ([5], INT32)], 1, [], cores=8)
    assert (made, cores) == ([([5, 2, 3], 6)], 5)
    y = np.full((5, 2, 3), -1, np.int16)
    run("alltoallv_gather_rows", cores, rows, index, y, tiling)
    assert (y == np.where((index >= 0)[:, None, None], rows[index], -1)).all()

    index = np.array([8, 0, 9, 3, 4, 1, 7], np.int32)
    made, cores, tiling = host("AlltoallvScatterRows", [([7, 2, 3], 6), ([7], INT32)], 1, [9], cores=2)
    assert (made, cores) == ([([9, 2, 3], 6)], 2)
    y, expected = (np.full((9, 2, 3), -1, np.int16) for _ in range(2))
    expected[index[index < 9]] = rows[index < 9]
    run("alltoallv_scatter_rows", cores, rows, index, y, tiling)
    assert (y == expected).all()


def with_windows(tiling: np.ndarray[Any, Any], windows: Windows, rank: int) -> np.ndarray[Any, Any]:
    """The tiling, with what CANN's framework knows: this rank, and addresses."""
    full = tiling.copy()
    own = windows.tiling(rank)
    full[:4], full[24 : own.size] = own[:4], own[24:]
    return full


def test_communicating_operators_run_with_their_tiling(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HCCL_BUFFSIZE", str(HCCL_BUFFSIZE))
    size, count, group = 2, 700, 100
    rng = np.random.default_rng(0)
    xs = [rng.standard_normal(count).astype(np.float32) for _ in range(size)]
    inputs = [([count], 0), (None, 0), (None, 0)]
    made, lanes, tiling = host("AlltoallvQuantAllReduce", inputs, 2, [0, 4, group, 1, 0, size, 1], cores=3)
    assert made == [([count], 1), ([48 * 8], INT32)]
    assert lanes == 3
    windows = Windows(size, lanes, 2 * HCCL_BUFFSIZE << 20)
    assert np.array_equal(with_windows(tiling, windows, 1)[12:24], tiling[12:24])
    assert tiling[16:24].view(np.uint64)[0] == windows.lane_bytes  # the plan's places are the twin's ranks' places
    ys, status = [np.zeros(count, np.float16) for _ in xs], [np.zeros((lanes, 8), np.int32) for _ in xs]
    kernel = "alltoallv_quant_all_reduce"
    on_ranks([
        lambda r=r: run(kernel, lanes, xs[r], None, None, ys[r], status[r], with_windows(tiling, windows, r))
        for r in range(size)
    ])  # fmt: skip
    expected = reference.quantized_all_reduce(xs, group_size=group, bits=4, op="avg", dtype="float16")[0]
    assert all(y.tobytes() == expected.tobytes() for y in ys)

    inputs = [([20, 3], 0), ([size], INT64), (None, INT64)]
    expecting = host("AlltoallvAllToAllV", inputs, 3, [0, 1, 12], cores=3)[2]
    made, lanes, tiling = host("AlltoallvAllToAllV", inputs, 3, [0, 0, 12], cores=3)
    assert (expecting.view(np.uint64) - tiling.view(np.uint64)).tolist() == [0] * (tiling.size // 8 - 1) + [1]
    assert made == [([12, 3], 0), ([size], INT64), ([48 * 8], INT32)]
    matrix = np.array([[3, 5], [4, 6]])
    rows = [rng.standard_normal((20, 3)).astype(np.float32) for _ in range(size)]
    outs, received = [np.zeros((12, 3), np.float32) for _ in rows], [np.zeros(size, np.int64) for _ in rows]
    kernel = "alltoallv_all_to_all_v"
    on_ranks([
        lambda r=r: run(kernel, lanes, rows[r], matrix[r].copy(), None, outs[r], received[r], status[r],
                        with_windows(tiling, windows, r))
        for r in range(size)
    ])  # fmt: skip
    assert {STATUSES[code] for each in status for code in each[:, 0].tolist()} == {"done"}
    for r in range(size):
        blocks = [rows[j][matrix[j, :r].sum() :][: matrix[j, r]] for j in range(size)]
        assert np.array_equal(outs[r][: matrix[:, r].sum()], np.concatenate(blocks))
        assert np.array_equal(received[r], matrix[:, r])
    assert DATA_PLACE < 2 * HCCL_BUFFSIZE << 20


def test_what_infer_shape_and_tiling_refuse(host: Host) -> None:
    for op, inputs, outputs, attributes, who in (
        ("AlltoallvQuantize", [([9], 0)], 2, [8, 0], "infer shape"),
        ("AlltoallvQuantize", [([9], 0)], 2, [5, 128], "infer shape"),
        ("AlltoallvDequantizeSum", [([9], INT8), ([1], 0)], 1, [8, 128, 0, 9], "infer shape"),
        ("AlltoallvDequantizeSum", [([1, 9], INT8), ([1, 1], 0)], 1, [8, 0, 0, 9], "tiling"),
        ("AlltoallvSharedScaleSum", [([9], INT8), ([1], 0), ([1], 0)], 1, [0], "infer shape"),
        ("AlltoallvSharedScaleSum", [([2, 9], INT8), ([0], 0), ([1], 0)], 1, [0], "tiling"),
        ("AlltoallvGatherRows", [([9, 2], 0), ([3, 1], INT32)], 1, [], "infer shape"),
        ("AlltoallvScatterRows", [([9, 2], 0), ([9], INT32)], 1, [-1], "infer shape"),
        ("AlltoallvQuantAllReduce", [([9], 0), (None, 0), (None, 0)], 2, [0, 8, 128, 0, 1, 65, 0], "tiling"),
        ("AlltoallvQuantAllReduce", [([9], 0), (None, 0), (None, 0)], 2, [0, 3, 128, 0, 1, 2, 0], "tiling"),
        ("AlltoallvQuantAllReduce", [([9], INT8), ([1], 0), ([1], 0)], 2, [0, 8, 128, 1, 1, 2, 0], "tiling"),
        ("AlltoallvAllToAllV", [([9, 2], 0), ([2], INT64), (None, INT64)], 3, [0, 0, -1], "infer shape"),
    ):
        with pytest.raises(ValueError, match=who):
            host(op, inputs, outputs, attributes)


@pytest.mark.timeout(600)  # compiles the aclnn interface
def test_package(tmp_path: Path) -> None:
    """build.sh with a CANN that has a compiler and libraries in name alone: everything comes to its place."""
    home = tmp_path / "cann"
    for folder in ("bin", "lib64"):
        (home / folder).mkdir(parents=True)
    shutil.copytree(HEADERS, home / "include")
    shutil.copy(DEFINITIONS / "register" / "op_def_registry.h", home / "include" / "register")
    (tmp_path / "empty.cpp").write_text("")
    for name in ("nnopbase", "hccl", "ascendcl", "runtime", "register", "tiling_api", "platform", "graph"):
        compiled.library(tmp_path / "empty.cpp", home / "lib64" / f"lib{name}.so")
    bisheng = home / "bin" / "bisheng"
    bisheng.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/bisheng\n'
        f'while [ "$1" != -o ]; do shift; done\n{compiled.COMPILER} -fPIC -c {tmp_path}/empty.cpp -o "$2"\n'
    )
    bisheng.chmod(0o755)
    built = tmp_path / "build"
    env = {**os.environ, "ASCEND_HOME_PATH": str(home), "CMAKE_BUILD_TYPE": "None"}  # quickly
    command = [ROOT / "build.sh", "--soc=ascend910_93", "--vendor=ours", f"--build-dir={built}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == str(built / "ours-ascend910_93.tar.gz")
    assert "--npu-arch=dav-2201" in (tmp_path / "bisheng").read_text()
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    subprocess.run(["tar", "-xzf", built / "ours-ascend910_93.tar.gz", "-C", unpacked], check=True)
    files = {str(path.relative_to(unpacked / "vendors" / "ours")) for path in unpacked.rglob("*") if path.is_file()
             and path.name != "install.sh"}  # fmt: skip
    machine = os.uname().machine
    assert files == {
        "bin/set_env.bash",
        "op_api/include/all_to_all_v/op_api/aclnn_all_to_all_v.h",
        "op_api/include/quant_all_reduce/op_api/aclnn_quant_all_reduce.h",
        "op_api/include/rows/op_api/aclnn_rows.h",
        "op_api/include/runtime/abi/acl.h",
        "op_api/include/runtime/abi/aclnn.h",
        "op_api/lib/libcust_opapi.so",
        "op_impl/ai_core/tbe/config/ascend910_93/aic-ascend910_93-ops-info.json",
        f"op_impl/ai_core/tbe/op_tiling/lib/linux/{machine}/libcust_opmaster_rt2.0.so",
        f"op_proto/lib/linux/{machine}/libcust_opsproto_rt2.0.so",
        "version.info",
    }
    assert "soc=ascend910_93" in (unpacked / "vendors/ours/version.info").read_text()
    symbols = subprocess.run(["nm", "-D", "--defined-only", unpacked / "vendors/ours/op_api/lib/libcust_opapi.so"],
                             capture_output=True, text=True, check=True).stdout  # fmt: skip
    for name in declared():
        assert f" aclnn{name}\n" in symbols
        assert f" aclnn{name}GetWorkspaceSize\n" in symbols
    check_installation(unpacked, tmp_path / "opp")


def check_installation(unpacked: Path, opp: Path) -> None:
    """The package joins others, and comes first; a second time changes nothing."""
    env = {name: value for name, value in os.environ.items() if name not in ("ASCEND_OPP_PATH", "LD_LIBRARY_PATH")}
    install = unpacked / "install.sh"
    done = subprocess.run([install], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 1
    assert "needs a folder: --install-path=FOLDER, or ASCEND_OPP_PATH" in done.stderr
    (opp / "vendors").mkdir(parents=True)
    (opp / "vendors" / "config.ini").write_text("load_priority=theirs,ours\n")
    for _ in range(2):
        subprocess.run([install], check=True, capture_output=True, env={**env, "ASCEND_OPP_PATH": str(opp)})
        assert (opp / "vendors" / "config.ini").read_text() == "load_priority=ours,theirs\n"
    elsewhere = opp.parent / "elsewhere"
    subprocess.run([install, f"--install-path={elsewhere}"], check=True, capture_output=True, env=env)
    assert (elsewhere / "vendors" / "config.ini").read_text() == "load_priority=ours\n"
    vendor = elsewhere / "vendors" / "ours"
    script = f"source {vendor}/bin/set_env.bash; echo $ASCEND_CUSTOM_OPP_PATH $LD_LIBRARY_PATH"
    shown = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, env=env).stdout
    assert shown == f"{vendor} {vendor}/op_api/lib\n"
