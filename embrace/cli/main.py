"""The `embrace` command, and the only place where an error becomes words and an exit code.

Subcommands live one per file and are listed below; a file is imported when its command is called. Such a file is light
to import: what it needs beyond typer and rich it imports inside its function, so that a device carries the whole
command and a part that is not installed answers with the extra to install.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated

import typer

from embrace.cli.lazy import Entry, lazy_group
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

# In the order in which a newcomer needs them.
COMMANDS: Mapping[str, Entry] = MappingProxyType(
    {
        "demo": Entry("embrace.cli.demo", "demo", "Train handwritten digits on a fleet of four agents."),
        "new": Entry("embrace.cli.new", "new", "Write a small project that works at once."),
        "export": Entry("embrace.cli.export", "export", "Turn a model into a bundle that devices can train."),
        "inspect": Entry("embrace.cli.inspect", "inspect", "Show a bundle and the memory that training needs."),
        "verify": Entry("embrace.cli.verify", "verify", "Compare a bundle with its source."),
        "key": Entry("embrace.cli.key", "key", "Keys that sign bundles."),
        "train": Entry("embrace.cli.train", "train", "Train a bundle on local data."),
        "serve": Entry("embrace.cli.serve", "serve", "Run a coordinator."),
        "worker": Entry("embrace.cli.worker", "worker", "Fold updates for coordinators that share a database."),
        "admin": Entry("embrace.cli.admin", "admin", "Look after what a coordinator has stored."),
        "agent": Entry("embrace.cli.agent", "agent", "Take part in training: wait for tasks, train, send updates."),
        "job": Entry("embrace.cli.job", "job", "Training jobs of a coordinator."),
        "device": Entry("embrace.cli.device_bench", "device", "Devices of a coordinator."),
        "simulate": Entry("embrace.cli.simulate", "simulate", "Run a job on simulated devices."),
        "plot": Entry("embrace.cli.plot", "plot", "Draw runs as curves."),
        "data": Entry("embrace.cli.data", "data", "Data sets, and how they are dealt to devices."),
        "bench": Entry("embrace.cli.bench", "bench", "Measure on this machine."),
    }
)

# Tracebacks belong to bugs and are Python's own; typer's would print every local tensor. No markup: brackets stay.
app = typer.Typer(
    name="embrace",
    cls=lazy_group(COMMANDS),
    no_args_is_help=True,
    context_settings={"max_content_width": 100},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


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


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit: 0 done, 1 failed, 2 wrong input, 3 a package is missing, 130 interrupted.

    EMBRACE_DEBUG=1 shows the traceback of an expected error too.
    """
    if isinstance(
        sys.stdout, io.TextIOWrapper
    ):  # a name that the encoding lacks (a pipe on Windows) is no reason to end
        sys.stdout.reconfigure(errors="replace")
    try:
        app(args=arguments, prog_name="embrace")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except (EmbraceError, ModuleNotFoundError) as error:
        explained = _explain(error)
        if explained is None or os.environ.get("EMBRACE_DEBUG") == "1":
            raise
        from rich.console import Console
        from rich.text import Text

        from federation.printable import printable_lines

        # Text, not a markup string: a message may contain brackets, 'embrace-fl[export]' for one.
        Console(stderr=True, soft_wrap=True).print(Text(printable_lines(f"error: {explained}"), style="red"))
        sys.exit(explained.exit_code)


def _explain(error: EmbraceError | ModuleNotFoundError) -> EmbraceError | None:
    """Find the error to show; None for a module that no extra brings, which is a bug."""
    if isinstance(error, EmbraceError):
        return error
    package = (error.name or "").partition(".")[0]
    return MissingPackage(package, EXTRAS[package]) if package in EXTRAS else None


if __name__ == "__main__":
    main()
