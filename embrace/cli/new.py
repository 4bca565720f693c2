"""`embrace new`: a small project that works at once."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from embrace.cli import show
from federation.errors import InputError

FILES = ("README.md", "data.py", "job.toml", "model.py")


def new(
    directory: Annotated[Path, typer.Argument(help="The folder to write; absent or empty.")],
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write a small project: a model, a data function, a job file, and a README with the commands to run.

    Example: embrace new shapes
    """
    try:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise InputError(f"{directory} exists and is not empty; choose another folder")
        directory.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            (directory / name).write_text(_template(name), "utf-8")
    except OSError as error:
        raise InputError(f"cannot write {directory}: {error.strerror}") from None
    if json_:
        show.print_json({"directory": str(directory), "files": list(FILES)})
        return
    screen = show.console()
    screen.print(f"{directory}: {', '.join(FILES)}", markup=False)
    commands = _template("README.md").split("```sh\n")[1].split("```")[0].splitlines()
    screen.print(
        "\n".join([f"next: cd {directory}", *(f"      {line}" for line in commands)]), markup=False, soft_wrap=True
    )


def _template(name: str) -> str:
    """Read a file of the project. Python files end otherwise here: they are the user's, no part of ours."""
    stored = f"{name}.txt" if name.endswith(".py") else name
    return (resources.files("embrace") / "project" / stored).read_text("utf-8")
