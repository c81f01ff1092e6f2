"""Build the kernels once for each set of instructions; where that fails, the package does without them."""

import glob
import re
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

INSTRUCTIONS = {
    "avx2": ["-march=x86-64-v3"],
    "avx512": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
}
# Read by vaswani/kernels/library.py, which says why there are no kernels.
NOTE = "vaswani", "kernels", "_build_failed.txt"


class BuildKernels(build_ext):
    """Say that a build failed, and leave a note of it, instead of failing or of keeping silent."""

    def run(self) -> None:
        """Forget the failures of an earlier build, build, and put the note where the libraries are used."""
        note = Path(self.build_lib, *NOTE)
        note.unlink(missing_ok=True)
        super().run()
        if self.inplace:
            in_place = Path(self.get_finalized_command("build_py").get_package_dir("vaswani.kernels"), NOTE[-1])
            in_place.unlink(missing_ok=True)
            if note.exists():
                shutil.copy(note, in_place)

    def build_extension(self, ext: Extension) -> None:
        """Build one library; what goes wrong is noted, and reported by setuptools as it does for an optional one."""
        try:
            super().build_extension(ext)
        except Exception as error:
            reason = re.sub(r"Command '\['([^']*)'.*\]'", r"\1", str(error))
            sys.stderr.write(f"vaswani: {ext.name} could not be built, so everything will be slower: {reason}\n")
            note = Path(self.build_lib, *NOTE)
            note.parent.mkdir(parents=True, exist_ok=True)
            with note.open("a") as file:
                file.write(f"{ext.name}: {reason}\n")
            raise


setup(
    cmdclass={"build_ext": BuildKernels},
    ext_modules=[
        Extension(
            f"vaswani.kernels._kernels_{name}",
            sources=sorted(glob.glob("vaswani/kernels/*.c")),
            depends=sorted(glob.glob("vaswani/kernels/*.h")),
            extra_compile_args=["-O3", "-fno-trapping-math", "-fopenmp", "-fvisibility=hidden", *flags],
            extra_link_args=["-fopenmp"],
            optional=True,
        )
        for name, flags in INSTRUCTIONS.items()
    ],
)
