"""Certificate files, and what gRPC reports for each refusal (measured here)."""

import contextlib
import os
import socket
import threading
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from diloco.errors import ConfigError, UnavailableError
from diloco.rpc import channels, connection_reasons, status_codes, tls
from diloco_testing.network.certificates import Authority, mount, write
from diloco_testing.network.echo_server import echo_server


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


# ---------------------------------------------------------------- files


def test_a_key_of_another_certificate_is_reported_with_advice(authority, tmp_path):
    write(tmp_path, authority.make())
    (tmp_path / "tls.key").write_bytes(authority.make().key)
    with pytest.raises(ConfigError, match=r"tls\.crt and .*tls\.key do not match .*replace both"):
        tls.Tls.load(tmp_path)


def test_an_authority_that_is_no_certificate_is_reported(authority, tmp_path):
    write(tmp_path, authority.make())
    (tmp_path / "ca.crt").write_bytes(authority.make().key)
    with pytest.raises(ConfigError, match=r"ca\.crt: holds no certificate"):
        tls.Tls.load(tmp_path)


def test_replaced_files_are_reported_once(authority, tmp_path):
    mount(tmp_path, authority.make())
    files = tls.TlsFiles(tmp_path, tls.Tls.load(tmp_path))
    assert files.renewed() is None
    newer = authority.make()
    mount(tmp_path, newer)
    assert files.renewed() == newer
    assert files.renewed() is None


def test_a_volume_that_is_replaced_while_it_is_read_never_gives_a_torn_pair(authority, tmp_path):
    pairs = [authority.make() for _ in range(4)]
    mount(tmp_path, pairs[0])
    over = threading.Event()

    def replace() -> None:
        while not over.is_set():
            for pair in pairs:
                # Unlike the kubelet, one file after the other: worse than a mounted Secret.
                write(tmp_path / "..data", pair)

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        for _ in range(50):
            with contextlib.suppress(ConfigError):  # it keeps changing: reported, not used
                assert tls.Tls.load(tmp_path) in pairs
    finally:
        over.set()
        thread.join()


# ---------------------------------------------------------------- refusals


def error_at(port: int, given: tls.Tls | None, *, host="127.0.0.1", seconds=20.0) -> str:
    with channels.channel(
        f"{host}:{port}", tls=given, purpose="control", server_name="j-syncer"
    ) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/test/Call")(b"", timeout=seconds)
    error = status_codes.error_of(caught.value)
    assert type(error) is UnavailableError
    return str(error)


def assert_explained(text: str, reason: str) -> None:
    """The reason is found, and what to do about it is in the message."""
    assert connection_reasons.explain(text) == reason, text
    assert connection_reasons.advice(reason) in text


def test_a_fixed_server_name_allows_any_address(authority):
    only_name = authority.make(names=["j-syncer"])
    with echo_server(only_name) as port:
        for host in ("127.0.0.1", "localhost"):
            with channels.channel(
                f"{host}:{port}", tls=authority.make(), purpose="bulk", server_name="j-syncer"
            ) as channel:
                assert channel.unary_unary("/test/Call")(b"x", timeout=20) == b"x"


def test_a_certificate_that_the_server_refuses(authority):
    ours = authority.make()
    forged = Authority("another").make()
    forged = tls.Tls(certificate=forged.certificate, key=forged.key, authority=ours.authority)
    with echo_server(ours) as port:
        assert_explained(error_at(port, forged), "HandshakeRefused")
        assert_explained(error_at(port, authority.make(expires_in_seconds=-60)), "HandshakeRefused")


def test_plain_text_to_a_server_with_tls(authority):
    with echo_server(authority.make()) as port:
        assert_explained(error_at(port, None), "HandshakeRefused")


def test_tls_to_a_server_in_plain_text(authority):
    with echo_server(None) as port:
        assert_explained(error_at(port, authority.make()), "PlainText")


def test_a_server_of_another_authority(authority):
    with echo_server(Authority("another").make()) as port:
        assert_explained(error_at(port, authority.make()), "CertificateOfOtherAuthority")


def test_a_server_whose_certificate_expired(authority):
    with echo_server(authority.make(expires_in_seconds=-60)) as port:
        assert_explained(error_at(port, authority.make()), "CertificateExpired")


def test_a_server_whose_certificate_begins_tomorrow(authority):
    with echo_server(authority.make(expires_in_seconds=2 * 86400)) as port:
        assert_explained(error_at(port, authority.make()), "CertificateNotYetValid")


def test_a_server_that_is_not_the_syncer_of_this_job(authority):
    with echo_server(authority.make(names=["k-syncer"])) as port:
        assert_explained(error_at(port, authority.make()), "CertificateNotForSyncer")


def test_nothing_listens(authority):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        assert_explained(error_at(free.getsockname()[1], authority.make()), "ConnectionRefused")


def test_an_unknown_name(authority):
    assert_explained(error_at(7070, authority.make(), host="nowhere.invalid"), "NameUnknown")


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [1.0, 30.0], ids=["call", "connection"])
@pytest.mark.parametrize("encrypted", [True, False])
def test_a_silent_server(authority, seconds, encrypted):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        given = authority.make() if encrypted else None
        assert_explained(error_at(silent.getsockname()[1], given, seconds=seconds), "DialTimeout")


@pytest.mark.slow
def test_packets_without_an_answer(authority):
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):  # the queue of connections is full: Linux then drops what comes
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        assert_explained(
            error_at(full.getsockname()[1], authority.make(), seconds=30), "DialTimeout"
        )


def test_a_load_balancer_without_a_server(authority):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def close_all() -> None:
            with contextlib.suppress(OSError):
                while True:
                    listener.accept()[0].close()

        thread = threading.Thread(target=close_all, daemon=True)
        thread.start()
        assert_explained(error_at(listener.getsockname()[1], authority.make()), "ConnectionClosed")
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_what_to_do_never_points_at_another_reason():
    for reason, _, text in connection_reasons._REASONS:
        assert connection_reasons.explain(text) in ("", reason)


def test_an_unknown_message_has_no_reason():
    assert connection_reasons.explain("UNAVAILABLE: the moon is full") == ""
    assert connection_reasons.advice("Moon") == ""


# ---------------------------------------------------------------- our own certificate


def test_a_good_certificate_has_no_fault(authority, tmp_path):
    assert tls.fault_of(write(tmp_path, authority.make())) == ""


def test_an_expired_certificate_is_a_fault(authority, tmp_path):
    write(tmp_path, authority.make(expires_in_seconds=-60))
    assert tls.fault_of(tmp_path).endswith("certificate has expired")


def test_a_certificate_of_another_authority_is_a_fault(authority, tmp_path):
    write(tmp_path, authority.make())
    (tmp_path / "ca.crt").write_bytes(Authority("another").made.bundle)
    assert "unable to get local issuer" in tls.fault_of(tmp_path)


def test_files_that_are_not_there_have_no_fault(tmp_path):
    assert tls.fault_of(tmp_path) == ""


def test_an_encrypted_key_is_refused_without_asking_for_its_password(authority, tmp_path):
    from cryptography.hazmat.primitives import serialization as s

    write(tmp_path, authority.make())
    key = s.load_pem_private_key((tmp_path / "tls.key").read_bytes(), None)
    (tmp_path / "tls.key").write_bytes(
        key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.BestAvailableEncryption(b"x"))
    )
    with pytest.raises(ConfigError, match="do not match"):
        tls.Tls.load(tmp_path)


def test_the_file_that_is_missing_is_named(tmp_path, authority):
    write(tmp_path, authority.make())
    os.unlink(tmp_path / "ca.crt")
    with pytest.raises(ConfigError, match=r"ca\.crt: No such file"):
        tls.Tls.load(Path(tmp_path))


def test_while_an_authority_is_replaced_certificates_of_both_are_accepted(authority):
    newer = Authority("newer")
    both = authority.made.bundle + newer.made.bundle
    old, new = (replace(issuer.make(), authority=both) for issuer in (authority, newer))
    for server, client in ((old, new), (new, old)):
        with (
            echo_server(server) as port,
            channels.channel(
                f"127.0.0.1:{port}", tls=client, purpose="control", server_name="j-syncer"
            ) as channel,
        ):
            assert channel.unary_unary("/test/Call")(b"x", timeout=20) == b"x"


def test_a_certificate_lacks_the_names_that_it_does_not_have(tmp_path, authority):
    write(tmp_path, authority.make(names=["eu.j-learners"]))
    assert not tls.lacks_name(tmp_path, "eu.j-learners")
    assert tls.lacks_name(tmp_path, "us.j-learners")
    assert tls.lacks_name(tmp_path, "eu.k-learners")


def test_another_fault_of_a_certificate_is_no_lack_of_a_name(tmp_path, authority):
    write(tmp_path, authority.make(names=["eu.j-learners"], expires_in_seconds=-60))
    assert not tls.lacks_name(tmp_path, "eu.j-learners")
    assert not tls.lacks_name(tmp_path / "nowhere", "eu.j-learners")
