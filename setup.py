"""``python setup.py bdist_wheel``, ``develop`` and ``install``, with setuptools 61 or newer; metadata: pyproject.toml.

Needs cmake, nanobind and numpy installed (``[build-system]`` of pyproject.toml), since setuptools fetches nothing. pip
does not use this file: it builds the same files by scikit-build-core.
"""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.develop import develop

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / ".ci"))
import backend  # noqa: E402
import on_pypi  # noqa: E402

# From Python 3.12 on one extension module serves all newer versions.
LIMITED_API = sys.version_info >= (3, 12)
FOLDERS = {name: Path("python", name) for name in ("alltoallv", "alltoallv_tools", "alltoallv_emulator")}
FOLDERS["alltoallv_triton"] = Path("op_kernel/triton/alltoallv_triton")


class CMakeBuild(build_ext):
    """Runs CMake into the wheel, or for ``develop`` into the working tree."""

    def run(self):
        if self.inplace:
            backend.install(backend.PYTHON)
        else:
            backend.install(Path(self.build_lib).absolute(), "--strip")

    def get_source_files(self):
        return []


class Develop(develop):
    """Puts a second folder on the path, where setuptools puts one; from version 80 on setuptools asks pip instead."""

    def install_for_development(self):
        super().install_for_development()
        self._second().write_text(f"{ROOT / FOLDERS['alltoallv_triton'].parent}\n", encoding="utf-8")

    def uninstall_link(self):
        super().uninstall_link()
        self._second().unlink(missing_ok=True)

    def _second(self):
        return Path(self.install_dir, "alltoallv_triton.pth")


def packages():
    """The packages with their folders, and the files in them that are not Python."""
    folders, data = {}, {}
    for top, folder in FOLDERS.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            inside = init.parent.relative_to(ROOT / folder).parts
            name = ".".join((top, *inside))
            folders[name] = str(folder.joinpath(*inside))
            names = (file.name for file in init.parent.iterdir() if file.is_file())
            # Compiled files come from CMake.
            data[name] = [name for name in names if not name.endswith((".py", ".pyc", ".so")) and name != "_core.pyi"]
    return folders, data


if "bdist_wheel" in sys.argv and not any(map(find_spec, ("setuptools.command.bdist_wheel", "wheel"))):
    sys.exit("bdist_wheel needs the package wheel, or setuptools 70.1 or newer: pip install wheel")
folders, data = packages()
version = re.search(r'^__version__ = "(.+)"', (ROOT / "python/alltoallv/__init__.py").read_text("utf-8"), re.MULTILINE)
readme, urls = (on_pypi.dynamic_metadata(field, {}, {}) for field in ("readme", "urls"))
setup(
    version=version[1],
    long_description=readme["text"],
    long_description_content_type=readme["content-type"],
    project_urls=urls,
    packages=sorted(folders),
    package_dir={"": "python", "alltoallv_triton": str(FOLDERS["alltoallv_triton"])},
    package_data=data,
    include_package_data=False,
    ext_modules=[Extension("alltoallv._core", [], py_limited_api=LIMITED_API)],
    cmdclass={"build_ext": CMakeBuild, "develop": Develop},
    options={
        "bdist_wheel": {"py_limited_api": "cp312"} if LIMITED_API else {},
        # Not an egg.
        "install": {"single_version_externally_managed": True, "record": "build/installed.txt"},
    },
    zip_safe=False,
)
