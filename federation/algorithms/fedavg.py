"""FedAvg with two-sided rates: x ← x + η·mean Δ. [serve] rate is η; 1 is McMahan's FedAvg."""

from federation.preset import Preset

FEDAVG = Preset(
    "fedavg",
    "Yang, Fang and Liu, Achieving Linear Speedup with Partial Worker Participation in Non-IID Federated Learning",
    "mean of all updates; serve.rate is the rate of the server",
    local={"rules": []},
)
