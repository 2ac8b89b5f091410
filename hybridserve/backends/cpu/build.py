"""Compiles the C++ sources of this folder once per machine and keeps the library in the user's cache folder.

Owns the compiler's flags, the library's name (a hash of everything that decides its content), its publication by rename and the
decision whether a library that is there may be loaded.
Must not know what the sources compute. Called by the package's `offer`.
"""

import hashlib
import logging
import os
import stat
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
_DIGEST_NBYTES = hashlib.sha256().digest_size


def library_path(folder: Path, compiler: str = COMPILER) -> Path:
    """The library's path under `folder`, built now if it is not there whole. Raises MissingDependencyError with the reason."""
    target = _target(folder, compiler)
    _make_folder(folder)
    _check_trust(target)
    if not _is_whole(target):
        log.info("compiling the native kernels for this processor: once, and it can take a minute")
        _compile([path for path in _sources() if path.suffix == ".cpp"], target, compiler)
    return target


def built_library(folder: Path, compiler: str = COMPILER) -> Path | None:
    """The library's path under `folder` if it is there whole. Raises MissingDependencyError as `library_path` does."""
    target = _target(folder, compiler)
    _check_trust(target)
    return target if _is_whole(target) else None


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


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise MissingDependencyError(f"cannot use the cache folder {folder}: {error.strerror}") from error


def _check_trust(target: Path) -> None:
    """Code is loaded from `target`: nobody but this user and root may be able to put something else there.

    So the file and every folder above it belong to one of the two and are not writable by others. In a folder like /tmp, where
    only owners may rename and delete (the sticky bit), others may write: our entry in it is safe.
    """
    try:
        real = target.resolve(strict=False)
        for path in (target, real, *real.parents):
            if not path.is_symlink() and path.exists():
                _check_owner(path)
    except OSError as error:
        raise MissingDependencyError(f"cannot use the cache folder {target.parent}: {error.strerror}") from error


def _check_owner(path: Path) -> None:
    status = path.stat()
    if status.st_uid not in (0, os.getuid()):
        raise MissingDependencyError(f"{path} belongs to user {status.st_uid}: no code is loaded from there; set XDG_CACHE_HOME")
    is_shared = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if status.st_mode & 0o022 and not is_shared:
        raise MissingDependencyError(f"{path} is writable by others: no code is loaded from there; chmod go-w {path}")


def _is_whole(target: Path) -> bool:
    """Whether the library ends with the digest of what stands before: mapping a file that was cut off can kill the process."""
    try:
        content = target.read_bytes()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise MissingDependencyError(f"cannot read {target}: {error.strerror}") from error
    return len(content) > _DIGEST_NBYTES and _digest(content[:-_DIGEST_NBYTES]) == content[-_DIGEST_NBYTES:]


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _compile(sources: list[Path], target: Path, compiler: str) -> None:
    try:
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch, ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = [str(Path(scratch) / f"{source.stem}.o") for source in sources]
            commands = [[compiler, *FLAGS, "-c", str(s), "-o", o] for s, o in zip(sources, objects, strict=True)]
            list(pool.map(_run, commands))
            built = Path(scratch) / target.name
            _run([compiler, *FLAGS, "-shared", *objects, "-o", str(built)])
            if not built.is_file():
                raise MissingDependencyError(f"{compiler} ended without an error and wrote no library")
            # Loaders ignore what follows the last section.
            content = built.read_bytes()
            built.write_bytes(content + _digest(content))
            built.chmod(0o700)
            # Several processes may build at once: each renames a whole file onto the same name.
            built.replace(target)
    except OSError as error:
        raise MissingDependencyError(f"cannot write the native kernels under {target.parent}: {error.strerror}") from error


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
