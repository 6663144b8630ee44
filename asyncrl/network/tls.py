"""Authentication of a run's servers: each run has a certificate authority of its own.

Ports are not secret, and seconds pass between the selection of a port and the moment its server listens. Another user
of the machine may listen there first, and again whenever a server dies. Therefore every server of the run presents a
certificate signed by the run's authority, whose key nobody else can read. No process of the run sends anything to a
server without such a certificate.

The folder `tls` of the run is readable by its owner only:

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
"""Lifetime of a certificate, longer than any run. Only the run trusts its authority, and each command creates one."""
SLACK = datetime.timedelta(days=1)
"""Maximum difference between the clocks of two machines."""
UNUSED = dict.fromkeys(
    ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only", "decipher_only"),
    False,
)


@dataclass(frozen=True)
class Signed:
    """PEM files of a server: its certificate with its key, and the authority's certificate."""

    server: Path
    authority: Path


class Authority:
    """Certificate authority that signs the certificates of one run's servers."""

    def __init__(self, run_dir: Path) -> None:
        """Open the existing authority of a run. Use `create` to make a new one."""
        self._folder = run_dir / FOLDER
        self._own, self._key = self._folder / "ca.pem", self._folder / "ca.key"

    @classmethod
    def create(cls, run_dir: Path) -> Authority:
        """Create a new authority. It replaces an existing one, whose certificates become invalid."""
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
        """Create certificates for the servers at the hosts of these URLs (names or IP addresses) that have none yet."""
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
        """PEM certificate that clients trust."""
        return self._own.read_text()


def signed(run_dir: Path, url: str) -> Signed | None:
    """Return the certificate files for the run's server at this URL, or None for an http:// URL, which needs none."""
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
    """Write the file atomically, because another process may write it at the same time."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    partial.rename(path)
