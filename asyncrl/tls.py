"""Who answers at an address of the run: each run has a certificate authority of its own.

Ports are no secret, and between the choice of a port and the listening lie seconds: another user of the machine may
listen there first, and again whenever a server dies. So every server of the run shows a certificate that the run's
authority has signed, whose key nobody else can read, and no process of the run sends anything to a server without one.

The folder `tls` of the run, which its owner alone can read:

    ca.pem, ca.key      the authority
    HOST.pem            certificate and key of the servers at that address
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

FOLDER = "tls"
LIFETIME = datetime.timedelta(days=3650)
"""Longer than any run. Nobody outside of the run trusts its authority, and each command makes a new one."""
SLACK = datetime.timedelta(days=1)
"""By so much the clocks of two machines may differ."""
UNUSED = dict.fromkeys(
    ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only", "decipher_only"),
    False,
)


@dataclass(frozen=True)
class Signed:
    """Files in PEM: what a server shows, with its key, and who has signed it."""

    server: Path
    authority: Path


class Authority:
    """Signs the certificates of one run's servers."""

    def __init__(self, run_dir: Path) -> None:
        """That of a run which has one: `create` makes it."""
        self._folder = run_dir / FOLDER
        self._own, self._key = self._folder / "ca.pem", self._folder / "ca.key"

    @classmethod
    def create(cls, run_dir: Path) -> Authority:
        """Anew, also where there is one: what that one has signed is worth nothing from now on."""
        made = cls(run_dir)
        made._folder.mkdir(mode=0o700, exist_ok=True)
        made._folder.chmod(0o700)
        for old in made._folder.iterdir():
            old.unlink()
        key, name = ec.generate_private_key(ec.SECP256R1()), _called("asyncrl run")
        builder = (
            _builder(name, name, key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(x509.KeyUsage(False, key_cert_sign=True, crl_sign=True, **UNUSED), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        _write(made._key, _encoded(key))
        _write(made._own, _encoded(builder.sign(key, hashes.SHA256())))
        return made

    def sign(self, urls: Iterable[str]) -> None:
        """For the servers at the addresses of these URLs, names or IP addresses, where that is not done yet."""
        authority = x509.load_pem_x509_certificate(self._own.read_bytes())
        signing = serialization.load_pem_private_key(self._key.read_bytes(), None)
        assert isinstance(signing, ec.EllipticCurvePrivateKey)
        for host in {str(urlsplit(url).hostname) for url in urls}:
            if (path := self._folder / f"{host}.pem").exists():
                continue
            key = ec.generate_private_key(ec.SECP256R1())
            identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key())
            builder = (
                _builder(_called(host), authority.subject, key)
                .add_extension(x509.SubjectAlternativeName([_name(host)]), critical=False)
                .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
                .add_extension(identifier, critical=False)
            )
            _write(path, _encoded(builder.sign(signing, hashes.SHA256())) + _encoded(key))

    @property
    def certificate(self) -> str:
        """What clients trust, in PEM."""
        return self._own.read_text()


def signed(run_dir: Path, url: str) -> Signed | None:
    """Where the authority left it for the run's server at this URL; None where it is one of http://, which shows
    nothing."""
    address, folder = urlsplit(url), run_dir / FOLDER
    return Signed(folder / f"{address.hostname}.pem", folder / "ca.pem") if address.scheme == "https" else None


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return x509.CertificateBuilder(
        issuer_name=issuer,
        subject_name=subject,
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=now - SLACK,
        not_valid_after=now + LIFETIME,
    )


def _called(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _encoded(value: x509.Certificate | ec.EllipticCurvePrivateKey) -> bytes:
    pem = serialization.Encoding.PEM
    if isinstance(value, x509.Certificate):
        return value.public_bytes(pem)
    return value.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all: another process may do the same at this moment."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    partial.rename(path)
