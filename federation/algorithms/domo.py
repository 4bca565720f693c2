"""The family of DOMO: momentum of the server, of the devices, and of both, coordinated or not.

The same code with other constants: a factor of 0 on both sides is FedAvg, β = 0 turns DOMO into FedAvgSLM-Z.
"""

from federation.preset import Preset

FEDAVG_SM = Preset(
    "fedavg_sm",
    "Xu and Huang, Coordinating Momenta for Cross-silo Federated Learning, AAAI 2022",
    "server momentum",
    local={"rules": []},
    serve={"rule": "momentum", "factor": 0.9},
)
FEDAVG_LM = Preset(
    "fedavg_lm",
    "Xu and Huang, Coordinating Momenta for Cross-silo Federated Learning, AAAI 2022",
    "local momentum, averaged and handed back",
    local={"rules": [{"rule": "momentum", "factor": 0.6, "between": "average"}]},
)
FEDAVG_LM_Z = Preset(
    "fedavg_lm_z",
    "Xu and Huang, Coordinating Momenta for Cross-silo Federated Learning, AAAI 2022",
    "local momentum, reset in every round",
    local={"rules": [{"rule": "momentum", "factor": 0.6}]},
)
FEDAVG_SLM = Preset(
    "fedavg_slm",
    "Xu and Huang, Coordinating Momenta for Cross-silo Federated Learning, AAAI 2022",
    "server and averaged local momentum",
    local={"rules": [{"rule": "momentum", "factor": 0.6, "between": "average"}]},
    serve={"rule": "momentum", "factor": 0.9},
)
FEDAVG_SLM_Z = Preset(
    "fedavg_slm_z",
    "Xu and Huang, Coordinating Momenta for Cross-silo Federated Learning, AAAI 2022",
    "server and reset local momentum",
    local={"rules": [{"rule": "momentum", "factor": 0.6}]},
    serve={"rule": "momentum", "factor": 0.9},
)
DOMO = Preset(
    "domo",
    "Xu and Huang, Coordinating Momenta for Cross-silo Federated Learning, AAAI 2022",
    "server momentum fused before the first local step",
    local={"rules": [{"rule": "momentum", "factor": 0.6}, {"rule": "server_momentum", "beta": 0.9, "when": "before"}]},
    serve={"rule": "momentum", "factor": 0.9},
)
DOMO_S = Preset(
    "domo_s",
    "Xu and Huang, Coordinating Momenta for Cross-silo Federated Learning, AAAI 2022",
    "server momentum fused into every local step",
    local={
        "rules": [{"rule": "momentum", "factor": 0.6}, {"rule": "server_momentum", "beta": 0.9, "when": "every_step"}]
    },
    serve={"rule": "momentum", "factor": 0.9},
)
