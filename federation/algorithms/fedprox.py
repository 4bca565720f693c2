"""FedProx: local steps are pulled towards the received model. μ = 0 is FedAvg."""

from federation.preset import Preset

FEDPROX = Preset(
    "fedprox",
    "Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020",
    "local steps are pulled towards the received model",
    local={"rules": [{"rule": "proximal", "mu": 0.01}]},
)
