"""`embrace key`: keys that sign bundles, so that devices know whose models they train."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from embrace.cli import show

key = typer.Typer(help="Keys that sign bundles.", no_args_is_help=True)
KeyFile = Annotated[Path, typer.Argument(help="The file with the private key.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@key.command()
def new(file: KeyFile, json_: Json = False) -> None:
    """Make a key: FILE is private, FILE.pub is for devices.

    Example: embrace key new models.key
    """
    from edge_runtime.signing import new_key

    _print(new_key(file).public, json_)


@key.command("show")
def show_key(file: KeyFile, json_: Json = False) -> None:
    """Show the public key, which `embrace agent --trust` takes.

    Example: embrace key show models.key
    """
    from edge_runtime.signing import read_key

    _print(read_key(file).public, json_)


@key.command()
def sign(
    file: KeyFile,
    bundle: Annotated[Path, typer.Argument(help="The bundle to sign; a signature that it has is replaced.")],
    json_: Json = False,
) -> None:
    """Sign a bundle that is there already: one that was trained, for example.

    Example: embrace key sign models.key bundles/trained
    """
    from edge_runtime.signing import read_key
    from embrace.bundles import load

    private = read_key(file)
    load(bundle).sign(private)
    _print(private.public, json_)


def _print(public: str, as_json: bool) -> None:
    show.print_json({"key": public}) if as_json else show.console().print(public, markup=False, soft_wrap=True)
