"""What the sessions of noxfile.py are made of: builds, environments, test runs."""

from __future__ import annotations

import configparser
import email
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import gpu_libraries
import nox
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build/core"  # the folder of `make build`, which the Python tests use
COUNTED = ROOT / "build/coverage"  # the folder of the session `coverage`
SOURCES = (ROOT / "python", ROOT / "op_kernel/triton")
ON_SOURCES = {"PYTHONPATH": os.pathsep.join(map(str, SOURCES))}
CPP_ROOMS = ("op_host", "op_kernel", "emulator", "tests", "python/alltoallv/mindspore")
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
BUILD_TOOLS = (*PROJECT["build-system"]["requires"], "cmake>=3.25", "ninja")
PYTEST_PLUGINS = ("pytest-timeout>=2.3",)
# Named, since without an installation nothing announces ours, and with one it may not be named twice.
PLUGIN_MODULES = "alltoallv.testing.plugin", "pytest_timeout", "_hypothesis_pytestplugin"
PLUGINS = tuple(f"-p{name}" for name in PLUGIN_MODULES)
TEST_TOOLS = (*PROJECT["project"]["optional-dependencies"]["testing"], *PYTEST_PLUGINS, "scikit-learn>=1.3")
COVERAGE = "coverage>=7.13,<8"
STRICT = ("-DALLTOALLV_TESTS=ON", "-DALLTOALLV_WERROR=ON")
ASAN = "strict_string_checks=1:detect_stack_use_after_return=1:abort_on_error=0"
# GCC's thread sanitizer does not know the widest address-space randomization of new kernels.
UNRANDOMIZED = ("setarch", "--addr-no-randomize") if shutil.which("setarch") else ()
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


def build_counted(session: nox.Session) -> Path:
    """Builds what counts its lines under build/coverage; returns the folder of its Python."""
    sources, data, rc = (COUNTED / name for name in ("python", "data", "rc"))
    for folder in (sources, data):
        shutil.rmtree(folder, ignore_errors=True)
    session.install(*BUILD_TOOLS, *TEST_TOOLS, COVERAGE)
    counted = "--coverage -fprofile-update=atomic"
    flags = ("-DCMAKE_BUILD_TYPE=None", f"-DCMAKE_CXX_FLAGS={counted} -O1", f"-DCMAKE_SHARED_LINKER_FLAGS={counted}")
    shutil.copytree(ROOT / "python", sources, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    build_core(session, COUNTED / "core", sources, *flags, "-DALLTOALLV_TESTS=ON")
    for counts in (COUNTED / "core").rglob("*.gcda"):
        counts.unlink()
    # Ranks are forked, and many end by a signal or without Python's exit.
    patches = "branch = true\nparallel = true\nsigterm = true\npatch = _exit, execv, fork\n"
    rc.write_text(f"[run]\n{patches}source = {sources}/alltoallv\ndata_file = {data}/c\n")
    os.environ["COVERAGE_PROCESS_START"] = str(rc)  # every Python starts with it, also in the sessions that follow
    return sources


def install_sanitized(session: nox.Session, name: str, sanitizers: str) -> None:
    """Builds and installs the package with these sanitizers, under build/<name>."""
    cmake_args = f"-DALLTOALLV_WERROR=ON -DALLTOALLV_SANITIZE={sanitizers}"
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
        session.run(*UNRANDOMIZED, "python", "-m", "pytest", *tests, *chosen, env=env, external=True)
    finally:
        reports = [report.read_text(errors="replace") for report in build.glob("report.*")]
        print(*reports, sep="\n")
    # What may be refused memory prints a warning of the address sanitizer, which is no error.
    if any(word in report for report in reports for word in ("ERROR: ", "runtime error: ", "WARNING: ThreadSanitizer")):
        session.error("the sanitizers have something to report")


def build_core(session: nox.Session, build: Path, prefix: Path, *arguments: str) -> None:
    """Core, emulator and extension module, as `make build` does; installed where the packages lie in ``prefix``."""
    folder = (session.virtualenv.bin_paths or [Path(sys.executable).parent])[0]
    python = f"-DPython_EXECUTABLE={folder}/python"
    given = shlex.split(os.environ.get("CMAKE_ARGS", ""))
    session.run("cmake", "-S", ".", "-B", str(build), "-G", "Ninja", "--log-level=WARNING", python, *given, *arguments)
    session.run("cmake", "--build", str(build), "--", "--quiet")
    session.run("cmake", "--install", str(build), "--component", "python", "--prefix", str(prefix), silent=True)


def make_packages(session: nox.Session, out: Path) -> tuple[Path, Path]:
    """Returns the source distribution and the wheel, of the build that the Python tests use."""
    shutil.rmtree(out, ignore_errors=True)
    cmake_args = " ".join([os.environ.get("CMAKE_ARGS", ""), *STRICT])
    python = Path(sys.executable).with_name("python")  # the one that has made the build
    make = f"import backend as b; b.build_sdist({str(out)!r}); b.build_wheel({str(out)!r})"
    env = {"CMAKE_ARGS": cmake_args, "SKBUILD_BUILD_DIR": str(BUILD)}
    session.run(str(python), "-c", make, external=True, env=env | {"PYTHONPATH": str(ROOT / ".ci")})
    (archive,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    # By setup.py, with the setuptools of older Ascend images.
    session.install("setuptools==65.5.*", "wheel==0.40.*")
    (packages,) = Path(session.virtualenv.location).glob("lib/python*/site-packages")
    command = (str(python), "setup.py", "--quiet", "bdist_wheel", "--dist-dir", str(out / "setuptools"))
    session.run(*command, external=True, env=env | {"PYTHONPATH": str(packages)})
    (second,) = out.glob("setuptools/*.whl")
    if differences := different_content(wheel, second):
        session.error(f"pip's wheel and setup.py's differ in {', '.join(differences)}")
    return archive, wheel


def different_content(*wheels: Path) -> list[str]:
    """Names the files and the fields of the metadata in which two wheels differ, beside what their makers write."""
    names = {wheel.name for wheel in wheels}
    contents: list[dict[str, Any]] = []
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            content: dict[str, Any] = {name: archive.read(name) for name in archive.namelist()}
        information = {name: content.pop(name).decode() for name in [*content] if ".dist-info/" in name}
        text = {name.rpartition("/")[2]: value for name, value in information.items()}
        metadata = email.message_from_string(text["METADATA"])
        for field in {*metadata} - {"Metadata-Version", "Dynamic", "License-File"}:
            values = metadata.get_all(field, [])
            if field == "Requires-Dist":
                values = [str(Requirement(value)).replace("_", "-") for value in values]
            content[field] = sorted(values)
        content["description"] = metadata.get_payload().strip()
        commands = configparser.ConfigParser()
        commands.read_string(text["entry_points.txt"])
        content["entry points"] = {name: dict(commands[name]) for name in commands.sections()}
        contents.append(content)
    one, other = contents
    different = [name for name in {*one, *other} if one.get(name) != other.get(name)]
    return sorted(different + ([f"the name: {names}"] if len(names) > 1 else []))


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


def framework_tests(session: nox.Session, folders: str, *requirements: str, preload: str = "") -> None:
    """The tests of one front end, in an environment with its framework; ``folders`` are divided by spaces.

    Ranks that tests start by `run` are forked from a process that has imported the modules of ``preload``.
    """
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
        "ALLTOALLV_PRELOAD": preload,
    }
    session.run("python", "-m", "pytest", *PLUGINS, *folders.split(), *selected(session), env=env)


def install_torch(session: nox.Session, version: str) -> None:
    """Installs a version of torch without the libraries for GPUs that PyPI's build for x86_64 asks for.

    Where this machine's pip may not have that version, the session is skipped, and says so.
    """
    for file in filter(os.path.isfile, os.environ.get("UV_CONSTRAINT", "").split()):
        for text in re.findall(r"^torch\b[^#\n]*", Path(file).read_text(), re.MULTILINE):
            if version not in Requirement(text.strip()).specifier:
                session.skip(f"{file} allows {text.strip()}, not {version}")
    session.install("--no-deps", f"torch=={version}.*")
    session.install("filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec", "setuptools")
    (packages,) = Path(session.virtualenv.location).glob("lib/python*/site-packages")
    gpu_libraries.replace(packages)


def record(session: nox.Session, *modules: str) -> None:
    """Lets pytest note what it finds under build/versions, for the table that docs/versions.py writes."""
    code = "import importlib.metadata as m, platform, sys; print('Python', platform.python_version(), end='')"
    code += "; [print(',', name, m.version(name), end='') for name in sys.argv[1:]]"
    versions = session.run("python", "-c", code, *modules, silent=True)
    commit = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, check=False, capture_output=True, text=True
    ).stdout.strip()
    command = shlex.join(["nox", "-s", session.name, *(["--", *session.posargs] if session.posargs else [])])
    name = f"{versions}; {commit}; {command}"
    file = ROOT / "build/versions" / f"{session.name}.xml"
    session.env["PYTEST_ADDOPTS"] = shlex.join([f"--junitxml={file}", "-o", f"junit_suite_name={name}"])


def uninstall(session: nox.Session, *packages: str) -> None:
    """Removes packages from the session's environment, those that are there."""
    if session.venv_backend == "uv":
        session.run_install("uv", "pip", "uninstall", "--quiet", *packages, external=True)
    else:
        session.run_install("python", "-m", "pip", "uninstall", "--yes", "--quiet", *packages)


def selected(session: nox.Session) -> tuple[str, ...]:
    """Arguments for pytest: those given, else what leaves out the slow tests, which the session `full` runs.

    And tells which of the others took the longest, so that somebody sees what `make test` spends its time on.
    """
    return tuple(session.posargs) or ("-m", "not slow", "--durations=40")


def cpp_tests(pattern: str) -> list[str]:
    """The names of the tests in tests/cpp in which the pattern is found."""
    return sorted(path.stem for path in (ROOT / "tests/cpp").glob("*test.cpp") if re.search(pattern, path.stem))


def configure_core(session: nox.Session, name: str, tests: list[str], *arguments: str) -> Path:
    """Builds the core and these of its tests, without Python, under build/<name>, while other sessions' tests wait."""
    build = ROOT / "build" / name
    arguments = ("-DALLTOALLV_PYTHON=OFF", *STRICT, *arguments)
    session.run("cmake", "-S", ".", "-B", str(build), "-G", "Ninja", *arguments)
    jobs = str(len(os.sched_getaffinity(0)))
    session.run("nice", "cmake", "--build", str(build), "--parallel", jobs, "--target", *tests, external=True)
    return build


def ctest(
    session: nox.Session,
    build: Path,
    *arguments: str,
    runner: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
) -> None:
    """Runs what a build has registered; none at all is an error."""
    command = ("ctest", "--test-dir", str(build), "--output-on-failure", "--no-tests=error", *arguments)
    session.run(*runner, *command, env=env, external=bool(runner))


def runtime_library(name: str) -> str:
    """Where the compiler keeps one of its shared libraries."""
    command = [os.environ.get("CXX", "c++"), f"-print-file-name={name}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
