"""How much memory an engine takes for free: the kernel's own estimate, and the limits of the container around it."""

from pathlib import Path

import pytest

from hybridserve.engine.host_memory import available_nbytes

MIB = 2**20
MEMINFO = f"MemTotal: {24 * 2**20} kB\nMemFree: 243712 kB\nMemAvailable: {13 * 2**20} kB\n"


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, content in {"proc/meminfo": MEMINFO, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def test_what_files_occupy_is_available(tmp_path: Path) -> None:
    assert available_nbytes(machine(tmp_path, {})) == 13 * 2**30


V2 = {"proc/self/cgroup": "0::/pod/app\n", "sys/fs/cgroup/pod/app/memory.max": "max\n"}
V1 = {"proc/self/cgroup": "5:cpu:/x\n4:memory,hugetlb:/docker/abc\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {
                **V2,
                "sys/fs/cgroup/pod/app/memory.max": str(2048 * MIB),
                "sys/fs/cgroup/pod/app/memory.current": str(900 * MIB),
                "sys/fs/cgroup/pod/app/memory.stat": f"anon 1\ninactive_file {600 * MIB}\n",
            },
            1748 * MIB,
        ),
        (
            {
                **V2,
                "sys/fs/cgroup/pod/memory.max": str(512 * MIB),
                "sys/fs/cgroup/pod/memory.current": str(100 * MIB),
            },
            412 * MIB,
        ),
        ({**V2, "sys/fs/cgroup/memory.max": str(700 * MIB), "sys/fs/cgroup/memory.current": "0"}, 700 * MIB),
        ({**V2, "sys/fs/cgroup/memory.max": str(7 * MIB), "sys/fs/cgroup/memory.current": str(9 * MIB)}, 0),
        (
            {
                **V1,
                "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": str(1024 * MIB),
                "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes": str(24 * MIB),
                "sys/fs/cgroup/memory/docker/abc/memory.stat": f"inactive_file 5\ntotal_inactive_file {4 * MIB}\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096),
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "1",
            },
            1004 * MIB,
        ),
        # The path is the host's, which is not to be seen from inside.
        (
            {
                **V1,
                "sys/fs/cgroup/memory/memory.limit_in_bytes": str(300 * MIB),
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "0",
            },
            300 * MIB,
        ),
        (V2, 13 * 2**30),
    ],
    ids=["own", "a parent's", "the container's top", "beyond it", "version 1", "version 1, from inside", "no limit"],
)
def test_a_container_s_limit_counts(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert available_nbytes(machine(tmp_path, files)) == expected


def test_this_machine_has_memory() -> None:
    assert available_nbytes() > 2**20
