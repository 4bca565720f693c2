"""The `embrace` command, and the only place where an error becomes words and an exit code.

Subcommands live one per file and are registered below. Such a file is light to import: what it needs beyond
typer and rich it imports inside its function, so that a device carries the whole command and a part that is
not installed answers with the extra to install.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from embrace.cli.agent import agent
from embrace.cli.bench import bench
from embrace.cli.data import data
from embrace.cli.demo import demo
from embrace.cli.export import export
from embrace.cli.inspect import inspect
from embrace.cli.job import device, job
from embrace.cli.plot import plot
from embrace.cli.serve import serve
from embrace.cli.simulate import simulate
from embrace.cli.train import train
from embrace.cli.verify import verify
from federation import __version__
from federation.errors import EmbraceError, MissingPackage

# Optional module -> the smallest extra that brings it.
EXTRAS: Mapping[str, str] = MappingProxyType(
    {
        "PIL": "images",
        "fastapi": "coordinator",
        "httpx": "edge",
        "matplotlib": "bench",
        "onnx": "export",
        "onnxruntime": "edge",
        "onnxscript": "export",
        "sklearn": "bench",
        "sqlalchemy": "coordinator",
        "torch": "export",
        "uvicorn": "coordinator",
    }
)
INTERRUPTED = 130  # 128 + SIGINT, what a shell expects

# Tracebacks belong to bugs and are Python's own; typer's would print every local tensor.
app = typer.Typer(name="embrace", no_args_is_help=True, pretty_exceptions_enable=False)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"embrace {__version__}")
        raise typer.Exit


@app.callback()
def embrace(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Train one model on a fleet of unequal devices, the weakest included."""


app.command()(export)
app.command()(inspect)
app.command()(verify)
app.command()(train)
app.command()(simulate)
app.command()(serve)
app.command()(agent)
app.add_typer(job, name="job")
app.add_typer(device, name="device")
app.add_typer(bench, name="bench")
app.add_typer(data, name="data")
app.command()(plot)
app.command()(demo)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit: 0 done, 1 failed, 2 wrong input, 3 a package is missing, 130 interrupted.

    EMBRACE_DEBUG=1 shows the traceback of an expected error too.
    """
    try:
        app(args=arguments, prog_name="embrace")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except (EmbraceError, ModuleNotFoundError) as error:
        explained = _explain(error)
        if explained is None or os.environ.get("EMBRACE_DEBUG") == "1":
            raise
        # Text, not a markup string: a message may contain brackets, 'embrace[export]' for one.
        Console(stderr=True, soft_wrap=True).print(Text(f"error: {explained}", style="red"))
        sys.exit(explained.exit_code)


def _explain(error: EmbraceError | ModuleNotFoundError) -> EmbraceError | None:
    """The error to show, or None for a module that no extra brings: that is a bug, not an answer."""
    if isinstance(error, EmbraceError):
        return error
    package = (error.name or "").partition(".")[0]
    return MissingPackage(package, EXTRAS[package]) if package in EXTRAS else None


if __name__ == "__main__":
    main()
