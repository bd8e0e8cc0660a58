"""The memory of trainer and link: both processes see the same, complete values."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from diloco.errors import DamagedError
from diloco.model.fragments import Tensor, cut
from diloco_worker.ipc.shared_memory import HostCopy, SharedMemory

LAYOUT = cut(
    [
        Tensor(name="a[0]", shape=(300, 7), dtype="float32"),
        Tensor(name="b", shape=(), dtype="bfloat16", embedding=True, aliases=("c",)),
        Tensor(name="d", shape=(5,), dtype="float32"),
    ],
    num_fragments=2,
    constants=[Tensor(name="k", shape=(3,), dtype="int64")],
    average=["a*"],
)


@pytest.fixture
def shared():
    memory = SharedMemory.create(LAYOUT, constants_bytes=64)
    yield memory
    memory.close()


def run_child(shared: SharedMemory, body: str) -> subprocess.Popen[str]:
    code = "import sys\nfrom diloco_worker.ipc.shared_memory import *\nshared = SharedMemory.attach(int(sys.argv[1]))\n"
    return subprocess.Popen(
        [sys.executable, "-c", code + textwrap.dedent(body), str(shared.fd)],
        pass_fds=[shared.fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.slow
def test_another_process_sees_layout_values_and_counters(shared):
    shared.host(0)[:] = 3
    shared.inbox(1)[:] = 4
    shared.constants[:] = 7
    shared.set_host_copy(0, HostCopy(local_step=9, steps=3, tokens=1 << 40, base=2))
    shared.publish(1, 5, (2, 48))
    child = run_child(
        shared,
        """
        print(shared.layout.digest, float(shared.host(0).min()), float(shared.inbox(1).max()))
        print(shared.host_copy(0), shared.inbox_state(1), int(shared.constants.sum()))
        shared.invalidate_inbox(1)
        """,
    )
    out, _ = child.communicate()
    assert out.split("\n")[0] == f"{LAYOUT.digest} 3.0 4.0"
    assert "local_step=9, steps=3, tokens=1099511627776, base=2" in out
    assert "generation=5, version=(2, 48)" in out
    assert out.strip().endswith(str(7 * 64))
    assert shared.inbox_state(1).version is None


def test_regions_do_not_overlap(shared):
    shared.host(0)[:] = 1
    shared.host(1)[:] = 2
    shared.inbox(0)[:] = 3
    shared.inbox(1)[:] = 4
    shared.constants[:] = 5
    for values, expected in (
        (shared.host(0), 1), (shared.host(1), 2), (shared.inbox(0), 3), (shared.inbox(1), 4), (shared.constants, 5),
    ):  # fmt: skip
        assert np.unique(values).tolist() == [expected]
    assert shared.host_copy(0).local_step == 0


@pytest.mark.slow
def test_try_lock_fails_only_for_the_fragment_that_the_other_process_holds(shared):
    child = run_child(
        shared,
        """
        with shared.lock(1):
            print("held", flush=True)
            sys.stdin.readline()
        print("free", flush=True)
        sys.stdin.readline()
        """,
    )
    assert child.stdout.readline() == "held\n"
    with shared.try_lock(1) as held, shared.try_lock(0) as other:
        assert (held, other) == (False, True)
    child.stdin.write("go\n")
    child.stdin.flush()
    assert child.stdout.readline() == "free\n"
    with shared.try_lock(1) as held:
        assert held
    child.communicate()


@pytest.mark.slow
def test_the_lock_of_a_killed_process_is_released(shared):
    child = run_child(
        shared,
        """
        with shared.lock(0):
            print("held", flush=True)
            sys.stdin.readline()
        """,
    )
    child.stdout.readline()
    child.kill()
    child.communicate()
    with shared.try_lock(0) as held:
        assert held


def test_other_memory_is_refused():
    fd = os.memfd_create("other")
    os.ftruncate(fd, 4096)
    try:
        with pytest.raises(DamagedError, match="begins with"):
            SharedMemory.attach(fd)
    finally:
        os.close(fd)


def test_memory_of_a_release_with_another_table_is_refused(shared):
    """A link that starts after an upgrade of the package would read the rows of its old trainer at a wrong stride."""
    os.pwrite(shared.fd, b"diloco01", 0)
    with pytest.raises(DamagedError, match="program runs, restart it"):
        SharedMemory.attach(shared.fd)


# ---------------------------------------------------------------- several ranks


def test_a_host_copy_can_be_in_a_spare_place_that_fits_each_fragment():
    shared = SharedMemory.create(LAYOUT, constants_bytes=64, spares=2, control_bytes=100)
    shared.place(0, 0)[:] = 1
    shared.place(0, 2)[:] = 2
    shared.place(1, 1)[:] = 3
    assert shared.host(0).max() == 1
    copy = HostCopy(local_step=9, steps=3, tokens=5, base=2)
    shared.set_host_copy(0, copy, place=2)
    attached = SharedMemory.attach(shared.fd)
    assert attached.host_copy(0) == copy
    assert attached.host(0).min() == attached.host(0).max() == 2
    assert attached.host(0).shape == (LAYOUT.fragments[0].elements,)
    assert attached.host(1).max() == 0
    shared.set_host_copy(1, copy, place=1)
    assert attached.host(1).min() == 3
    shared.close()


def test_another_rank_maps_the_memory_of_rank_0_by_its_process():
    shared = SharedMemory.create(LAYOUT, constants_bytes=64, spares=1, control_bytes=100)
    other = SharedMemory.of_process(os.getpid(), shared.fd)
    other.place(1, 1)[:] = 5
    other.write_control(96, b"abcd")
    assert shared.place(1, 1).min() == 5
    assert shared.read_control(95, 5) == b"\0abcd"
    with pytest.raises(ValueError, match="4 bytes at 97, it has 100"):
        shared.write_control(97, b"abcd")
    other.close()
    shared.close()
    with pytest.raises(OSError, match="No such file"):
        SharedMemory.of_process(2**22 + 1, 3)
