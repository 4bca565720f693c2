"""HeteroFL, static: a weak device trains the first channels of every layer; means are per element."""

from federation.preset import Preset

HETEROFL = Preset(
    "heterofl",
    "Diao, Ding and Tarokh, HeteroFL: Computation and Communication Efficient Federated Learning, ICLR 2021",
    "weak devices train the first channels of every layer",
    cover={"rule": "width"},
    local={"rules": [{"rule": "weight_decay", "factor": 1e-4}, {"rule": "momentum", "factor": 0.9}]},
)
