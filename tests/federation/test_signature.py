"""Ed25519 against the vectors of RFC 8032 and against openssl; signatures of bundles."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.ed25519 import public_key, sign, verify
from federation.errors import BundleError, InputError
from federation.signature import MAX_SIGNATURE_BYTES, SigningKey, check_public, signer_of

# RFC 8032, section 7.1: secret, public, message, signature of tests 1, 2, 3 and SHA(abc).
VECTORS = [
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46b"
        "d25bf5f0595bbe24655141438e7a100b",
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c"
        "387b2eaeb4302aeeb00d291612bb0c00",
    ),
    (
        "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc659"
        "4a7c15e9716ed28dc027beceea1ec40a",
    ),
    (
        "833fe62409237b9d62ec77587520911e9a759cec1d19755b7da901b96dca3d42",
        "ec172b93ad5e563bf4932c70e1245034c35467ef2efd4d64ebf819683467e2bf",
        "ddaf35a193617abacc417349ae20413112e6fa4e89a97ea20a9eeee64b55d39a"
        "2192992a274fc1a836ba3c23a3feebbd454d4423643ce80e2a9ac94fa54ca49f",
        "dc2a4459e7369633a52b1bf277839a00201009a3efbf3ecb69bea2186c26b58909351fc9ac90b3ecfdfbc7c66431e030"
        "3dca179c138ac17ad9bef1177331a704",
    ),
]
ORDER = 2**252 + 27742317777372353535851937790883648493
DIGEST = "5f70bf18a086007016e948b04aed3b82103a36bea41755b6cddfaf10ace3c6ef"


@pytest.mark.parametrize("vector", VECTORS, ids=["empty", "one byte", "two bytes", "sha of abc"])
def test_the_vectors_of_the_standard(vector: tuple[str, str, str, str]) -> None:
    secret, public, message, signature = map(bytes.fromhex, vector)
    assert public_key(secret) == public
    assert sign(secret, message) == signature
    assert verify(public, message, signature)


@settings(max_examples=10, deadline=None)
@given(st.binary(min_size=32, max_size=32), st.binary(max_size=100), st.integers(0, 511))
def test_a_single_other_bit_is_no_signature(secret: bytes, message: bytes, bit: int) -> None:
    public, made = public_key(secret), sign(secret, message)
    assert verify(public, message, made)
    flipped = bytearray(made)
    flipped[bit // 8] ^= 1 << bit % 8
    assert not verify(public, message, bytes(flipped))
    assert not verify(public, message + b"x", made)


def test_what_an_exact_verifier_refuses() -> None:
    """A second signature made from one that is known, keys that vouch for everything, and wrong lengths."""
    _, public, message, signature = map(bytes.fromhex, VECTORS[1])
    answer = int.from_bytes(signature[32:], "little")
    assert not verify(public, message, signature[:32] + (answer + ORDER).to_bytes(32, "little"))
    neutral = (1).to_bytes(32, "little")
    assert not verify(neutral, b"anything", neutral + bytes(32))
    for wrong in (b"", signature[:-1], signature + b"\0"):
        assert not verify(public, message, wrong)
    assert not verify(public[:-1], message, signature)
    assert not verify((2**255 - 19).to_bytes(32, "little"), message, signature)  # zero, written in another way


@settings(deadline=None)
@given(st.binary(min_size=32, max_size=32), st.binary(min_size=64, max_size=64))
def test_random_bytes_are_no_signature(public: bytes, signature: bytes) -> None:
    assert not verify(public, b"message", signature)


needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


def openssl(*arguments: object) -> bytes:
    done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True)
    if done.returncode != 0 and b"rawin" in done.stderr:
        pytest.skip("this openssl cannot sign with Ed25519")
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_openssl
def test_a_key_and_a_signature_of_openssl(tmp_path: Path) -> None:
    openssl("genpkey", "-algorithm", "ed25519", "-out", tmp_path / "key.pem")
    key = SigningKey.from_pem((tmp_path / "key.pem").read_text())
    message = tmp_path / "message"
    message.write_text(f"embrace bundle\n{DIGEST}\n")
    made = openssl("pkeyutl", "-sign", "-rawin", "-inkey", tmp_path / "key.pem", "-in", message)
    assert made == sign(key.secret, message.read_bytes())
    der = openssl("pkey", "-in", tmp_path / "key.pem", "-pubout", "-outform", "DER")
    assert der.endswith(public_key(key.secret))
    (tmp_path / "own.pem").write_text(SigningKey(bytes(range(32))).to_pem())  # and the other way round
    der = openssl("pkey", "-in", tmp_path / "own.pem", "-pubout", "-outform", "DER")
    assert der.endswith(public_key(bytes(range(32))))


def test_a_bundle_s_signature() -> None:
    key = SigningKey(bytes(range(32)))
    made = key.sign(DIGEST)
    assert len(key.public) == 51 and check_public(key.public) == key.public
    assert signer_of(made.encode(), DIGEST) == key.public
    assert SigningKey.from_pem(key.to_pem()) == key
    with pytest.raises(BundleError, match="not a signature of this bundle"):
        signer_of(made.encode(), DIGEST.replace("5", "6"))
    other = json.dumps({**json.loads(made), "key": SigningKey(bytes(32)).public})
    with pytest.raises(BundleError, match="not a signature of this bundle"):
        signer_of(other.encode(), DIGEST)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{}", b"[]", b"null", b"\xff", b'{"key": 1, "signature": 2}', b'{"key": "ed25519:x", "signature": ""}'),
        *(b"[" * 2000, b" " * (MAX_SIGNATURE_BYTES + 1)),
    ],
)
def test_what_is_no_signature(content: bytes) -> None:
    with pytest.raises(BundleError, match="is no signature"):
        signer_of(content, DIGEST)


@pytest.mark.parametrize("text", ["", "ed25519:", "ed25519:" + "A" * 42, "ed25519:" + "A" * 42 + "B", "rsa:x", "ü"])
def test_what_is_no_public_key(text: str) -> None:
    with pytest.raises(InputError, match="is no public key"):
        check_public(text)


@pytest.mark.parametrize("text", ["", "x", SigningKey(bytes(32)).to_pem()[:60], "-----BEGIN PRIVATE KEY-----\nAAAA\n"])
def test_what_is_no_private_key(text: str) -> None:
    with pytest.raises(InputError, match="no private Ed25519 key"):
        SigningKey.from_pem(text)
