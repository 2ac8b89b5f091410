"""Compiles the C++ sources of this folder once per machine and keeps the library in the user's cache folder.

Owns the compiler's flags, the library's name (a hash of everything that decides its content) and its publication by rename.
Must not know what the sources compute. Called by the package's `offer`.
"""

import hashlib
import logging
import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hybridserve.errors import MissingDependencyError

log = logging.getLogger(__name__)

COMPILER = "g++"
#: No -ffast-math: it lets sums depend on how loops are unrolled, and links code that flushes denormals in the whole process.
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
)
_SOURCES = Path(__file__).parent
_TIMEOUT_S = 300


def library_path(folder: Path, compiler: str = COMPILER) -> Path:
    """The library's path under `folder`, built now if it is not there. Raises MissingDependencyError with the reason."""
    target = _target(folder, compiler)
    if not target.exists():
        _check_folder(folder)
        log.info("compiling the native kernels for this processor: once, and it can take a minute")
        _compile([path for path in _sources() if path.suffix == ".cpp"], target, compiler)
    return target


def built_library(folder: Path, compiler: str = COMPILER) -> Path | None:
    """The library's path under `folder` if it is there. Raises MissingDependencyError where it cannot be built."""
    target = _target(folder, compiler)
    return target if target.exists() else None


def _target(folder: Path, compiler: str) -> Path:
    return folder / f"{_fingerprint(_sources(), compiler)}.so"


def _sources() -> list[Path]:
    return sorted(path for path in _SOURCES.iterdir() if path.suffix in (".cpp", ".h"))


def _fingerprint(sources: list[Path], compiler: str) -> str:
    """Hash of sources, flags, and what the compiler says of itself and, with -march=native, of this processor."""
    digest = hashlib.sha256(_run([compiler, "-march=native", "-E", "-dM", "-x", "c++", os.devnull]).encode())
    digest.update("\0".join(FLAGS).encode())
    for path in sources:
        content = path.read_bytes()
        digest.update(f"\0{path.name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:32]


def _check_folder(folder: Path) -> None:
    """Make the folder. Code is loaded from it, so others must not be able to write there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise MissingDependencyError(f"cannot use the cache folder {folder}: {error.strerror}") from error
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise MissingDependencyError(f"the cache folder {folder} is writable by others; chmod 700 it")


def _compile(sources: list[Path], target: Path, compiler: str) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [str(Path(scratch) / f"{source.stem}.o") for source in sources]
        commands = [[compiler, *FLAGS, "-c", str(s), "-o", o] for s, o in zip(sources, objects, strict=True)]
        list(pool.map(_run, commands))
        built = Path(scratch) / target.name
        _run([compiler, *FLAGS, "-shared", *objects, "-o", str(built)])
        # Several processes may build at once: each renames a whole file onto the same name.
        built.replace(target)


def _run(command: list[str]) -> str:
    """What the command prints. Raises MissingDependencyError with the compiler's first error line."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except FileNotFoundError as error:
        raise MissingDependencyError(f"{command[0]} not found; install a C++ compiler for the native kernels") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingDependencyError(f"{command[0]} could not run: {error}") from error
    if done.returncode:
        lines = done.stderr.splitlines() or [f"exit status {done.returncode}"]
        raise MissingDependencyError(f"{command[0]} failed: {next((line for line in lines if 'error' in line), lines[0])}")
    return done.stdout
