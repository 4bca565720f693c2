"""Adaptive servers: FedAdam, FedYogi, FedAdagrad."""

from federation.preset import Preset

FEDADAM = Preset(
    "fedadam",
    "Reddi et al., Adaptive Federated Optimization, ICLR 2021",
    "the server moves with Adam",
    local={"rules": []},
    serve={"rule": "adam"},
)
FEDYOGI = Preset(
    "fedyogi",
    "Reddi et al., Adaptive Federated Optimization, ICLR 2021",
    "the server moves with Yogi",
    local={"rules": []},
    serve={"rule": "yogi"},
)
FEDADAGRAD = Preset(
    "fedadagrad",
    "Reddi et al., Adaptive Federated Optimization, ICLR 2021",
    "the server moves with Adagrad",
    local={"rules": []},
    serve={"rule": "adagrad"},
)
