"""Compiles the kernels with the C compiler of the machine, once, into the cache folder."""

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from nanolm.errors import NanolmError
from nanolm.machine import cache_folder

HEADERS, CODE = ("rows.h", "kernels.h"), ("kernels.c", "attention.c", "decoding.c", "blocks.c")
SOURCES = [Path(__file__).with_name(name) for name in (*CODE, *HEADERS)]
FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
# The first that compiles. Without OpenMP, the kernels would use one thread, and torch is faster.
# By default, compilers use only half of the widest vectors on many processors.
VARIANTS = (
    ("-march=native", "-mprefer-vector-width=512", "-fopenmp"),
    *(("-march=native", "-fopenmp"), ("-mcpu=native", "-fopenmp"), ("-fopenmp",)),
)
COMPILE_SECONDS = 120.0


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None without a working compiler."""
    with contextlib.suppress(OSError, subprocess.SubprocessError, NanolmError):
        if compiler := which():
            file = cache_folder() / f"kernels-{fingerprint(compiler)}.so"
            if file.exists():
                with contextlib.suppress(OSError):  # a damaged file is compiled again
                    return ctypes.CDLL(str(file))
            compile_to(file, compiler)
            return ctypes.CDLL(str(file))
    return None


def which() -> str | None:
    return shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")


def fingerprint(compiler: str) -> str:
    """Of everything that the compiled code depends on: a cache folder may be shared by machines."""
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in SOURCES))
    digest.update(repr((FLAGS, VARIANTS, compiler, platform.uname()[4:], cpu_features())).encode())
    return digest.hexdigest()[:16]


def cpu_features() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return ""


def compile_to(file: Path, compiler: str) -> None:
    with tempfile.TemporaryDirectory(dir=file.parent, prefix="kernels-") as folder:
        made = Path(folder) / "kernels.so"
        for variant in VARIANTS:
            given = (*variant, *map(str, SOURCES[: len(CODE)]))
            command = [compiler, *FLAGS, *given, "-o", str(made), "-lm"]
            run = subprocess.run(command, capture_output=True, timeout=COMPILE_SECONDS)
            if run.returncode == 0:
                os.replace(made, file)
                return
    raise OSError("the kernels do not compile")
