"""InclusiveFL's order of layers: weak devices train the input side. The whole graph is run, so it saves no memory."""

from federation.preset import Preset

INCLUSIVEFL = Preset(
    "inclusivefl",
    "Liu et al., No One Left Behind: Inclusive Federated Learning over Heterogeneous Devices, KDD 2022",
    "weak devices train the first layers",
    cover={"rule": "input_side"},
    local={"rules": [{"rule": "weight_decay", "factor": 1e-4}, {"rule": "momentum", "factor": 0.9}]},
)
