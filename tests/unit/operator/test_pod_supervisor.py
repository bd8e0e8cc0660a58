"""The last words of a container, as the kubelet keeps them."""

import json

import pytest

from diloco_operator.pod.supervisor import leave_message

KUBELET_BYTES = 4096


@pytest.mark.parametrize(
    "piece",
    ["x", '"', "\\", "\x1b[31m", "\n", "ü", "値", "😀", "\udc80", 'Tensor "w" ü \x1b[0m\udcff'],
    ids=ascii,
)
@pytest.mark.parametrize("times", [1, 660, 4000, 100_000])
def test_last_words_are_whole_json_that_the_kubelet_keeps(tmp_path, piece, times):
    path = tmp_path / "termination-log"
    leave_message(path, "Refused", "because " + piece * times)
    data = path.read_bytes()
    assert len(data) <= KUBELET_BYTES
    said = json.loads(data)
    assert said["reason"] == "Refused"
    readable = ("because " + piece * times).encode(errors="replace").decode()
    assert readable.startswith(said["message"])
    assert said["message"] == readable or len(data) > 3500, "no more is cut than has to be"


def test_where_no_last_words_can_be_left_nothing_is_raised(tmp_path):
    leave_message(tmp_path / "none" / "termination-log", "Refused", "x")
