"""`embrace bench`: measurements on this machine, one file per subcommand."""

from __future__ import annotations

import typer

from cli.bench.latency import latency
from cli.bench.memory import memory
from cli.bench.reproduce import reproduce
from cli.bench.server import server
from cli.bench.simulate import simulate
from cli.bench.step import step

bench = typer.Typer(help="Measure on this machine.", no_args_is_help=True)
bench.command()(step)
bench.command()(latency)
bench.command()(memory)
bench.command()(server)
bench.command()(reproduce)
bench.command()(simulate)
