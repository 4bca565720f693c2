"""Every rule on elements that a device did not train: the laws of combining, one element at a time.

No paper has them; they are the project's own (docs/reference/algorithms.md, "Combining"). For each element:
- means divide by the weight of the devices that trained it; nobody trained it: the value and all server state stay;
- server momentum, the moments of Adam, Yogi and Adagrad and SCAFFOLD's c move only where somebody trained;
  c moves by Σ Δc_i / N over those that did;
- FedNova divides a device's update by its own number of steps, and τ_eff is of the devices that trained the element.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.oracles.fedopt import next_second
from tests.oracles.model import Gradient, Model, copy, zeros


@dataclass(frozen=True)
class Rules:
    weigh: str = "uniform"  # uniform | samples | fednova (FedNova weighs by samples, too)
    serve: str = "momentum"  # momentum (μ = 0: plain rate) | adam | yogi | adagrad
    control: bool = False  # SCAFFOLD's control variates in the local steps and on the server
    proximal: float = 0.0  # FedProx's μ
    local_rate: float = 0.1
    server_rate: float = 1.0
    momentum: float = 0.0  # buffer ← μ·buffer + mean Δ; x ← x + η·buffer
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3


@dataclass(frozen=True)
class State:
    model: Model
    first: Model  # momentum buffer, or m
    second: Model  # v
    control: Model  # c
    controls: dict[int, Model]  # c_i of all N devices


@dataclass(frozen=True)
class Contribution:
    delta: Model
    control_delta: Model


def begin(start: Model, devices: int, rules: Rules) -> State:
    second = [{name: np.full(value.shape, rules.tau**2) for name, value in layer.items()} for layer in start]
    return State(copy(start), zeros(start), second, zeros(start), {i: zeros(start) for i in range(devices)})


def train(
    state: State, gradient: Gradient, device: int, trained: Model, steps: int, first_step: int, rules: Rules
) -> Contribution:
    """`trained` has 1 where the device trains and 0 elsewhere."""
    x, c, c_i = state.model, state.control, state.controls[device]
    y = copy(x)
    control_delta = zeros(x)
    for k in range(steps):
        g = gradient(device, y, first_step + k)
        for layer in range(len(x)):
            for name in x[layer]:
                direction = g[layer][name] + rules.proximal * (y[layer][name] - x[layer][name])
                if rules.control:
                    direction = direction - c_i[layer][name] + c[layer][name]
                y[layer][name] = y[layer][name] - rules.local_rate * direction * trained[layer][name]
    delta = zeros(x)
    for layer in range(len(x)):
        for name in x[layer]:
            delta[layer][name] = y[layer][name] - x[layer][name]
            if rules.control:
                change = -c[layer][name] - delta[layer][name] / (steps * rules.local_rate)
                control_delta[layer][name] = change * trained[layer][name]
    return Contribution(delta, control_delta)


def serve(
    state: State,
    contributions: dict[int, Contribution],
    trained: dict[int, Model],
    steps: dict[int, int],
    samples: dict[int, float],
    rules: Rules,
) -> State:
    """The server's step, element by element."""
    devices = len(state.controls)
    model, first, second, control = copy(state.model), copy(state.first), copy(state.second), copy(state.control)
    controls = {i: copy(value) for i, value in state.controls.items()}
    for layer in range(len(model)):
        for name, value in model[layer].items():
            for e in np.ndindex(value.shape):
                who = [i for i in contributions if trained[i][layer][name][e]]
                if not who:
                    continue
                weight = {i: 1.0 if rules.weigh == "uniform" else samples[i] for i in who}
                share = {i: weight[i] / sum(weight.values()) for i in who}
                effective = sum(share[i] * steps[i] for i in who)
                move = 0.0
                for i in who:
                    scale = effective / steps[i] if rules.weigh == "fednova" else 1.0
                    move += share[i] * scale * contributions[i].delta[layer][name][e]
                if rules.serve == "momentum":
                    first[layer][name][e] = rules.momentum * first[layer][name][e] + move
                    model[layer][name][e] += rules.server_rate * first[layer][name][e]
                else:
                    m = rules.beta1 * first[layer][name][e] + (1.0 - rules.beta1) * move
                    v = next_second(rules.serve, second[layer][name][e], move**2, rules.beta2)
                    first[layer][name][e], second[layer][name][e] = m, v
                    model[layer][name][e] += rules.server_rate * m / (np.sqrt(v) + rules.tau)
                for i in who:
                    change = contributions[i].control_delta[layer][name][e]
                    controls[i][layer][name][e] += change
                    control[layer][name][e] += change / devices
    return State(model, first, second, control, controls)


def run(
    start: Model,
    gradient: Gradient,
    participants: list[list[int]],
    devices: int,
    trained: dict[int, Model],
    steps: dict[int, int],
    samples: dict[int, float],
    rules: Rules,
) -> list[State]:
    """The state after every round."""
    most = max(steps.values())
    state = begin(start, devices, rules)
    states: list[State] = []
    for t, selected in enumerate(participants):
        sent = {i: train(state, gradient, i, trained[i], steps[i], t * most, rules) for i in selected}
        state = serve(state, sent, trained, steps, samples, rules)
        states.append(state)
    return states
