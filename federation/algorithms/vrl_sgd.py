"""VRL-SGD: control variates that devices make themselves from their last model and the mean; for full participation."""

from federation.preset import Preset

VRL_SGD = Preset(
    "vrl_sgd",
    "Liang et al., Variance Reduced Local SGD with Lower Communication Complexity, 2019",
    "control variates without extra bytes",
    local={"rules": [{"rule": "control_variate", "origin": "own"}]},
)
