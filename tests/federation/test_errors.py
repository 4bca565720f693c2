"""The tree of errors: whose fault, which status, which exit code."""

from __future__ import annotations

import pickle

import pytest

from federation.errors import BundleError, EmbraceError, InputError, MissingPackage, VerificationError


@pytest.mark.parametrize(
    ("error", "status", "exit_code"),
    [
        (EmbraceError("x"), 500, 1),
        (InputError("x"), 400, 2),
        (BundleError("x"), 400, 2),
        (VerificationError("x"), 500, 1),
        (MissingPackage("torch", "export"), 501, 3),
    ],
)
def test_status_and_exit_code(error: EmbraceError, status: int, exit_code: int) -> None:
    assert (error.status, error.exit_code) == (status, exit_code)


def test_a_bad_bundle_is_bad_input() -> None:
    assert issubclass(BundleError, InputError)


def test_a_missing_package_says_how_to_get_it() -> None:
    assert "pip install 'embrace-fl[export]'" in str(MissingPackage("torch", "export"))


def test_a_missing_package_survives_the_way_between_processes() -> None:
    sent = MissingPackage("torch", "export")
    received = pickle.loads(pickle.dumps(sent))
    assert (received.package, received.extra, str(received)) == ("torch", "export", str(sent))
