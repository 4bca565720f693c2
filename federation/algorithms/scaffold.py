"""SCAFFOLD, option II: control variates correct the drift of every local step; twice the bytes."""

from federation.preset import Preset

SCAFFOLD = Preset(
    "scaffold",
    "Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020",
    "control variates correct the drift of local steps",
    local={"rules": [{"rule": "control_variate"}]},
)
