"""The published algorithms: each is a choice on some of the axes, with the paper it comes from.

A job names one (`algorithm = "scaffold"`), and what the job says itself counts more, key by key. All of them are in
docs/reference/algorithms.md in one notation. Constants that switch a rule off give FedAvg.

>>> scaffold = published("scaffold")
>>> scaffold.note
'control variates correct the drift of local steps'
>>> "embracing" in PUBLISHED
True
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any

from federation.axes.cover import COVER, Cover, InputSide, OrderedDropout, OutputSide, Width
from federation.axes.local import LOCAL, ControlVariate, LocalRule, Momentum, Proximal, ServerMomentum, WeightDecay
from federation.axes.serve import SERVE, Adagrad, Adam, ServerHeavyBall, ServeRule, Yogi
from federation.axes.sync import SYNC, FedLama, Rotating, Sync
from federation.axes.weigh import Weigh
from federation.decode import RULE, encode, shown
from federation.errors import FieldError


@dataclass(frozen=True)
class Published:
    """A published algorithm. None: it leaves the axis to the job."""

    name: str
    paper: str
    note: str  # one line for lists
    rules: tuple[Annotated[LocalRule, LOCAL], ...] = ()  # local steps
    steps: int | None = None  # ... and how many of them
    cover: Annotated[Cover, COVER] | None = None
    sync: Annotated[Sync, SYNC] | None = None
    weigh: Weigh | None = None
    serve: Annotated[ServeRule, SERVE] | None = None

    def fill(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Put a job's tables on top of this algorithm's: key by key, but a list of rules as a whole."""
        own = encode(self)
        tables = {axis: own[axis] for axis in ("cover", "sync", "weigh", "serve") if own[axis] is not None}
        tables["local"] = {key: own[key] for key in ("rules", "steps") if own[key] is not None}
        found = dict(job)
        for axis, table in tables.items():
            given = job.get(axis, {})
            if isinstance(given, Mapping):
                # Constants of another rule would not fit the one that the job asks for.
                replaced = given.get(RULE, table.get(RULE)) != table.get(RULE)
                found[axis] = {**({} if replaced else table), **given}
        return found


_DECAY_AND_MOMENTUM = (WeightDecay(1e-4), Momentum(0.9))  # of EmbracingFL's comparison
_DOMO = "Xu and Huang, Coordinating Momenta for Cross-silo Federated Learning, AAAI 2022"
_FEDNOVA = (
    "Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization, NeurIPS 2020"
)
_FEDOPT = "Reddi et al., Adaptive Federated Optimization, ICLR 2021"

_ALL = (
    # x ← x + η·mean Δ, with two-sided rates; η = 1 is McMahan's FedAvg.
    Published(
        "fedavg",
        "Yang, Fang and Liu, Achieving Linear Speedup with Partial Worker Participation in Non-IID Federated Learning",
        "mean of all updates; serve.rate is the rate of the server",
    ),
    # Each layer is averaged over the devices that trained it.
    Published(
        "embracing",
        "Lee et al., Embracing Federated Learning: Enabling Weak Client Participation via Partial Model Training, 2024",
        "weak devices train the last layers",
        _DECAY_AND_MOMENTUM,
        cover=OutputSide(),
    ),
    # Static widths; means are per element.
    Published(
        "heterofl",
        "Diao, Ding and Tarokh, HeteroFL: Computation and Communication Efficient Federated Learning, ICLR 2021",
        "weak devices train the first channels of every layer",
        _DECAY_AND_MOMENTUM,
        cover=Width(),
    ),
    # Ordered dropout.
    Published(
        "fjord",
        "Horvath et al., FjORD: Fair and Accurate Federated Learning under Heterogeneous Targets, NeurIPS 2021",
        "every step trains one of the widths that the device can afford",
        _DECAY_AND_MOMENTUM,
        cover=OrderedDropout(),
    ),
    # The order of layers alone. The whole graph is run, so it saves no memory.
    Published(
        "inclusivefl",
        "Liu et al., No One Left Behind: Inclusive Federated Learning over Heterogeneous Devices, KDD 2022",
        "weak devices train the first layers",
        _DECAY_AND_MOMENTUM,
        cover=InputSide(),
    ),
    # Rounds of one step, and one of τ parts is averaged in each. One part is synchronous SGD.
    Published(
        "partial_averaging",
        "Lee et al., Partial Model Averaging in Federated Learning: Performance Guarantees and Benefits, 2022",
        "one part of the model is averaged after every step, in turn",
        (Momentum(0.9, between="keep"),),
        steps=1,
        sync=Rotating(4, "layer"),
    ),
    # Layers whose copies hardly differ are averaged every φ rounds only. φ = 1 is FedAvg.
    Published(
        "fedlama",
        "Lee, Zhang and Avestimehr, Layer-wise Adaptive Model Aggregation for Scalable Federated Learning, AAAI 2023",
        "layers that hardly differ are averaged less often",
        sync=FedLama(2),
    ),
    # DOMO's family: the same code with other constants. A factor of 0 on both sides is FedAvg, β = 0 turns DOMO into
    # FedAvgSLM-Z.
    Published("fedavg_sm", _DOMO, "server momentum", serve=ServerHeavyBall(0.9)),
    Published("fedavg_lm", _DOMO, "local momentum, averaged and handed back", (Momentum(0.6, between="average"),)),
    Published("fedavg_lm_z", _DOMO, "local momentum, reset in every round", (Momentum(0.6),)),
    Published(
        "fedavg_slm",
        _DOMO,
        "server and averaged local momentum",
        (Momentum(0.6, between="average"),),
        serve=ServerHeavyBall(0.9),
    ),
    Published("fedavg_slm_z", _DOMO, "server and reset local momentum", (Momentum(0.6),), serve=ServerHeavyBall(0.9)),
    Published(
        "domo",
        _DOMO,
        "server momentum fused before the first local step",
        (Momentum(0.6), ServerMomentum(0.9, "before")),
        serve=ServerHeavyBall(0.9),
    ),
    Published(
        "domo_s",
        _DOMO,
        "server momentum fused into every local step",
        (Momentum(0.6), ServerMomentum(0.9, "every_step")),
        serve=ServerHeavyBall(0.9),
    ),
    # μ = 0 is FedAvg.
    Published(
        "fedprox",
        "Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020",
        "local steps are pulled towards the received model",
        (Proximal(0.01),),
    ),
    # Equal steps are FedAvg.
    Published(
        "fednova",
        _FEDNOVA,
        "updates are normalised by their number of steps",
        weigh=Weigh("samples", normalise=True),
    ),
    # Option II; twice the bytes.
    Published(
        "scaffold",
        "Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020",
        "control variates correct the drift of local steps",
        (ControlVariate(),),
    ),
    # Devices make the control variates themselves, from their last model and the mean; for full participation.
    Published(
        "vrl_sgd",
        "Liang et al., Variance Reduced Local SGD with Lower Communication Complexity, 2019",
        "control variates without extra bytes",
        (ControlVariate("own"),),
    ),
    Published("fedadam", _FEDOPT, "the server moves with Adam", serve=Adam()),
    Published("fedyogi", _FEDOPT, "the server moves with Yogi", serve=Yogi()),
    Published("fedadagrad", _FEDOPT, "the server moves with Adagrad", serve=Adagrad()),
)
PUBLISHED: Mapping[str, Published] = MappingProxyType({algorithm.name: algorithm for algorithm in _ALL})


def published(name: object) -> Published:
    """Find the algorithm of a name."""
    if not isinstance(name, str) or name not in PUBLISHED:
        raise FieldError("algorithm", f"expected one of {', '.join(PUBLISHED)}, got {shown(name)}")
    return PUBLISHED[name]
