"""Adam, AdamW and clipping against PyTorch's own, and how moments go on from round to round."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from federation.axes.local import (
    Adam,
    AdamW,
    ControlVariate,
    LocalRule,
    LocalStep,
    Momentum,
    Start,
    WeightDecay,
    clip,
    working_vectors,
)
from federation.axes.weigh import effective_steps
from federation.capacity import predicted_memory, predicted_peak
from federation.errors import InputError
from federation.job import plan_from
from federation.messages import Task, decode_task, encode_task
from federation.space import Vector
from tests.federation.local_steps import GRADIENTS, RATE, STEPS, N, draw, work
from tests.federation.test_needs import MODEL

ADAM = {"betas": (0.8, 0.95), "eps": 1e-5}


@pytest.mark.parametrize(
    ("rules", "kind", "options"),
    [
        ([Adam()], "Adam", {}),
        ([Adam(0.8, 0.95, 1e-5)], "Adam", ADAM),
        ([Adam(0.0, 0.9)], "Adam", {"betas": (0.0, 0.9)}),
        ([WeightDecay(0.1), Adam()], "Adam", {"weight_decay": 0.1}),
        ([AdamW()], "AdamW", {"weight_decay": 0.01}),
        ([AdamW(0.8, 0.95, 1e-5, decay=0.3)], "AdamW", {**ADAM, "weight_decay": 0.3}),
        ([AdamW(decay=0.0)], "Adam", {}),
        ([Adam(), WeightDecay(0.3)], "AdamW", {"weight_decay": 0.3}),
    ],
    ids=str,
)
@pytest.mark.parametrize("most", [None, 2.0])
def test_pytorch_goes_the_same_way(
    rules: list[LocalRule], kind: str, options: dict[str, Any], most: float | None
) -> None:
    torch = pytest.importorskip("torch")
    x = torch.nn.Parameter(torch.from_numpy(draw(N)))
    optimiser = getattr(torch.optim, kind)([x], lr=RATE, **options)
    ours = LocalStep(rules, Start(draw(N), STEPS, RATE), [slice(0, 5), slice(5, N)], [], block=10)
    for number, gradient in enumerate(GRADIENTS):
        scaled = gradient * np.float32(0.1 if number % 2 else 1.0)  # some are short enough
        x.grad = torch.from_numpy(scaled.copy())
        if most is not None:
            torch.nn.utils.clip_grad_norm_([x], most)
            clip(scaled, [slice(0, 5), slice(5, N)], most)
            np.testing.assert_allclose(scaled, x.grad, rtol=1e-6)
        optimiser.step()
        ours.step(scaled, RATE)
        np.testing.assert_allclose(ours.x, x.detach().numpy(), rtol=1e-5, atol=2e-6)
    state, theirs = ours.state(), optimiser.state[x]
    np.testing.assert_allclose(state["first_moment"], theirs["exp_avg"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state["second_moment"], theirs["exp_avg_sq"], rtol=1e-5, atol=1e-6)


def test_blocks_do_not_change_a_bit() -> None:
    assert work([AdamW()], block=1000).x.tobytes() == work([AdamW()], block=3).x.tobytes()


def halves(rule: Adam, steps_before: int) -> Vector:
    """Two rounds with the same moments; the second begins as if so many steps had been taken."""
    first = work([rule], GRADIENTS[:10])
    brought = {name: vector.copy() for name, vector in first.state().items()}
    kept = {name: vector.copy() for name, vector in brought.items()}
    start = Start(first.x.copy(), STEPS - 10, RATE, brought=brought, steps_before=steps_before)
    second = LocalStep([rule], start, [slice(0, N)], [])
    for gradient in GRADIENTS[10:]:
        second.step(gradient.copy(), RATE)
    for name, vector in kept.items():
        assert np.array_equal(brought[name], vector), "what was brought is changed"
    return second.x


def test_kept_moments_go_on_with_their_number_of_steps() -> None:
    whole = work([Adam(between="keep")]).x
    assert np.array_equal(halves(Adam(between="keep"), 10), whole)
    assert not np.allclose(halves(Adam(between="keep"), 0), whole, atol=1e-3), "the number of steps decides nothing"


def test_a_gradient_that_is_always_zero_moves_nothing() -> None:
    assert np.array_equal(work([Adam()], np.zeros_like(GRADIENTS)).x, draw(N))


def test_a_gradient_that_is_not_finite_is_not_hidden_by_clipping() -> None:
    gradients = draw(N)
    gradients[3] = np.inf
    before = gradients.copy()
    clip(gradients, [slice(0, N)], 1.0)
    assert np.array_equal(gradients, before)


def test_clipping_looks_at_weights_only() -> None:
    gradients = np.full(6, 3.0, np.float32)
    clip(gradients, [slice(0, 2), slice(4, 5)], 3 * 3**0.5 / 3)
    np.testing.assert_allclose(gradients, [1, 1, 3, 3, 1, 3], rtol=1e-5)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Adam(1.0), r"^beta1: expected a number in \[0, 1\), got 1.0"),
        (lambda: Adam(beta2=-0.1), r"^beta2: .* got -0.1"),
        (lambda: Adam(epsilon=0.0), "^epsilon: expected a number from 1e-30 to 1, got 0.0"),
        (lambda: Adam(epsilon=float("nan")), "^epsilon: .* got nan"),
        (lambda: AdamW(decay=float("inf")), "^decay: .* got inf"),
        (lambda: Adam(between="average"), "^between: expected reset or keep, got 'average'"),
        (lambda: Task("stem", 1, 8, 0.1, clip_norm=0.0), "^clip_norm: expected a number above 0, got 0.0"),
        (lambda: Task("stem", 1, 8, 0.1, clip_norm=float("nan")), "^clip_norm: .* got nan"),
        (lambda: Task("stem", 1, 8, 0.1, micro_batch=0), "^micro_batch: expected a number from 1 to 65536, got 0"),
        (lambda: Start(draw(N), 1, 0.1, steps_before=-1), "^steps_before: expected at least 0, got -1"),
        (lambda: work([Adam(), AdamW()]), "^rules: expected one rule that scales steps, got Adam, AdamW"),
        (lambda: work([ControlVariate(), Adam()]), "^rules: expected ControlVariate behind Adam: it adds steps"),
    ],
)
def test_what_makes_no_sense(build: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build()


def test_a_task_travels_and_older_devices_see_no_new_keys() -> None:
    task = Task("stem", 1, 8, 0.1, (AdamW(between="keep"),), clip_norm=0.5, micro_batch=2)
    assert decode_task(encode_task(task)) == task
    assert not {"clip_norm", "micro_batch"} & set(encode_task(Task("stem", 1, 8, 0.1)))


def test_fednova_counts_steps() -> None:
    assert effective_steps([Adam()], 10, 0.1) == 10


def test_memory_counts_both_moments_and_the_sum_of_gradients() -> None:
    boundary = MODEL.boundary("stem")
    weights = MODEL.weights_of(boundary)
    assert predicted_memory(MODEL, boundary, 8, 2).optimiser == 8 * weights
    assert predicted_peak(MODEL, boundary, 8, 2) == predicted_peak(MODEL, boundary, 8) + 4 * weights
    assert [working_vectors(rules) for rules in ((), (Momentum(0.9),), (Adam(),))] == [1, 1, 2]
    local = {"batch": 32, "micro_batch": 4, "rules": [{"rule": "adam"}]}
    assert plan_from({"bundle": "b", "local": local}).local.load == (4, 3)
    assert plan_from({"bundle": "b"}).local.load == (32, 1)
