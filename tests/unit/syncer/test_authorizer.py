"""What the syncer reads of a peer's certificate."""

import ssl
from pathlib import Path

from cryptography import x509

from diloco_syncer.rpc.authorizer import serial_of
from diloco_testing.network.certificates import Authority


def test_the_serial_number_is_that_of_the_certificate(tmp_path: Path) -> None:
    Authority().issue(tmp_path)
    pem = (tmp_path / "tls.crt").read_bytes()
    expected = f"{x509.load_pem_x509_certificate(pem).serial_number:x}"
    assert serial_of(ssl.PEM_cert_to_DER_cert(pem.decode())) == expected
