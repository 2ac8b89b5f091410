"""How many bytes of main memory this process can still take: what the machine can give, and what its container may have.

Owns the reading of Linux's own accounts (`/proc/meminfo`, cgroups of both versions). Must not know what the memory is for.
Called by `sizing.py`.
"""

import os
from collections.abc import Iterator
from pathlib import Path

#: A cgroup without a limit says "max" (version 2) or a number near 2^63 (version 1).
_NO_LIMIT_NBYTES = 2**60


def available_nbytes(root: Path = Path("/")) -> int:
    """Bytes that can be taken without swapping: the kernel's estimate, or less where a container's limit leaves less.

    What the kernel keeps of files that were read counts as available: it is given up when somebody needs memory, and weights that
    have just been read fill it. `root` is where `proc` and `sys` are.
    """
    machine = _of_machine(root)
    return max(0, min([machine, *_left_in_cgroups(root)]))


def _of_machine(root: Path) -> int:
    fields = _fields(root / "proc/meminfo")
    if "MemAvailable:" in fields:
        return fields["MemAvailable:"] * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _left_in_cgroups(root: Path) -> Iterator[int]:
    """What each cgroup that this process is in still allows: its own and all above, of which the tightest counts."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # Inside a container the path may be the host's: then the files of the container's own group lie at the top.
        folder = base / path.strip("/")
        for group in (folder, *folder.parents):
            if not group.is_relative_to(base):
                break
            left = _left_in(group, *names)
            if left is not None:
                yield left


def _left_in(group: Path, limit_name: str, usage_name: str, reclaimable_name: str) -> int | None:
    """What one cgroup still allows, or None where it has no limit."""
    limit, usage = _number(group / limit_name), _number(group / usage_name)
    if limit is None or usage is None or limit >= _NO_LIMIT_NBYTES:
        return None
    return limit - usage + _fields(group / "memory.stat").get(reclaimable_name, 0)


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _fields(path: Path) -> dict[str, int]:
    """A file of lines such as `MemAvailable:  123 kB` or `inactive_file 123`."""
    words = (line.split() for line in _text(path).splitlines())
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
