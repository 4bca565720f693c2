"""FjORD, ordered dropout: every step trains a width drawn from those that the device can afford."""

from federation.preset import Preset

FJORD = Preset(
    "fjord",
    "Horvath et al., FjORD: Fair and Accurate Federated Learning under Heterogeneous Targets, NeurIPS 2021",
    "every step trains one of the widths that the device can afford",
    cover={"rule": "ordered_dropout"},
    local={"rules": [{"rule": "weight_decay", "factor": 1e-4}, {"rule": "momentum", "factor": 0.9}]},
)
