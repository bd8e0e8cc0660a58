"""`diloco certs` and what the operator reads out of a certificate, from the files that come out."""

import base64
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509 import verification
from cryptography.x509.oid import ExtendedKeyUsageOID
from typer.testing import CliRunner

from diloco.errors import ConfigError
from diloco.rpc.certificates import tls_facts
from diloco_cli.__main__ import app
from diloco_cli.authority import (
    Authority,
    describe,
    issue,
    new_authority,
    read_authority,
    write_certs,
)
from diloco_testing.manifests.files import load_job

NOW = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
MANIFEST = """
apiVersion: diloco.dev/v1alpha1
kind: DiLoCoJob
metadata: {name: gpt}
spec:
  steps: 20
  learner: {recipe: {name: gpt}}
  regions: [{name: eu, learners: 2}, {name: us, learners: 2}]
  syncer: {region: us, endpoint: "sync.example.com:7070"}
  tls: {mode: Secret, secretName: gpt-certificates}
"""


def job(*sets: str):
    return load_job(MANIFEST, sets)


def files(path: Path) -> dict[str, bytes]:
    data = yaml.safe_load(path.read_text())["data"]
    return {name: base64.b64decode(value) for name, value in data.items()}


def leaf(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(files(path)["tls.crt"])


def facts(path: Path, now: datetime = NOW, **options):
    found = files(path)
    return tls_facts(found["tls.crt"], found["ca.crt"], now, **options)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return new_authority("gpt", NOW)


def made(authority: Authority, **changes):
    fields = {"job": "gpt", "regions": ["eu"], "server_names": [], "now": NOW, **changes}
    return issue(authority, **fields)


# ---------------------------------------------------------------- what is written


def test_each_region_gets_a_secret_with_its_own_name_and_only_the_syncers_can_serve(tmp_path):
    written = write_certs(job(), tmp_path, now=NOW, namespace="ml", hosts=["10.0.0.9"])
    assert [secret.path.name for secret in written] == ["eu.yaml", "us.yaml", "all.yaml"]
    eu, us, everything = (facts(secret.path) for secret in written)
    assert (eu.regions, us.regions, everything.regions) == (("eu",), ("us",), ("eu", "us"))
    assert eu.server_names == ("eu.gpt-learners",)
    names = ("gpt-syncer", "gpt-syncer.ml.svc", "sync.example.com")
    assert us.server_names == (*names, "us.gpt-learners", "10.0.0.9")
    assert everything.server_names == (*names, "eu.gpt-learners", "us.gpt-learners", "10.0.0.9")
    assert {found.problem for found in (eu, us, everything)} == {""}


def test_a_secret_is_what_the_pods_mount(tmp_path):
    write_certs(job(), tmp_path, now=NOW, namespace="ml")
    document = yaml.safe_load((tmp_path / "eu.yaml").read_text())
    assert (document["apiVersion"], document["kind"]) == ("v1", "Secret")
    assert document["metadata"] == {"name": "gpt-certificates", "namespace": "ml"}
    assert document["type"] == "kubernetes.io/tls"
    assert set(document["data"]) == {"tls.crt", "tls.key", "ca.crt"}
    assert files(tmp_path / "eu.yaml")["ca.crt"] == (tmp_path / "ca.crt").read_bytes()
    key = serialization.load_pem_private_key(files(tmp_path / "eu.yaml")["tls.key"], None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert key.curve.name == "secp256r1"
    assert key.public_key() == leaf(tmp_path / "eu.yaml").public_key()


def test_a_strict_verifier_accepts_the_certificates_at_both_ends(tmp_path):
    write_certs(job(), tmp_path, now=NOW)
    root = x509.load_pem_x509_certificate((tmp_path / "ca.crt").read_bytes())
    policy = verification.PolicyBuilder().store(verification.Store([root])).time(NOW)
    server = policy.build_server_verifier(x509.DNSName("gpt-syncer"))
    server.verify(leaf(tmp_path / "us.yaml"), [])
    policy.build_client_verifier().verify(leaf(tmp_path / "eu.yaml"), [])


def test_the_secret_of_a_cluster_names_all_its_regions(tmp_path):
    pools = "{name: us, learners: 2}, {name: spot, cluster: us, learners: 1}"
    several = job(f"spec.regions=[{{name: eu, learners: 2}}, {pools}]")
    written = write_certs(several, tmp_path, now=NOW)
    assert [(made.path.name, made.regions, made.server) for made in written] == [
        ("eu.yaml", ("eu",), False),
        ("us.yaml", ("us", "spot"), True),
        ("all.yaml", ("eu", "us", "spot"), True),
    ]
    assert set(facts(tmp_path / "us.yaml", job="gpt").regions) == {"us", "spot"}
    assert "us.yaml  # in the cluster of regions us, spot (syncer)" in describe(tmp_path, written)


def test_only_the_owner_can_read_files_with_keys(tmp_path):
    write_certs(job(), tmp_path / "out", now=NOW)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "out").iterdir()}
    assert modes == {
        "ca.crt": 0o644, "ca.key": 0o600, "eu.yaml": 0o600, "us.yaml": 0o600, "all.yaml": 0o600,
    }  # fmt: skip


def test_a_second_run_renews_the_certificates_under_the_same_authority(tmp_path):
    write_certs(job(), tmp_path, now=NOW)
    root, before = (tmp_path / "ca.crt").read_bytes(), leaf(tmp_path / "eu.yaml")
    later = NOW + timedelta(days=300)
    write_certs(job(), tmp_path, now=later)
    after = leaf(tmp_path / "eu.yaml")
    assert (tmp_path / "ca.crt").read_bytes() == root
    assert after.not_valid_after_utc == later + timedelta(days=365)
    assert after.serial_number != before.serial_number
    assert after.public_key() != before.public_key()
    assert facts(tmp_path / "eu.yaml", later).problem == ""


def test_no_certificate_outlives_the_ten_years_of_its_authority(tmp_path):
    write_certs(job(), tmp_path, now=NOW)
    root = x509.load_pem_x509_certificate((tmp_path / "ca.crt").read_bytes())
    assert root.not_valid_after_utc == NOW + timedelta(days=3652)
    [*_, last] = write_certs(job(), tmp_path, now=NOW + timedelta(days=3600))
    assert last.expires == root.not_valid_after_utc


def test_authorities_after_the_first_are_trusted_too(tmp_path, authority):
    old = new_authority("old", NOW)
    tmp_path.joinpath("ca.crt").write_bytes(authority.bundle + old.bundle)
    tmp_path.joinpath("ca.key").write_bytes(authority.key_pem)
    write_certs(job(), tmp_path, now=NOW)
    found = files(tmp_path / "eu.yaml")
    assert found["ca.crt"] == authority.bundle + old.bundle
    assert facts(tmp_path / "eu.yaml").problem == ""
    of_old = made(old)
    assert tls_facts(of_old.certificate, found["ca.crt"], NOW).problem == ""


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("spec.tls={mode: Disabled}", "mode: Disabled.*set tls: {mode: Secret"),
        (
            "spec.tls={mode: CertManager, issuerRef: {name: x}}",
            "CertManager creates the certificates itself",
        ),
        ("spec.regions[0].name=all", "neither a region nor its cluster can be named all"),
    ],
)
def test_a_job_that_uses_no_secret_is_refused_with_what_to_change(tmp_path, change, expected):
    sets = [change, *(["spec.syncer.endpoint="] if "Disabled" in change else [])]
    with pytest.raises(ConfigError, match=expected):
        write_certs(job(*sets), tmp_path, now=NOW)
    assert list(tmp_path.iterdir()) == []


def test_an_invalid_host_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError, match=r"--host bücher: .*give a DNS name"):
        write_certs(job(), tmp_path / "out", now=NOW, hosts=["bücher"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("no key", "one of ca.crt and ca.key is missing"),
        ("no certificate", "one of ca.crt and ca.key is missing"),
        ("other key", "ca.key is not the key of the first certificate"),
        ("garbage", "ca.crt contains no certificate"),
        ("leaf", "is not that of an authority"),
        ("expired", "ca.crt expired on 2036-0"),
    ],
)
def test_an_unusable_authority_is_reported_and_unchanged(tmp_path, authority, fault, expected):
    certificate, key = tmp_path / "ca.crt", tmp_path / "ca.key"
    certificate.write_bytes(authority.bundle)
    key.write_bytes(authority.key_pem)
    match fault:
        case "no key":
            key.unlink()
        case "no certificate":
            certificate.unlink()
        case "other key":
            key.write_bytes(new_authority("x", NOW).key_pem)
        case "garbage":
            certificate.write_text("x")
        case "leaf":
            issued = made(authority)
            certificate.write_bytes(issued.certificate)
            key.write_bytes(issued.key)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    now = NOW + timedelta(days=4000 if fault == "expired" else 0)
    with pytest.raises(ConfigError, match=expected):
        write_certs(job(), tmp_path, now=now)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_the_command_prints_what_to_apply_where(tmp_path):
    manifest, out = tmp_path / "job.yaml", tmp_path / "out"
    manifest.write_text(MANIFEST)
    done = CliRunner().invoke(app, ["certs", str(manifest), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert f"kubectl apply -f {out}/us.yaml  # in the cluster of region us (syncer)" in done.output
    assert f"kubectl apply -f {out}/eu.yaml  # in the cluster of region eu\n" in done.output
    done = CliRunner().invoke(app, ["certs", str(manifest), "--out", str(out), "-o", "json"])
    assert [secret["syncer"] for secret in yaml.safe_load(done.output)] == [False, True, True]


# ---------------------------------------------------------------- what is read


def test_regions_of_another_job_do_not_count(authority):
    issued = made(authority, regions=["eu", "us"])
    assert tls_facts(issued.certificate, authority.bundle, NOW, job="gpt").regions == ("eu", "us")
    assert tls_facts(issued.certificate, authority.bundle, NOW, job="other").regions == ()
    assert tls_facts(issued.certificate, authority.bundle, NOW).regions == ("eu", "us")


@pytest.mark.parametrize(
    ("days", "reason"),
    [
        (-1, "CertificateNotYetValid"),
        (0, ""),
        (364, ""),
        (365, "CertificateExpired"),
        (4000, "CertificateExpired"),
    ],
)
def test_a_certificate_is_valid_from_its_first_to_its_last_day(authority, days, reason):
    issued = made(authority)
    found = tls_facts(issued.certificate, authority.bundle, NOW + timedelta(days=days))
    assert (found.reason, bool(found.problem)) == (reason, bool(reason))
    assert issued.expires == NOW + timedelta(days=365)


@pytest.mark.parametrize(
    ("lifetime", "left", "warned"),
    [
        (365, timedelta(days=31), False),
        (365, timedelta(days=29), True),
        # cert-manager renews when a third is left, also of certificates of hours.
        (90, timedelta(days=29), False),
        (90, timedelta(days=8), True),
        (1, timedelta(hours=3), False),
        (1, timedelta(hours=2), True),
        (1, timedelta(0), False),  # it has expired, which is a problem of its own
    ],
)
def test_the_end_of_a_certificate_is_announced_while_there_is_time_to_renew_it(
    authority, lifetime, left, warned
):
    issued = made(authority, days=lifetime)
    found = tls_facts(issued.certificate, authority.bundle, issued.expires - left)
    assert bool(found.renewal) == warned
    if warned:
        assert found.renewal.startswith(f"the certificate expires on {issued.expires:%Y-%m-%d}")
        assert (found.reason, found.problem) == ("", "")


def test_the_end_of_an_authority_is_announced_as_its_own(authority):
    ends = authority.certificate.not_valid_after_utc
    issued = made(authority, now=ends - timedelta(days=20), days=365)
    found = tls_facts(issued.certificate, authority.bundle, ends - timedelta(days=19))
    assert found.renewal.startswith("its authority (CN=gpt diloco authority) expires on")


def test_a_certificate_of_another_authority_names_its_issuer(authority):
    issued = made(new_authority("other", NOW))
    found = tls_facts(issued.certificate, authority.bundle, NOW)
    assert found.reason == "CertificateOfOtherAuthority"
    assert "CN=other diloco authority" in found.problem
    assert found.regions == ("eu",)


def test_an_authority_of_the_same_name_with_another_key_is_another_authority(authority):
    issued = made(new_authority("gpt", NOW))
    found = tls_facts(issued.certificate, authority.bundle, NOW)
    assert found.reason == "CertificateOfOtherAuthority"


def test_a_given_key_is_compared_with_the_certificate(authority):
    issued, other = made(authority), made(authority)
    assert tls_facts(issued.certificate, authority.bundle, NOW, key_pem=issued.key).reason == ""
    for key in (other.key, b"", b"garbage"):
        found = tls_facts(issued.certificate, authority.bundle, NOW, key_pem=key)
        assert found.reason == "KeyOfOtherCertificate"


@pytest.mark.parametrize(
    "garbage", [b"", b"x", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
def test_unreadable_files_are_a_problem_and_not_an_error(authority, garbage):
    issued = made(authority)
    for pair, file in (
        ((garbage, authority.bundle), "tls.crt"),
        ((issued.certificate, garbage), "ca.crt"),
    ):
        found = tls_facts(*pair, NOW)
        assert (found.reason, found.regions) == ("CertificateUnreadable", ())
        assert found.problem.startswith(file)


def own(
    issuer: Authority, *, usages=(), is_authority=False, names=("diloco://gpt/region/eu",)
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """A certificate that was not made by `diloco certs`."""
    key = ec.generate_private_key(ec.SECP256R1())
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "own")]))
        .issuer_name(issuer.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW - timedelta(days=1))
        .not_valid_after(NOW + timedelta(days=9))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
    )
    if usages:
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    if names:
        uris = [x509.UniformResourceIdentifier(name) for name in names]
        builder = builder.add_extension(x509.SubjectAlternativeName(uris), critical=False)
    return builder.sign(issuer.key, hashes.SHA256()), key


def pem(*certificates: x509.Certificate) -> bytes:
    return b"".join(
        certificate.public_bytes(serialization.Encoding.PEM) for certificate in certificates
    )


def test_a_certificate_for_servers_only_is_a_problem(authority):
    certificate, _ = own(authority, usages=[ExtendedKeyUsageOID.SERVER_AUTH])
    found = tls_facts(pem(certificate), authority.bundle, NOW)
    assert found.reason == "CertificateUsage"
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    for usages in (both, []):
        certificate, _ = own(authority, usages=usages)
        assert tls_facts(pem(certificate), authority.bundle, NOW).reason == ""


def test_a_certificate_without_names_authorizes_no_region(authority):
    certificate, _ = own(authority, names=())
    found = tls_facts(pem(certificate), authority.bundle, NOW)
    assert (found.regions, found.server_names, found.reason) == ((), (), "")


def test_intermediate_certificates_in_the_file_lead_to_the_authority():
    root = new_authority("root", NOW)
    certificate, key = own(root, is_authority=True, names=())
    middle = Authority(certificate=certificate, key=key, bundle=b"")
    issued = made(middle)
    assert tls_facts(issued.certificate + pem(certificate), root.bundle, NOW).reason == ""
    found = tls_facts(issued.certificate, root.bundle, NOW)
    assert found.reason == "CertificateOfOtherAuthority"
    late = tls_facts(issued.certificate + pem(certificate), root.bundle, NOW + timedelta(days=9))
    assert late.reason == "CertificateExpired"


def test_an_expired_authority_is_named_as_expired(authority):
    issued = made(authority)
    root = read_authority(authority.bundle, authority.key_pem, NOW)
    assert root.certificate == authority.certificate
    certificate, key = own(authority, is_authority=True, names=())
    middle = Authority(certificate=certificate, key=key, bundle=b"")
    found = tls_facts(
        made(middle, now=NOW - timedelta(hours=1)).certificate + pem(certificate),
        authority.bundle,
        NOW + timedelta(days=9),
    )
    assert found.reason == "CertificateExpired"
    assert issued.expires > NOW + timedelta(days=9)


# Made with OpenSSL: a key on the curve secp112r1, which `cryptography` does not load.
ODD_KEY = b"""\
-----BEGIN PRIVATE KEY-----
ME4CAQAwEAYHKoZIzj0CAQYFK4EEAAYENzA1AgEBBA6zPx2lJ5PoRTjUJnp55KEg
Ax4ABGHKs+6VG+9bAPTbRX9JJOb1bIGNUETWpIDxtQg=
-----END PRIVATE KEY-----
"""
ODD_CERTIFICATE = b"""\
-----BEGIN CERTIFICATE-----
MIIBSjCCARSgAwIBAgITZ+BTUYeHa++DL3DQ/6xWxSAQjjAKBggqhkjOPQQDAjAO
MQwwCgYDVQQDDANvZGQwIBcNMjYxMTIxMTU1MjExWhgPMjEyNjEwMjgxNTUyMTFa
MA4xDDAKBgNVBAMMA29kZDAyMBAGByqGSM49AgEGBSuBBAAGAx4ABGHKs+6VG+9b
APTbRX9JJOb1bIGNUETWpIDxtQijdjB0MB0GA1UdDgQWBBQYZR7yeOCQc4FM+MaO
YuA9pjpzMTAfBgNVHSMEGDAWgBQYZR7yeOCQc4FM+MaOYuA9pjpzMTAPBgNVHRMB
Af8EBTADAQH/MCEGA1UdEQQaMBiGFmRpbG9jbzovL2dwdC9yZWdpb24vZXUwCgYI
KoZIzj0EAwIDJAAwIQIPAKJuanWB2/0qAFX95e3WAg5m3ZN/Uraz+QWnYVLmuw==
-----END CERTIFICATE-----
"""
LATER = datetime(2027, 5, 1, tzinfo=UTC)


def test_a_key_on_an_unknown_curve_is_a_problem_and_not_an_error():
    found = tls_facts(ODD_CERTIFICATE, ODD_CERTIFICATE, LATER, job="gpt", key_pem=ODD_KEY)
    assert (found.reason, found.regions) == ("KeyOfOtherCertificate", ("eu",))


def test_an_authority_on_an_unknown_curve_is_a_problem_and_not_an_error(authority):
    certificate = x509.load_pem_x509_certificate(ODD_CERTIFICATE)
    odd = Authority(certificate=certificate, key=authority.key, bundle=ODD_CERTIFICATE)
    issued, _ = own(odd)
    found = tls_facts(pem(issued), ODD_CERTIFICATE, NOW)
    assert found.reason == "CertificateOfOtherAuthority"


@pytest.mark.parametrize("fault", ["a name of an unknown kind", "an extension twice"])
def test_a_certificate_with_unreadable_extensions_authorizes_no_region(authority, fault):
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(authority.certificate.subject)
        .public_key(authority.key.public_key())
        .serial_number(1)
        .not_valid_before(NOW - timedelta(days=1))
        .not_valid_after(NOW + timedelta(days=9))
    )
    if fault == "an extension twice":
        names = x509.SubjectAlternativeName([x509.DNSName("a")])
        builder = builder.add_extension(names, critical=False)
        builder._extensions.append(builder._extensions[0])
    else:
        x400 = x509.UnrecognizedExtension(x509.SubjectAlternativeName.oid, b"\x30\x02\xa3\x00")
        builder = builder.add_extension(x400, critical=False)
    certificate = builder.sign(authority.key, hashes.SHA256())
    found = tls_facts(pem(certificate), authority.bundle, NOW)
    assert (found.reason, found.regions, found.server_names) == ("", (), ())
