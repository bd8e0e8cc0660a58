"""The termination message of a container, as the kubelet keeps it."""

import json

import pytest

from diloco_agent.supervisor import write_termination_message

KUBELET_BYTES = 4096


@pytest.mark.parametrize(
    "piece",
    ["x", '"', "\\", "\x1b[31m", "\n", "ü", "値", "😀", "\udc80", 'Tensor "w" ü \x1b[0m\udcff'],
    ids=ascii,
)
@pytest.mark.parametrize("times", [1, 660, 4000, 100_000])
def test_the_termination_message_is_complete_json_that_the_kubelet_keeps(tmp_path, piece, times):
    path = tmp_path / "termination-log"
    write_termination_message(path, "Refused", "because " + piece * times)
    data = path.read_bytes()
    assert len(data) <= KUBELET_BYTES
    written = json.loads(data)
    assert written["reason"] == "Refused"
    readable = ("because " + piece * times).encode(errors="replace").decode()
    assert readable.startswith(written["message"])
    assert written["message"] == readable or len(data) > 3500, "truncated more than necessary"


def test_a_termination_log_that_cannot_be_written_raises_nothing(tmp_path):
    write_termination_message(tmp_path / "none" / "termination-log", "Refused", "x")
