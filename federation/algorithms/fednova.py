"""FedNova: updates are normalised by their effective number of steps. Equal steps are FedAvg."""

from federation.preset import Preset

FEDNOVA = Preset(
    "fednova",
    "Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization, NeurIPS 2020",
    "updates are normalised by their number of steps",
    local={"rules": []},
    weigh={"by": "samples", "normalise": True},
)
