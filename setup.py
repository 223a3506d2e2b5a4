"""Builds the CPU kernels where there is a compiler for them; without one everything else works."""

from pathlib import Path

import jax
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HERE = Path("kernels/native")
FLAGS = ["-std=c++20", "-O3", "-Wno-psabi", "-Wno-maybe-uninitialized"]


class BuildIfPossible(build_ext):
    """A library that is loaded by path, or a file that says why there is none."""

    def get_ext_filename(self, fullname: str) -> str:
        """The name without the Python version: the library knows nothing of Python."""
        return str(Path(*fullname.split("."))) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        """Nothing that Python would look for."""
        return []

    def build_extension(self, ext: Extension) -> None:
        """Build it, and note beside it what went wrong if that fails."""
        built = Path(self.get_ext_fullpath(ext.name)).parent
        reason = (HERE if self.editable_mode else built) / "failed.txt"
        try:
            super().build_extension(ext)
            reason.unlink(missing_ok=True)
        except Exception as error:
            reason.parent.mkdir(parents=True, exist_ok=True)
            reason.write_text(f"{error}\n")
            self.announce(f"anyfold: the CPU kernels are left out: {error}", level=3)


setup(
    cmdclass={"build_ext": BuildIfPossible},
    ext_modules=[
        Extension(
            "kernels.native.handlers",
            sources=sorted(str(path) for path in HERE.glob("*.cc")),
            depends=sorted(str(path) for path in HERE.glob("*.h")),
            include_dirs=[jax.ffi.include_dir()],
            extra_compile_args=FLAGS,
            language="c++",
            optional=True,
        )
    ],
)
