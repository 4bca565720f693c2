"""What a local step is: rules that change the direction of SGD, chained, in numpy.

    rule              the direction of a step              a device keeps    beside the model travels

    Adam, AdamW       m̂ / (√v̂ + ε) [+ decay·x]             m, v, if kept     nothing
    WeightDecay       g + factor·x                         nothing           nothing
    Proximal          g + μ(x − x_0), FedProx              nothing           nothing
    ControlVariate    g + c − c_i, SCAFFOLD and VRL-SGD    c_i               Δc_i (SCAFFOLD)
    Momentum          v ← factor·v + g                     v, if it is kept  v, if it is averaged
    ServerMomentum    g + β·m_r, DOMO-S; or DOMO's move    the server's x    nothing
                      before the first step

No rule at all is plain SGD. The order counts: rules apply from left to right, so weight decay before momentum is
PyTorch's SGD. A step's gradient may be clipped before any of them (clipping.py).
"""

from typing import Final

from federation.axes.local.adam import Adam, AdamW
from federation.axes.local.chain import BLOCK, LocalStep, check_rules, runs, working_vectors
from federation.axes.local.clipping import clip, shortening
from federation.axes.local.control_variate import ControlVariate
from federation.axes.local.momentum import Momentum
from federation.axes.local.proximal import Proximal
from federation.axes.local.rule import LocalRule, Pace, Plain, Running, Start, Track, TrackBlock
from federation.axes.local.server_momentum import ServerMomentum
from federation.axes.local.weight_decay import WeightDecay
from federation.axes.local.words import parse_rule
from federation.decode import Axis

LOCAL: Final = Axis(
    {
        "adam": Adam,
        "adamw": AdamW,
        "control_variate": ControlVariate,
        "momentum": Momentum,
        "proximal": Proximal,
        "server_momentum": ServerMomentum,
        "weight_decay": WeightDecay,
    }
)

__all__ = [
    "BLOCK",
    "LOCAL",
    "Adam",
    "AdamW",
    "ControlVariate",
    "LocalRule",
    "LocalStep",
    "Momentum",
    "Pace",
    "Plain",
    "Proximal",
    "Running",
    "ServerMomentum",
    "Start",
    "Track",
    "TrackBlock",
    "WeightDecay",
    "check_rules",
    "clip",
    "parse_rule",
    "runs",
    "shortening",
    "working_vectors",
]
