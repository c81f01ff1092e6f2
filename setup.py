"""Build the kernels once for each set of instructions; where that fails, the package does without them."""

import glob

from setuptools import Extension, setup

INSTRUCTIONS = {
    "avx2": ["-march=x86-64-v3"],
    "avx512": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
}

setup(
    ext_modules=[
        Extension(
            f"vaswani._kernels_{name}",
            sources=sorted(glob.glob("vaswani/kernels/*.c")),
            depends=sorted(glob.glob("vaswani/kernels/*.h")),
            extra_compile_args=["-O3", "-fno-trapping-math", "-fopenmp", *flags],
            extra_link_args=["-fopenmp"],
            optional=True,
        )
        for name, flags in INSTRUCTIONS.items()
    ]
)
