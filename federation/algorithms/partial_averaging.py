"""Partial model averaging: rounds of one step, and one of τ parts is averaged in each. One part is synchronous SGD."""

from federation.preset import Preset

PARTIAL_AVERAGING = Preset(
    "partial_averaging",
    "Lee et al., Partial Model Averaging in Federated Learning: Performance Guarantees and Benefits, 2022",
    "one part of the model is averaged after every step, in turn",
    sync={"rule": "rotating", "parts": 4, "by": "layer"},
    local={"steps": 1, "rules": [{"rule": "momentum", "factor": 0.9, "between": "keep"}]},
)
