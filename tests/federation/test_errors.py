"""The tree of errors: whose fault, which status, which exit code."""

from __future__ import annotations

import pickle

import pytest

from federation.errors import BundleError, EmbraceError, FieldError, InputError, MissingPackage, VerificationError


@pytest.mark.parametrize(
    ("error", "status", "exit_code"),
    [
        (EmbraceError("x"), 500, 1),
        (InputError("x"), 400, 2),
        (FieldError("key", "x"), 400, 2),
        (BundleError("x"), 400, 2),
        (VerificationError("x"), 500, 1),
        (MissingPackage("torch", "export"), 501, 3),
    ],
)
def test_status_and_exit_code(error: EmbraceError, status: int, exit_code: int) -> None:
    assert (error.status, error.exit_code) == (status, exit_code)


def test_a_bad_bundle_is_bad_input() -> None:
    assert issubclass(BundleError, InputError)


def test_a_wrong_field_says_where_it_stands() -> None:
    error = FieldError("mu", "expected a number").below("local", "rules", 0)
    assert (str(error), error.path) == ("local.rules[0].mu: expected a number", ("local", "rules", 0, "mu"))
    assert str(error.on_line(7)) == "line 7: local.rules[0].mu: expected a number"
    assert str(FieldError((), "expected a table")) == "expected a table"
    assert str(FieldError(("tiers", "a\nb"), "no")) == r"tiers.'a\nb': no"
    assert len(str(FieldError("x" * 10**6, "no"))) < 100


def test_a_wrong_field_survives_the_way_between_processes() -> None:
    sent = FieldError(("a", 1), "no", 3)
    received = pickle.loads(pickle.dumps(sent))
    assert (received.path, received.message, received.line, str(received)) == (("a", 1), "no", 3, str(sent))


def test_a_missing_package_says_how_to_get_it() -> None:
    assert "pip install 'embrace-fl[export]'" in str(MissingPackage("torch", "export"))


def test_a_missing_package_survives_the_way_between_processes() -> None:
    sent = MissingPackage("torch", "export")
    received = pickle.loads(pickle.dumps(sent))
    assert (received.package, received.extra, str(received)) == ("torch", "export", str(sent))
