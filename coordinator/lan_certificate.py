"""Make the certificate of a coordinator in a private network: `embrace serve --tls auto`.

Browsers train on secure pages only, and no public authority vouches for an address such as 192.168.1.7. So the folder
has an authority of its own, which devices trust once, and a short-lived certificate that it signs for the names of this
machine: made anew before it expires and when a name is new, without trusting again. The authority is bound to names of
private networks: a phone that trusts it trusts it for nothing else.

A private key and its certificate are one file, replaced at once: after a crash they belong together.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from coordinator.lan import PRIVATE, Names
from edge_runtime.files import disk_errors, make_folder, replacing
from federation.errors import InputError

Owned = tuple[Any, x509.Certificate]  # a private key and its certificate

_AUTHORITY_LIFE, _LIFE = timedelta(days=3650), timedelta(days=90)
_RENEWED = timedelta(days=30)  # before the end
_CLOCKS = timedelta(days=1)  # by which those of devices may be behind
_USES = (
    "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
    "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
)  # fmt: skip


@dataclass(frozen=True)
class LanCertificate:
    """Where the files are, and how a person checks what a device is to trust."""

    authority: Path  # for devices
    certificate: Path  # for the server, with its key
    fingerprint: str  # SHA-256 of the authority
    is_new: bool  # the authority was made now
    is_renewed: bool  # ... or the certificate


def ensure_certificate(folder: Path, names: Names, now: datetime | None = None) -> LanCertificate:
    """Make what is missing, ends soon, or is not for the names of this machine; keep the rest."""
    now = now or datetime.now(timezone.utc)
    own, public, served = folder / "authority.key", folder / "authority.pem", folder / "server.pem"
    with disk_errors(no_room=f"no room for a certificate in {folder}", otherwise=f"cannot use {folder}"):
        make_folder(folder)
        folder.chmod(0o700)
        known = _load(own) if own.exists() else None
        authority = known if known is not None and _may_sign(known[1], names, now) else _make_authority(names, now)
        if authority is not known:
            _write(own, authority)
        with replacing(public, mode=0o644) as file:
            file.write(authority[1].public_bytes(Encoding.PEM))
        renewed = not _still_good(served, authority[1], names, now)
        if renewed:
            _write(served, _issue(authority, names, now))
    fingerprint = authority[1].fingerprint(SHA256()).hex(":").upper()
    return LanCertificate(public, served, fingerprint, authority is not known, renewed)


def _make_authority(names: Names, now: datetime) -> Owned:
    key, about = _new_key(), _called(f"embrace coordinator {names.hosts[-1]}"[:64])
    hosts = [x509.DNSName(name) for name in dict.fromkeys((*names.hosts, "local"))]
    networks = [x509.IPAddress(network) for network in PRIVATE]
    made = (
        _begin(about, about, key, now, _AUTHORITY_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.NameConstraints([*hosts, *networks], None), critical=True)
        .add_extension(_usage("key_cert_sign", "crl_sign"), critical=True)
    )
    return key, made.sign(key, SHA256())


def _issue(authority: Owned, names: Names, now: datetime) -> Owned:
    key, (signer, certificate) = _new_key(), authority
    addresses = [x509.IPAddress(ipaddress.ip_address(each)) for each in names.addresses]
    hosts = [x509.DNSName(name) for name in names.hosts]
    made = (
        _begin(_called("embrace coordinator"), certificate.subject, key, now, _LIFE)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([*hosts, *addresses]), critical=False)
        .add_extension(_usage("digital_signature"), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    return key, made.sign(signer, SHA256())


def _begin(subject: x509.Name, issuer: x509.Name, key: Any, now: datetime, life: timedelta) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS)
        .not_valid_after(now + life)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _called(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _usage(*wanted: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{name: name in wanted for name in _USES})


def _new_key() -> Any:
    return ec.generate_private_key(ec.SECP256R1())  # browsers take no Ed25519


def _may_sign(authority: x509.Certificate, names: Names, now: datetime) -> bool:
    """Whether an authority outlives what it would sign, and is allowed these names."""
    allowed = authority.extensions.get_extension_for_class(x509.NameConstraints).value.permitted_subtrees or []
    hosts = {each.value for each in allowed if isinstance(each, x509.DNSName)}
    inside = all(name in hosts or name.endswith(".local") for name in names.hosts)
    return inside and bool(authority.not_valid_after_utc > now + _LIFE)


def _still_good(file: Path, authority: x509.Certificate, names: Names, now: datetime) -> bool:
    """Whether a certificate is of this authority, valid for long enough, and for all names of this machine."""
    try:
        _, found = _load(file)
        found.verify_directly_issued_by(authority)
    except (FileNotFoundError, InputError, InvalidSignature, ValueError):
        return False
    known = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    addresses = {str(each) for each in known.get_values_for_type(x509.IPAddress)}
    new = {*names.hosts, *names.addresses} - {*known.get_values_for_type(x509.DNSName), *addresses}
    return not new and bool(found.not_valid_before_utc <= now < found.not_valid_after_utc - _RENEWED)


def _load(file: Path) -> Owned:
    content = file.read_bytes()
    try:
        key, certificate = load_pem_private_key(content, None), x509.load_pem_x509_certificate(content)
        if key.public_key() != certificate.public_key():
            raise ValueError("another key")
    except (TypeError, ValueError):  # no PEM, a password
        raise InputError(
            f"{file} is no private key with its certificate: put back what was there, or delete the folder "
            f"{file.parent}, and let devices trust a new authority"
        ) from None
    return key, certificate


def _write(file: Path, owned: Owned) -> None:
    key, certificate = owned
    draft = file.with_name(f"{file.name}.new")
    draft.unlink(missing_ok=True)  # whose mode may be another
    with replacing(file, mode=0o600, draft=draft) as out:
        out.write(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        out.write(certificate.public_bytes(Encoding.PEM))
