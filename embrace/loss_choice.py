"""What a user says about a loss: a name, a function, or one for each of several outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from embrace.errors import BundleError, InputError
from federation.inputs import NamedInput
from federation.manifest import PLAIN_LOSSES, TRACED_LOSSES, Head, Loss

if TYPE_CHECKING:
    from model_export.own_loss import OwnFunction

# A name, file.py:function, a function; or of several outputs OUTPUT=LOSS:WEIGHT each, or the same by name.
LossChoice: TypeAlias = str | Callable[[Any, Any], Any] | Sequence[str] | Mapping[str, str]
_NAMES = ", ".join([*PLAIN_LOSSES, *TRACED_LOSSES])
_OPTIONS: dict[str, Callable[[str], Any]] = {
    "label_smoothing": float,
    "ignore_index": int,
    "classes_last": lambda _: True,
    "next_token": lambda _: True,
    "delta": float,
    "gamma": float,
}


def parse_loss(
    loss: LossChoice | None, labels: Sequence[NamedInput] | None
) -> tuple[Loss | None, OwnFunction | None, list[str]]:
    """Read what a loss is asked for: (one by name, a function to be traced, the names of several heads)."""
    own = None if loss is None else _find_function(loss, labels)
    if own is not None:
        return None, own, []
    if labels is not None:
        raise InputError("labels: only a loss function of your own and ctc ask for them; leave them out")
    texts = _texts(loss)
    if not texts:
        return None, None, []
    if "=" not in texts[0]:
        if len(texts) > 1 or texts[0] not in PLAIN_LOSSES:
            expected = f"expected {_NAMES}, FILE.py:function, or OUTPUT=LOSS:WEIGHT for each of several outputs"
            raise InputError(f"loss: {expected}, got {', '.join(texts)}")
        return Loss(texts[0]), None, []
    if len(texts) == 1:
        name, _, rest = texts[0].partition("=")
        raise InputError(f"loss {texts[0]}: of one output say --output {name} and --loss {rest.partition(':')[0]}")
    heads = tuple(map(parse_head, texts))
    return Loss("heads", heads=heads), None, [head.name for head in heads]


def _texts(loss: LossChoice | None) -> list[str]:
    if loss is None or callable(loss):
        return []
    if isinstance(loss, str):
        return [loss]
    return [f"{name}={text}" for name, text in loss.items()] if isinstance(loss, Mapping) else list(map(str, loss))


def _find_function(loss: LossChoice, labels: Sequence[NamedInput] | None) -> OwnFunction | None:
    """Take a function that is to be traced; None: the loss is another."""
    if callable(loss):
        from model_export.own_loss import in_memory

        return in_memory(loss, None if labels is None else tuple(labels))
    texts = _texts(loss)
    if len(texts) == 1 and (texts[0] in TRACED_LOSSES or (".py:" in texts[0] and "=" not in texts[0])):
        from model_export.ready_losses import find_loss

        return find_loss(texts[0], labels)
    return None


def parse_head(text: str) -> Head:
    """Read OUTPUT=LOSS:WEIGHT:OPTION=VALUE; its shape is known when the model was run."""
    name, _, rest = text.partition("=")
    loss, *more = rest.split(":")
    weight, *options = more or [""]
    if not name.strip() or loss not in PLAIN_LOSSES:
        raise InputError(f"loss {text}: expected OUTPUT=LOSS:WEIGHT with {', '.join(PLAIN_LOSSES)}")
    try:
        pairs = [option.partition("=") for option in options]
        settings = {key: _OPTIONS[key](value) for key, _, value in pairs}
        head = Head(name.strip(), float(weight or 1.0), (), loss, **settings)
        _ = head.criterion, head.output  # which say what is wrong
    except BundleError as error:
        raise InputError(str(error)) from None
    except (KeyError, ValueError):
        raise InputError(
            f"loss {text}: expected OUTPUT=LOSS:WEIGHT, as in tags=cross_entropy:0.5, then options among "
            f"{', '.join(_OPTIONS)}, as in tags=cross_entropy:0.5:ignore_index=-100:classes_last"
        ) from None
    return head
