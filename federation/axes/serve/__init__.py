"""How the server moves once it has the mean of the updates: by it, with momentum, or with a rate for every element."""

from federation.axes.serve.adaptive import Adagrad, Adam, Yogi
from federation.axes.serve.average import Average
from federation.axes.serve.momentum import ServerHeavyBall
from federation.axes.serve.rule import Doubles, RoundFacts, ServeRule

__all__ = ["Adagrad", "Adam", "Average", "Doubles", "RoundFacts", "ServeRule", "ServerHeavyBall", "Yogi"]
