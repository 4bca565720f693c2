"""Errors become one line and an exit code, in one place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import typer

import embrace.cli.main
from federation import __version__
from federation.errors import BundleError, EmbraceError, VerificationError


def fails_with(error: BaseException) -> Callable[[], None]:
    def command() -> None:
        raise error

    return command


def run(monkeypatch: pytest.MonkeyPatch, command: Callable[[], None], *arguments: str) -> int:
    """Exit code of `embrace try`, with `command` registered as the subcommand `try`."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.callback()(embrace.cli.main.embrace)
    app.command("try")(command)
    monkeypatch.setattr(embrace.cli.main, "app", app)
    monkeypatch.delenv("EMBRACE_DEBUG", raising=False)
    with pytest.raises(SystemExit) as exit_:
        embrace.cli.main.main(arguments or ("try",))
    assert isinstance(exit_.value.code, int)
    return exit_.value.code


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, lambda: None, "--version") == 0
    assert capsys.readouterr().out == f"embrace {__version__}\n"


def test_success(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, lambda: None) == 0


@pytest.mark.parametrize(("error", "code"), [(BundleError("no graph [0]"), 2), (VerificationError("no graph [0]"), 1)])
def test_an_error_is_one_line_on_stderr(
    error: EmbraceError, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, fails_with(error)) == code
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "error: no graph [0]\n")


@pytest.mark.parametrize(("module", "extra"), [("torch.onnx", "export"), ("httpx", "edge"), ("fastapi", "coordinator")])
def test_a_missing_optional_package_names_its_extra(
    module: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = ModuleNotFoundError(f"No module named '{module}'", name=module)
    assert run(monkeypatch, fails_with(missing)) == 3
    assert f"pip install 'embrace-fl[{extra}]'" in capsys.readouterr().err


def test_any_other_missing_module_is_a_bug_and_shows_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModuleNotFoundError):
        run(monkeypatch, fails_with(ModuleNotFoundError("No module named 'federatoin'", name="federatoin")))


def test_debugging_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def command() -> None:
        monkeypatch.setenv("EMBRACE_DEBUG", "1")
        raise BundleError("broken")

    with pytest.raises(BundleError):
        run(monkeypatch, command)


def test_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, fails_with(KeyboardInterrupt())) == 130


def test_wrong_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, lambda: None, "try", "--what") == 2
