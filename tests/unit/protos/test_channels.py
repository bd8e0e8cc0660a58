import contextlib
import os
import platform
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.errors import (
    ALL_ERRORS,
    ConfigError,
    DamagedError,
    DilocoError,
    ProtocolError,
    UnavailableError,
)
from diloco.rpc import channels, servers, status_codes
from diloco.rpc.tls import Tls
from diloco.runtime import backoff, interpreter, sysctl
from diloco_testing.network.certificates import Authority, mount, write

Behaviour = Callable[[bytes, grpc.ServicerContext], bytes]


@contextlib.contextmanager
def serving(
    behaviour: Behaviour, *, address: str = "127.0.0.1:0", tls=None, tls_dir: Path | None = None
) -> Iterator[int]:
    handler = grpc.unary_unary_rpc_method_handler(behaviour)
    server = servers.server(
        [grpc.method_handlers_generic_handler("test", {"Call": handler})], max_workers=4
    )
    port = servers.bind(server, address, tls, tls_dir=tls_dir)
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait()


def call(port: int, request: bytes = b"", *, tls=None, seconds: float = 20) -> bytes:
    with channels.channel(f"127.0.0.1:{port}", tls=tls, purpose="control") as channel:
        return ask(channel, request, seconds=seconds)


def ask(channel: grpc.Channel, request: bytes = b"", *, seconds: float = 20) -> bytes:
    return channel.unary_unary("/test/Call")(request, timeout=seconds)


def error_from(port: int, **options: object) -> DilocoError:
    with pytest.raises(grpc.RpcError) as caught:
        call(port, **options)  # type: ignore[arg-type]
    return status_codes.error_of(caught.value)


def raising(error: Exception) -> Behaviour:
    def behaviour(request: bytes, context: grpc.ServicerContext) -> bytes:
        with status_codes.aborting(context):
            raise error

    return behaviour


def echo(request: bytes, context: grpc.ServicerContext) -> bytes:
    return request


def test_a_reply_beyond_grpcs_own_limit_passes_to_the_client():
    reply = os.urandom(6 << 20)
    with serving(lambda request, context: reply) as port:
        assert call(port) == reply


def test_a_request_passes_up_to_the_servers_limit():
    request = os.urandom(servers.MESSAGE_BYTES)
    with serving(echo) as port:
        assert call(port, request) == request
        with pytest.raises(grpc.RpcError) as refused:
            call(port, request + b"x")
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_a_compressed_request_is_refused(compression):
    with serving(echo) as port:
        with grpc.insecure_channel(f"127.0.0.1:{port}", compression=compression) as channel:
            with pytest.raises(grpc.RpcError) as refused:
                ask(channel, bytes(1 << 20))
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "disabled" in str(refused.value.details())


def test_a11_connections_beyond_the_limit_are_closed_and_those_before_stay(monkeypatch):
    monkeypatch.setattr(servers, "_most_connections", lambda: 3)
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(serving(echo))
        channel = stack.enter_context(
            channels.channel(f"127.0.0.1:{port}", tls=None, purpose="control")
        )
        assert ask(channel, b"a") == b"a"
        address, closed = ("127.0.0.1", port), 0
        for _ in range(10):
            idle = stack.enter_context(socket.create_connection(address, timeout=20))
            closed += not idle.recv(1)  # a server begins with its settings
        assert closed == 8
        assert ask(channel, b"b") == b"b"


def test_descriptors_are_reserved_for_other_files():
    assert servers._most_connections() <= os.sysconf("SC_OPEN_MAX") - servers.RESERVED_DESCRIPTORS


@pytest.mark.parametrize("cls", ALL_ERRORS, ids=lambda cls: cls.__name__)
def test_an_error_arrives_as_the_class_and_message_that_was_raised(cls):
    with serving(raising(cls("ξ is 5, expected ≤ 3:\n100 % wrong"))) as port:
        error = error_from(port)
    assert type(error) is cls
    assert str(error) == "ξ is 5, expected ≤ 3:\n100 % wrong"


def test_a_subclass_that_the_peer_does_not_know_arrives_as_the_class_of_its_reason():
    class TornChunkError(DamagedError):
        pass

    assert status_codes.status_of(TornChunkError("x")) is grpc.StatusCode.DATA_LOSS
    with serving(raising(TornChunkError("chunk 3 is torn"))) as port:
        error = error_from(port)
    assert type(error) is DamagedError


def test_a_message_too_long_for_a_trailer_arrives_cut_instead_of_not_at_all():
    with serving(raising(ConfigError("é" * 9000))) as port:
        error = error_from(port)
    assert type(error) is ConfigError
    assert set(str(error)) == {"é"}
    assert len(str(error)) == 1000


def test_an_unexpected_error_sends_its_type_to_the_peer_and_logs_its_traceback(caplog):
    with serving(raising(KeyError("secret"))) as port:
        error = error_from(port)
    assert type(error) is DilocoError
    assert str(error) == "unexpected KeyError; see the log of this program"
    assert "secret" in caplog.text


def test_an_abort_inside_the_body_is_not_replaced_by_another():
    def behaviour(request: bytes, context: grpc.ServicerContext) -> bytes:
        with status_codes.aborting(context):
            status_codes.abort(context, DamagedError("first"))

    with serving(behaviour) as port:
        error = error_from(port)
    assert (type(error), str(error)) == (DamagedError, "first")


def test_a_peer_that_is_not_there_is_unavailable():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        error = error_from(free.getsockname()[1])
    assert type(error) is UnavailableError


def test_a_call_that_takes_too_long_is_unavailable():
    with serving(lambda request, context: time.sleep(1) or b"") as port:
        error = error_from(port, seconds=0.1)
    assert type(error) is UnavailableError
    assert "DEADLINE_EXCEEDED" in str(error)


def test_a_status_that_we_did_not_send_and_that_will_not_pass_is_a_protocol_error():
    with (
        serving(echo) as port,
        channels.channel(f"127.0.0.1:{port}", tls=None, purpose="bulk") as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        channel.unary_unary("/test/Other")(b"")
    error = status_codes.error_of(caught.value)
    assert type(error) is ProtocolError
    assert "UNIMPLEMENTED" in str(error)


def test_every_channel_has_a_connection_of_its_own():
    def who(request: bytes, context: grpc.ServicerContext) -> bytes:
        return context.peer().encode()

    with serving(who) as port, contextlib.ExitStack() as stack:
        opened = [
            stack.enter_context(channels.channel(f"127.0.0.1:{port}", tls=None, purpose=purpose))
            for purpose in ("control", "bulk", "bulk")
        ]
        peers = [ask(channel) for channel in opened]
        assert len(set(peers)) == 3
        assert [ask(channel) for channel in opened] == peers


def test_a_channel_finds_a_server_that_restarts_on_the_same_port_within_seconds():
    with serving(echo) as port:
        channel = channels.channel(f"127.0.0.1:{port}", tls=None, purpose="control")
        assert ask(channel, b"1") == b"1"
    with channel:
        for _ in range(3):
            with pytest.raises(grpc.RpcError):
                ask(channel)
        with serving(echo, address=f"127.0.0.1:{port}"):
            start = time.monotonic()
            reply = channel.unary_unary("/test/Call")(b"2", wait_for_ready=True, timeout=20)
    assert reply == b"2"
    assert time.monotonic() - start < 8


def test_a_server_allows_the_pings_that_our_channels_send():
    channel, server = dict(channels._CHANNEL), dict(servers._SERVER)
    allowed = server["grpc.http2.min_ping_interval_without_data_ms"]
    assert allowed <= channel["grpc.keepalive_time_ms"] * 2 // 3
    assert server["grpc.keepalive_permit_without_calls"] == 1


def test_a_port_in_use_by_our_own_kind_of_server_is_refused():
    with serving(echo) as port:
        second = servers.server(max_workers=1)
        with pytest.raises(ConfigError, match=rf"port {port} of 127\.0\.0\.1 is in use"):
            servers.bind(second, f"127.0.0.1:{port}", None)
        assert call(port, b"still here") == b"still here"


def test_two_servers_never_share_a_port_even_if_both_bind_at_the_same_moment():
    with serving(echo) as port:
        second = servers.server(max_workers=1)
        with pytest.raises(RuntimeError):  # past the look that `bind` takes first
            second.add_insecure_port(f"127.0.0.1:{port}")


def test_a_name_is_refused_if_one_of_its_addresses_is_in_use():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match="is in use"):
            servers.bind(servers.server(max_workers=1), f"localhost:{port}", None)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("7070", "is not host:port"),
        ("127.0.0.1:http", "is not host:port"),
        ("127.0.0.1:70000", r"port in 0\.\.65535"),
        ("nowhere.invalid:0", "'nowhere.invalid' cannot be resolved"),
        ("192.0.2.1:0", "cannot listen on 192.0.2.1:0: Cannot assign requested address"),
    ],
)
def test_an_address_that_cannot_be_listened_on_is_refused_with_the_cause(address, message):
    with pytest.raises(ConfigError, match=message):
        servers.bind(servers.server(max_workers=1), address, None)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


def test_with_tls_both_ends_authenticate_each_other(authority, tmp_path):
    here = Tls.load(authority.issue(tmp_path / "server"))
    there = Tls.load(authority.issue(tmp_path / "client"))
    with serving(echo, tls=here) as port:
        assert call(port, b"hello", tls=there) == b"hello"


def test_with_tls_both_sides_refuse_another_authority(authority, tmp_path):
    here = Tls.load(authority.issue(tmp_path / "server"))
    untrusted = Tls.load(Authority().issue(tmp_path / "untrusted"))
    with serving(echo, tls=here) as port:
        assert type(error_from(port, tls=untrusted)) is UnavailableError
        assert type(error_from(port, tls=None)) is UnavailableError
    trusting = Tls(certificate=untrusted.certificate, key=untrusted.key, authority=here.authority)
    with serving(echo, tls=here) as port:
        assert type(error_from(port, tls=trusting)) is UnavailableError


def test_no_directory_means_no_tls():
    assert Tls.load(None) is None


@pytest.mark.parametrize("name", ["tls.crt", "tls.key", "ca.crt"])
@pytest.mark.parametrize("fault", ["missing", "directory", "empty"])
def test_a_tls_file_that_cannot_be_used_is_named(authority, tmp_path, name, fault):
    file = authority.issue(tmp_path) / name
    file.unlink()
    if fault == "directory":
        file.mkdir()
    elif fault == "empty":
        file.touch()
    with pytest.raises(ConfigError, match=f"^TLS: .*{name}: "):
        Tls.load(tmp_path)


def test_a_key_of_another_certificate_is_refused_when_listening(authority, tmp_path):
    tls = Tls.load(authority.issue(tmp_path / "a"))
    other = Tls.load(authority.issue(tmp_path / "b"))
    mixed = Tls(certificate=tls.certificate, key=other.key, authority=tls.authority)
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:0"):
        servers.bind(servers.server(max_workers=1), "127.0.0.1:0", mixed)


def test_a_server_and_new_connections_use_replaced_files(authority, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    mount(here, authority.make())
    mount(there, authority.make())
    with serving(echo, tls=Tls.load(here), tls_dir=here) as port:
        connection = channels.Connection(
            f"127.0.0.1:{port}", tls_dir=there, purpose="control", server_name="j-syncer"
        )
        with contextlib.closing(connection):
            assert ask(connection.channel, b"1") == b"1"
            assert not connection.renew()
            another = Authority()
            mount(here, another.make())
            assert ask(connection.channel, b"2") == b"2", "what is connected stays"
            untrusted = authority.make()
            assert type(error_from(port, tls=untrusted)) is UnavailableError
            mount(there, another.make())
            before = connection.channel
            assert connection.renew()
            assert connection.channel is not before
            assert ask(connection.channel, b"3") == b"3"


def test_files_that_cannot_be_used_leave_both_ends_with_what_they_had(authority, tmp_path, caplog):
    here = tmp_path / "here"
    write(here, authority.make())
    with serving(echo, tls=Tls.load(here), tls_dir=here) as port:
        connection = channels.Connection(
            f"127.0.0.1:{port}", tls_dir=here, purpose="bulk", server_name="j-syncer"
        )
        with contextlib.closing(connection):
            (here / "tls.key").write_bytes(authority.make().key)
            assert not connection.renew()
            assert not connection.renew()
            assert call(port, b"x", tls=authority.make()) == b"x"
    warnings = [line for line in caplog.messages if "do not match" in line]
    assert len(warnings) == 2, "each end logs it once"


@given(st.integers(0, 2**32), st.floats(0.01, 5), st.floats(1, 60), st.integers(1, 30))
def test_waits_stay_below_a_limit_that_doubles_up_to_the_cap(seed, base, cap, tries):
    delays = backoff.Backoff(base, cap, random.Random(seed))
    for number in range(tries):
        assert 0 <= delays.next() <= min(cap, base * 2**number)
    delays.reset()
    assert delays.next() <= min(cap, base)


def test_waits_are_spread_over_the_whole_range():
    waits = [backoff.Backoff(8, 8, random.Random(seed)).next() for seed in range(400)]
    assert min(waits) < 0.5
    assert max(waits) > 7.5
    assert 3.5 < sum(waits) / len(waits) < 4.5


def test_waiting_for_days_does_not_overflow():
    delays = backoff.Backoff(0.1, 30, random.Random(0))
    assert max(delays.next() for _ in range(5000)) <= 30


FAULTS = """
import resource, sys
from diloco.runtime import malloc
if sys.argv[1] == "tuned":
    assert malloc.tune_malloc()
def messages(count):
    for _ in range(count):
        kept = [b"".join((b"x" * 16, bytes(1 << 20))) for _ in range(3)]
messages(20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
messages(100)
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 300)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc only")
def test_tuned_malloc_reuses_message_buffers_instead_of_faulting_new_pages():
    def faults_per_mebibyte(how: str) -> float:
        done = subprocess.run(
            [sys.executable, "-c", FAULTS, how], check=True, capture_output=True, text=True
        )
        return float(done.stdout)

    tuned = faults_per_mebibyte("tuned")
    assert tuned < 5
    assert faults_per_mebibyte("as it is") > 4 * max(tuned, 1)


def test_threads_take_turns_often_after_tuning():
    before = sys.getswitchinterval()
    try:
        interpreter.tune_interpreter()
        assert sys.getswitchinterval() == pytest.approx(5e-4)
    finally:
        sys.setswitchinterval(before)


def proc(directory: Path, **files: str) -> Path:
    for name, text in files.items():
        (directory / name).write_text(text)
    return directory


def test_small_tcp_buffers_are_reported_with_their_cost(tmp_path):
    proc(tmp_path, tcp_wmem="4096\t16384\t4194304\n", tcp_rmem="4096\t131072\t33554432\n")
    (warning,) = sysctl.kernel_warnings(tmp_path)
    assert warning.startswith("net.ipv4.tcp_wmem allows 4 MiB per connection, about 0.2 Gbit/s")


@pytest.mark.parametrize(
    ("control", "idle", "lines"), [("cubic", 1, 1), ("cubic", 0, 0), ("bbr", 1, 0)]
)
def test_a_slow_start_after_idle_is_reported_where_it_matters(tmp_path, control, idle, lines):
    proc(tmp_path, tcp_congestion_control=control, tcp_slow_start_after_idle=f"{idle}\n")
    assert len(sysctl.kernel_warnings(tmp_path)) == lines


def test_a_machine_without_these_files_has_no_warnings(tmp_path):
    assert sysctl.kernel_warnings(tmp_path) == []
