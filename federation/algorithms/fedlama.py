"""FedLAMA: layers whose copies hardly differ are averaged every φ rounds only. φ = 1 is FedAvg."""

from federation.preset import Preset

FEDLAMA = Preset(
    "fedlama",
    "Lee, Zhang and Avestimehr, Layer-wise Adaptive Model Aggregation for Scalable Federated Learning, AAAI 2023",
    "layers that hardly differ are averaged less often",
    sync={"rule": "fedlama", "factor": 2},
    local={"rules": []},
)
