"""Keys, certificates and kubeconfigs of one cluster, made anew for it.

Guarantees:
1. Every private file is readable by its owner only.
2. A kubeconfig holds its certificates inline: the file alone is enough.
"""

import base64
import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID = datetime.timedelta(days=3650)


class Authority:
    """The certificate authority of a cluster, with its files in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self.ca.exists():
            key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
            assert isinstance(key, ec.EllipticCurvePrivateKey)
            self._key = key
        else:
            self._key = ec.generate_private_key(ec.SECP256R1())
            name = _name("kubernetes-ca")
            builder = _builder(name, self._key).issuer_name(name)
            builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            _write(folder / "ca.key", _private(self._key))
            _write(self.ca, _public(builder.sign(self._key, hashes.SHA256())))

    @property
    def ca(self) -> Path:
        """The certificate of the authority."""
        return self.folder / "ca.crt"

    def service_accounts(self) -> tuple[Path, Path]:
        """The private and the public key that sign tokens of service accounts."""
        private, public = self.folder / "sa.key", self.folder / "sa.pub"
        if not private.exists():
            key = ec.generate_private_key(ec.SECP256R1())
            _write(private, _private(key))
            spki = serialization.PublicFormat.SubjectPublicKeyInfo
            _write(public, key.public_key().public_bytes(serialization.Encoding.PEM, spki))
        return private, public

    def server(self, name: str, addresses: Sequence[str]) -> tuple[Path, Path]:
        """A certificate and key for a server with these DNS names and IP addresses."""
        return self._signed(name, name, "", ExtendedKeyUsageOID.SERVER_AUTH, addresses)

    def client(self, name: str, user: str, group: str = "") -> tuple[Path, Path]:
        """A certificate and key for a client that is this user in this group."""
        return self._signed(name, user, group, ExtendedKeyUsageOID.CLIENT_AUTH, ())

    def kubeconfig(self, path: Path, server: str, user: str, group: str = "") -> Path:
        """A kubeconfig for a user at an API server, written to ``path``."""
        certificate, key = self.client(path.stem, user, group)
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": "test",
                    "cluster": {"server": server, "certificate-authority-data": _inline(self.ca)},
                }
            ],
            "users": [
                {
                    "name": user,
                    "user": {
                        "client-certificate-data": _inline(certificate),
                        "client-key-data": _inline(key),
                    },
                }
            ],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": user}}],
            "current-context": "test",
        }
        _write(path, yaml.safe_dump(document).encode())
        return path

    def _signed(
        self, name: str, user: str, group: str, usage: x509.ObjectIdentifier, addresses: Sequence[str]
    ) -> tuple[Path, Path]:
        certificate, private = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        if not certificate.exists():
            key = ec.generate_private_key(ec.SECP256R1())
            authority = x509.load_pem_x509_certificate(self.ca.read_bytes())
            builder = _builder(_name(user, group), key).issuer_name(authority.subject)
            builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            if addresses:
                names = x509.SubjectAlternativeName([_general(address) for address in addresses])
                builder = builder.add_extension(names, critical=False)
            _write(private, _private(key))
            _write(certificate, _public(builder.sign(self._key, hashes.SHA256())))
        return certificate, private


def _name(user: str, group: str = "") -> x509.Name:
    parts = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group)] if group else []
    return x509.Name([*parts, x509.NameAttribute(NameOID.COMMON_NAME, user)])


def _builder(subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + VALID)
    )


def _general(address: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        return x509.DNSName(address)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _public(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _inline(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def _write(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(content)
