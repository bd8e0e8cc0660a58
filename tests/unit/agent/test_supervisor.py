"""What outlives a container: the termination message, as the kubelet keeps it, and the counts of restarts."""

import json
import socket
from types import SimpleNamespace
from urllib.parse import quote

import pytest

from diloco_agent import policy, supervisor
from diloco_agent.policy import ExitContainer
from diloco_agent.probe_server import Server
from diloco_agent.rank_zero import PATH
from diloco_agent.supervisor import Counts, Supervisor, write_termination_message
from diloco_agent.unit import Leader

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


def test_the_termination_message_has_the_lines_of_the_log_before_it(tmp_path):
    path = tmp_path / "termination-log"
    write_termination_message(path, "Refused", "last", lines=("first", "second"))
    assert json.loads(path.read_bytes()) == {
        "reason": "Refused", "message": "last", "log": ["first", "second"]
    }  # fmt: skip


@pytest.mark.parametrize("piece", ["x", "値", "\x1b"], ids=ascii)
def test_a_long_log_loses_its_first_lines_and_no_part_of_the_message(tmp_path, piece):
    path = tmp_path / "termination-log"
    lines = [f"{number} {piece * 5000}" for number in range(20)]
    write_termination_message(path, "Refused", "why", lines=lines)
    data = path.read_bytes()
    written = json.loads(data)
    assert len(data) <= KUBELET_BYTES
    assert written["message"] == "why"
    assert written["log"][-1].startswith("19 ")
    assert len(written["log"]) < 20


def test_a_long_message_leaves_no_room_for_the_log(tmp_path):
    path = tmp_path / "termination-log"
    write_termination_message(path, "Refused", "x" * 5000, lines=["first"])
    written = json.loads(path.read_bytes())
    assert "log" not in written
    assert len(written["message"]) > 3500


def test_the_reason_of_the_end_is_written_before_the_files_on_the_volume(tmp_path, monkeypatch):
    """The volume's disk may hang."""
    order = []

    class Ended(Supervisor):
        _settings = SimpleNamespace(termination_log=tmp_path / "termination-log")
        _log = ()

        def __init__(self):
            """Without a process."""

        def _remove_marker(self):
            order.append("marker")

        def _write_counts(self, *, ended):
            order.append(f"counts, {ended=}")

    def write(path, reason, message, *, lines):
        order.append((path.name, reason, message))

    monkeypatch.setattr(supervisor, "write_termination_message", write)
    Ended()._carry_out(ExitContainer(code=1, reason="Refused", message="why"))
    assert order == [("termination-log", "Refused", "why"), "counts, ended=True", "marker"]


def test_a_termination_log_that_cannot_be_written_raises_nothing(tmp_path):
    write_termination_message(tmp_path / "none" / "termination-log", "Refused", "x")


@pytest.mark.parametrize(
    ("pod", "crashes"), [("uid-1", 2), ("uid-2", 0), ("", 0)], ids=["own", "new", "unknown"]
)
def test_a_new_pod_on_the_same_volume_has_its_own_budget_of_crashes(tmp_path, pod, crashes):
    counts = tmp_path / "lives.json"
    counts.write_text('{"lives": 7, "faults": 2, "pod": "uid-1"}')
    assert supervisor._read_counts(counts, pod) == Counts(starts=7, crashes=crashes)


def test_counts_without_a_pod_belong_to_one_that_has_no_uid(tmp_path):
    counts = tmp_path / "lives.json"
    counts.write_text('{"lives": 7, "faults": 2}')
    assert supervisor._read_counts(counts, "") == Counts(starts=7, crashes=2)
    assert supervisor._read_counts(counts, "uid-1") == Counts(starts=7)


@pytest.mark.parametrize(
    ("pod", "boot", "died"),
    [
        ("uid-1", "boot-1", True),
        ("uid-1", "boot-2", False),
        ("uid-1", "", False),
        ("uid-2", "boot-1", False),
    ],
    ids=["killed", "the node restarted", "boot unknown", "another pod"],
)
def test_a_container_that_did_not_get_to_its_end_was_killed_unless_its_node_restarted(
    tmp_path, pod, boot, died
):
    marker = tmp_path / "running.json"
    marker.write_text('{"pod": "uid-1", "boot": "boot-1", "lives": 3}')
    assert supervisor._was_killed(marker, pod, boot, 3) is died


def test_a_marker_of_an_earlier_agent_is_ignored_after_one_that_knows_none(tmp_path):
    """An image that was changed in place, twice: the agent between does not remove the marker."""
    marker = tmp_path / "running.json"
    marker.write_text('{"pod": "uid-1", "boot": "boot-1", "lives": 3}')
    assert not supervisor._was_killed(marker, "uid-1", "boot-1", 4)


def started(monkeypatch, state):
    """A container's agent, and the events that its policy was given."""
    events = []

    class Seen(policy.Policy):
        def handle(self, event, now):
            events.append(event)
            return []

    monkeypatch.setattr(supervisor, "_boot_id", lambda: "boot-1")
    monkeypatch.setattr(supervisor.p, "Policy", Seen)
    settings = SimpleNamespace(
        state=state, pod_uid="uid-1", role="learner", name="eu/0", limits=policy.Limits(leave_seconds=1.0),
        num_ranks=1, rank=0, health_port=0, stuck_seconds=None, health_file=state / "health.json",
        termination_log=state / "termination-log",
    )  # fmt: skip
    monkeypatch.setattr(supervisor, "Server", lambda *_: None)
    monkeypatch.setattr(supervisor, "Processes", lambda: None)
    return Supervisor(settings), events


def test_an_end_that_was_counted_is_no_kill_though_its_marker_remains(tmp_path, monkeypatch):
    """The kubelet's SIGKILL may come between the two files."""
    first, _ = started(monkeypatch, tmp_path)
    first._write_counts()
    first._write_marker()
    assert started(monkeypatch, tmp_path)[1] == [policy.Died()], "it was killed while it ran"
    monkeypatch.setattr(first, "_remove_marker", lambda: None)
    first._carry_out(ExitContainer(code=1))
    assert (tmp_path / "running.json").exists()
    assert started(monkeypatch, tmp_path)[1] == []


@pytest.mark.parametrize("content", [None, "", "{", "[]", "{}", "null"])
def test_without_a_readable_marker_the_last_container_was_not_killed(tmp_path, content):
    marker = tmp_path / "running.json"
    if content is not None:
        marker.write_text(content)
    assert not supervisor._was_killed(marker, "uid-1", "boot-1", 0)
    assert not supervisor._was_killed(marker, "", "", 0)


@pytest.mark.parametrize(("pod", "joined"), [("uid-1", True), ("uid-2", False)])
def test_that_a_learner_joined_is_known_to_the_next_container_of_its_pod(tmp_path, pod, joined):
    counts = tmp_path / "lives.json"
    counts.write_text('{"lives": 7, "faults": 2, "joined": true, "pod": "uid-1"}')
    assert supervisor._read_counts(counts, pod).joined is joined


@pytest.mark.parametrize("text", ["[" * 9000, '{"lives": 1e999, "faults": 2}', "[]", "5"])
def test_counts_that_no_agent_wrote_are_none(tmp_path, text):
    counts = tmp_path / "lives.json"
    counts.write_text(text)
    assert supervisor._read_counts(counts, "uid-1") == Counts()
    assert not supervisor._was_killed(counts, "uid-1", "boot-1", 3)


def test_the_message_of_a_line_is_that_of_a_record_and_any_other_line_is_its_own():
    deep = "[" * 9000
    assert supervisor._message_of('{"message": "why", "loss": NaN}') == "why"
    for line in ("why", '{"message": 5}', "[1]", deep, f'{{"message": {deep}'):
        assert supervisor._message_of(line) == line


REPORT = {
    "rank": 1, "boot": "b", "run": "", "willing": True, "stopping": False, "ended": "", "code": 0, "cause": "",
}  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "", "5", "[]", "{}", "[" * 2500, '"x"', "NaN",
        *(json.dumps(REPORT | {name: float("inf")}) for name in ("rank", "code")),
        json.dumps(REPORT).replace('"rank": 1', '"rank": 1e999'),
        json.dumps(REPORT).replace('"code": 0', '"code": 1e999'),
        json.dumps(REPORT).replace('"cause": ""', f'"cause": {"[" * 700}{"]" * 700}'),
    ],
    ids=lambda text: text[:12],
)  # fmt: skip
def test_a_request_of_any_client_is_refused_without_a_trace(text, capfd):
    agent = object.__new__(Supervisor)
    agent._unit, agent._reports = Leader(boot="b", size=2), {}
    agent._settings = SimpleNamespace(num_ranks=2)
    server = Server(0, agent._answer)

    def reply(query):
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            connection.sendall(f"GET {PATH}?{quote(query)} HTTP/1.0\r\n\r\n".encode())
            return b"".join(iter(lambda: connection.recv(4096), b""))

    assert reply(text).endswith(b"not a report\n")
    assert agent._reports == {}
    assert reply(json.dumps(REPORT)).startswith(b"HTTP/1.0 200")
    assert capfd.readouterr().err == ""
