"""EmbracingFL: weak devices train the output side; each layer is averaged over those who trained it."""

from federation.preset import Preset

EMBRACING = Preset(
    "embracing",
    "Lee et al., Embracing Federated Learning: Enabling Weak Client Participation via Partial Model Training, 2024",
    "weak devices train the last layers",
    cover={"rule": "output_side"},
    local={"rules": [{"rule": "weight_decay", "factor": 1e-4}, {"rule": "momentum", "factor": 0.9}]},
)
