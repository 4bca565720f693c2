"""How the server moves once it has the mean of the updates: by it, with momentum, or with a rate for every element."""

from typing import Final

from federation.axes.serve.adaptive import Adagrad, Adam, Yogi
from federation.axes.serve.average import Average
from federation.axes.serve.momentum import ServerHeavyBall
from federation.axes.serve.rule import Doubles, RoundFacts, ServeRule
from federation.decode import Axis

SERVE: Final = Axis(
    {"average": Average, "momentum": ServerHeavyBall, "adam": Adam, "yogi": Yogi, "adagrad": Adagrad}, default="average"
)

__all__ = ["SERVE", "Adagrad", "Adam", "Average", "Doubles", "RoundFacts", "ServeRule", "ServerHeavyBall", "Yogi"]
