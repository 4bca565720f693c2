"""`embrace demo`: a coordinator and four unequal agents train a small network together, on this machine."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from embrace.cli import show
from federation.printable import printable

if TYPE_CHECKING:
    from embrace.demo.results import Answer, DemoOutcome, RoundResult, View
    from embrace.demo.text_demo import Classify

# Where a device's time goes: heading, and the parts of edge_runtime/timing.py that it sums up.
PARTS = {
    "download": ("download",),
    "load": ("load",),
    "frozen layers": ("forward",),
    "training": ("training",),
    "optimiser": ("optimiser",),
    "upload": ("upload",),
    "rest": ("activation_io", "state", "evaluation", "other"),
    "sum": ("wall",),
}
STATES = {"offered": "waiting", "leased": "at work", "uploaded": "sent", "arrived": "done"}


def demo(
    text: Annotated[
        bool, typer.Option("--text", help="Fine-tune MiniLM on short messages instead: some minutes, needs PyTorch.")
    ] = False,
    rounds: Annotated[
        int | None, typer.Option(min=1, max=1000, help="Rounds of training. Default: 12, with --text 6.")
    ] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep weights, logs and the coordinator's files here.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train handwritten digits on a fleet: one strong, one moderate and two weak agents, and their coordinator.

    Everything runs on this machine, in processes of their own that talk over HTTP; none is left at the end, and no
    file. Needs embrace-fl[coordinator] and no PyTorch.

    With --text they fine-tune MiniLM, a language model of 22 million weights, on messages of their own, and you can
    type one. Needs embrace-fl[coordinator,export,text] and the package with its weights.

    Example: embrace demo

    Example: embrace demo --text
    """
    with _hidden("torch", "onnx"):  # onnxruntime-training loads them wherever it finds them: three seconds for nothing
        from embrace.demo.digits_demo import run_digits
        from embrace.demo.fleet import workspace
        from embrace.demo.text_demo import run_text

    count = rounds or (6 if text else 12)
    display = nullcontext(lambda view: None) if json_ else _display(count)
    with _ended_like_ctrl_c(), workspace(keep) as directory:
        with display as tell:
            if text:
                outcome, classify = run_text(directory, count, tell)
            else:
                outcome, classify = run_digits(directory, count, tell), None
        if json_:
            show.print_json(asdict(outcome))
        else:
            _print(outcome, keep)
            if classify is not None and sys.stdin.isatty() and sys.stdout.isatty():
                _ask(classify)


@contextmanager
def _hidden(*modules: str) -> Iterator[None]:
    """Keep modules that are not loaded yet from being imported."""
    absent = [name for name in modules if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


@contextmanager
def _ended_like_ctrl_c() -> Iterator[None]:
    """Clean up after SIGTERM and a closed terminal as after Ctrl-C."""
    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    numbers = [number for name in names if signal.getsignal(number := getattr(signal, name)) is signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    for number in numbers:
        signal.signal(number, lambda received, frame: sys.exit(128 + received))
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def _display(rounds: int) -> Iterator[Callable[[View], None]]:
    """Show a live view on a terminal; elsewhere print a line for each round."""
    screen = show.console()
    if screen.is_terminal:
        from rich.live import Live

        with Live(console=screen, refresh_per_second=8, transient=True) as live:
            yield lambda view: live.update(_live(view, rounds))
        return
    told: list[str] = []

    def tell(view: View) -> None:
        lines = [] if view.rounds else [f"{view.doing} ..."]
        lines += [_round_line(row, rounds) for row in view.rounds] + view.notes
        for line in lines:
            if line not in told:
                told.append(line)
                screen.print(line, markup=False)

    yield tell


def _live(view: View, rounds: int) -> Any:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    done = len(view.rounds) - 1
    rows = [(name, boundary, STATES.get(state, state)) for name, boundary, state in view.seats]
    seats = show.table("this round", ("device", "trains from", "state"), rows, left=3)
    line = Table.grid(padding=(0, 1))
    line.add_row(ProgressBar(rounds, max(done, 0), width=60), view.doing)
    parts: list[Any] = [line]
    parts += [Text(_round_line(row, rounds)) for row in view.rounds[-8:]]
    return Group(*parts, *([seats] if view.seats else []), *(Text(note, style="yellow") for note in view.notes))


def _round_line(row: RoundResult, rounds: int) -> str:
    if row.round == 0:
        return f"untrained: accuracy {_share(row.accuracy)}"
    return (
        f"round {row.round:2} of {rounds}: accuracy {_share(row.accuracy):>6}, training loss {_loss(row.loss)}, "
        f"{row.updates} updates, {row.seconds:.1f} s"
    )


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _loss(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _ask(classify: Classify) -> None:
    """Tell the class of what the user types, until a line is empty."""
    screen = show.console()
    while typed := screen.input("Type a message (Enter ends): ").strip():
        _print_answers(classify([typed]))


def _print_answers(answers: Sequence[Answer]) -> None:
    for answer in answers:
        screen = show.console()
        screen.print(printable(f"{answer.label:>9} ({answer.share:.0%})  {answer.text}"), markup=False, soft_wrap=True)


def _print(outcome: DemoOutcome, keep: Path | None) -> None:
    screen = show.console()
    screen.print(_rounds_table(outcome))
    screen.print(_work_table(outcome))
    screen.print(_cost_table(outcome))
    for note in outcome.notes:
        screen.print(f"note: {note}", markup=False)
    left = f"everything is in {keep}" if keep else "nothing is left behind"
    if outcome.answers:
        screen.print(
            f"Together the devices reach {_share(outcome.rounds[-1].accuracy)} on {outcome.held_out} messages that "
            "none of them has.\nEach trained as many layers as its memory holds. Two messages that are new to all:",
            markup=False,
        )
        _print_answers(outcome.answers)
        screen.print(f"Done in {outcome.seconds:.0f} s; {left}.", markup=False)
        return
    weak = next(device for device in outcome.devices if device.tier == "weak")
    screen.print(
        f"Together the devices reach {_share(outcome.rounds[-1].accuracy)} on {outcome.held_out} images that none of "
        "them has.\nAlone, each has only its own images: as many steps, at the best of three rates.\n"
        f"The weak ones run the layers in front of {weak.boundary!r} and never train them.",
        markup=False,
    )
    screen.print(f"Done in {outcome.seconds:.1f} s; {left}.", markup=False)


def _rounds_table(outcome: DemoOutcome) -> Any:
    rows = [
        (row.round or "untrained", _share(row.accuracy), _loss(row.loss), row.updates, f"{row.seconds:.1f}")
        for row in outcome.rounds
    ]
    title = f"accuracy on {outcome.held_out} held-out samples, after every round"
    return show.table(title, ("round", "accuracy", "training loss", "updates", "seconds"), rows)


def _work_table(outcome: DemoOutcome) -> Any:
    most = outcome.layers
    rows = [
        (
            row.name,
            row.boundary,
            f"{len(row.layers)} of {most}",
            row.samples,
            row.rounds,
            show.size(row.received),
            show.size(row.sent),
            *([] if row.alone is None else [_share(row.alone)]),
        )
        for row in outcome.devices
    ]
    columns = ["device", "from", "layers", "samples", "rounds", "received", "sent"]
    if outcome.devices[0].alone is None:
        return show.table("who trained what", columns, rows, left=2)
    return show.table("who trained what, and what each would have reached alone", [*columns, "alone"], rows, left=2)


def _cost_table(outcome: DemoOutcome) -> Any:
    devices = outcome.devices

    def memory(count: int | None) -> str:
        return "–" if count is None else show.size(count)

    rows = [
        (name, *(f"{sum(row.seconds.get(part, 0.0) for part in parts):.2f}" for row in devices))
        for name, parts in PARTS.items()
    ]
    rows += [
        ("peak memory of training", *(memory(row.training_peak) for row in devices)),
        ("of the whole process", *(memory(row.process_peak) for row in devices)),
        ("allowed", *(memory(row.budget) for row in devices)),
    ]
    return show.table("seconds of all rounds, and memory", ("", *(row.name for row in devices)), rows)
