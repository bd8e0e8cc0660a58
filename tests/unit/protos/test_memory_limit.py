"""The memory that a process may use, as files of the kernel state it."""

import pytest

from diloco.runtime.memory_limit import memory_bytes

GIB = 1 << 30


def machine(root, files):
    for name, text in {"proc/meminfo": "MemTotal:  16777216 kB\nMemFree: 1 kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return memory_bytes(root)


@pytest.mark.parametrize(
    ("files", "gib"),
    [
        ({}, 16),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{4 * GIB}\n"}, 4),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, 16),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": f"{2 * GIB}\n"}, 2),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/memory.max": f"{GIB}\n",
                "sys/fs/cgroup/a/b/memory.max": f"{2 * GIB}\n",
            },
            1,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu:/x\n4:memory,hugetlb:/x\n1:name=systemd:/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{3 * GIB}\n",
            },
            3,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            16,
        ),
    ],
    ids=["machine", "container", "no limit", "group", "group above", "v1", "v1 without a limit"],
)
def test_the_smallest_limit_of_machine_and_groups_counts(tmp_path, files, gib):
    assert machine(tmp_path, files) == gib * GIB


def test_without_the_kernels_files_nothing_is_known(tmp_path):
    assert memory_bytes(tmp_path) is None


def test_this_process_has_a_limit():
    assert memory_bytes() > 1 << 28
