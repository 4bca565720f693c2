"""How every picture of the project looks. matplotlib's object interface only: no display, no global state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from federation.errors import InputError

# Okabe and Ito's colours: readers with any colour vision can tell them apart, in grey too.
COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00")


def tidy(axes: Axes, grid: Any) -> None:
    """Fewer lines, and a pale grid behind everything."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, alpha=0.3)
    axes.set_axisbelow(True)


def save(figure: Figure, file: Path) -> None:
    """PNG, SVG or PDF, by the name's ending."""
    try:
        figure.savefig(file, dpi=130)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot draw {file}: {str(error).splitlines()[0]}") from None
