"""`embrace bench`: measurements on this machine, one file per subcommand."""

from __future__ import annotations

import typer

from embrace.cli.bench.browser import browser
from embrace.cli.bench.fleet import fleet
from embrace.cli.bench.latency import latency
from embrace.cli.bench.memory import memory
from embrace.cli.bench.reproduce import reproduce
from embrace.cli.bench.server import server
from embrace.cli.bench.simulate import simulate
from embrace.cli.bench.step import step

bench = typer.Typer(help="Measure on this machine.", no_args_is_help=True)
bench.command()(step)
bench.command()(latency)
bench.command()(memory)
bench.command()(browser)
bench.command()(server)
bench.command()(fleet)
bench.command()(reproduce)
bench.command()(simulate)
