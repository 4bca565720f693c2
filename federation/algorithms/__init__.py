"""Published algorithms by name. The list is closed: nothing is looked up anywhere else."""

from collections.abc import Mapping
from types import MappingProxyType

from federation.algorithms.domo import DOMO, DOMO_S, FEDAVG_LM, FEDAVG_LM_Z, FEDAVG_SLM, FEDAVG_SLM_Z, FEDAVG_SM
from federation.algorithms.embracing import EMBRACING
from federation.algorithms.fedavg import FEDAVG
from federation.algorithms.fedlama import FEDLAMA
from federation.algorithms.fednova import FEDNOVA
from federation.algorithms.fedopt import FEDADAGRAD, FEDADAM, FEDYOGI
from federation.algorithms.fedprox import FEDPROX
from federation.algorithms.fjord import FJORD
from federation.algorithms.heterofl import HETEROFL
from federation.algorithms.inclusivefl import INCLUSIVEFL
from federation.algorithms.partial_averaging import PARTIAL_AVERAGING
from federation.algorithms.scaffold import SCAFFOLD
from federation.algorithms.vrl_sgd import VRL_SGD
from federation.errors import InputError
from federation.preset import Preset

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        preset.name: preset
        for preset in (
            FEDAVG,
            EMBRACING,
            HETEROFL,
            FJORD,
            INCLUSIVEFL,
            PARTIAL_AVERAGING,
            FEDLAMA,
            FEDAVG_SM,
            FEDAVG_LM,
            FEDAVG_LM_Z,
            FEDAVG_SLM,
            FEDAVG_SLM_Z,
            DOMO,
            DOMO_S,
            FEDPROX,
            FEDNOVA,
            SCAFFOLD,
            VRL_SGD,
            FEDADAM,
            FEDYOGI,
            FEDADAGRAD,
        )
    }
)


def preset(name: str) -> Preset:
    """The algorithm of that name."""
    if name not in PRESETS:
        raise InputError(f"algorithm: expected one of {', '.join(PRESETS)}, got {name[:80]!r}")
    return PRESETS[name]
