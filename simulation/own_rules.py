"""Take rules of the user's own to the processes of a simulation: plans and tasks name them, each process loads them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from edge_runtime.user_module import load_class, loaded_from
from federation.decode import RULE, Resolve
from federation.job import Plan, plan_to

OwnRules = Mapping[str, str | type[Any]]  # by its name in a plan: the file and the class in it, or the class itself


def own_rules(plan: Plan) -> OwnRules:
    """List the rules of a plan that are not among ours."""
    told = plan_to(plan, own_rules=True)
    rules = [
        (told["cover"], plan.cover),
        (told["sync"], plan.sync),
        (told["serve"], plan.serve.rule),
        *zip(told["local"]["rules"], plan.local.rules, strict=True),
    ]
    return {table[RULE]: loaded_from(type(rule)) or type(rule) for table, rule in rules if ":" in table[RULE]}


def can_travel(plan: Plan) -> bool:
    """Say whether worker processes can import a plan's rules; they import neither a notebook nor a script."""
    return all(
        isinstance(place, str) or (place.__module__ != "__main__" and "." not in place.__qualname__)
        for place in own_rules(plan).values()
    )


def resolver(rules: OwnRules) -> Resolve:
    """Make the function that finds a rule by its name in a plan or a task."""

    @cache
    def resolve(name: str) -> type[Any]:
        place = rules[name]
        return load_class(place, Path()) if isinstance(place, str) else place

    return resolve
