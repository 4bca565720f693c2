"""The server's half of a round: tasks of a cohort, layouts of updates, their sums, the server's step, what comes after.

A `RoundEngine` has a job's plan and model, and never the state of a round: state goes in, new state comes out. The
coordinator drives it with files and a database, a simulation with arrays.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from federation import cohort, rounds
from federation.algorithm import Facts
from federation.axes.cover import DeviceProfile
from federation.axes.serve import RoundFacts
from federation.axes.sync import after_round, first_facts
from federation.coverage import STATISTICS, coverage
from federation.decode import decode
from federation.device_scores import most_labels, read_claim, summarise
from federation.exchange import Exchange, Inherit, units_region, update_regions
from federation.identity import task_seed
from federation.job import Plan
from federation.layout import MODEL, Layout
from federation.manifest import Manifest
from federation.messages import MOST_STEPS, Task
from federation.parameter_layers import layer_labels, parameter_layers
from federation.region import Region, of_parameters
from federation.reuse import ChangeMeter, LayerChanges
from federation.robust import StoredBody, robust_moves
from federation.round_sums import Reached, RoundSums
from federation.server_step import Change, Move, Vectors, mean_moves, server_step, spread, track_step
from federation.space import Vector
from federation.wire import CheckedTrack, Limits, UpdateDecoder, within

MOST_LAYOUTS = 63
Answer = tuple[int, int, Mapping[str, Any]]  # of one update: samples, bytes, the device's report


class RoundEngine:
    """Computes every round of one job. The coordinator and the simulation differ only in where state lies."""

    def __init__(self, plan: Plan, manifest: Manifest) -> None:
        self.plan = plan
        self.manifest = manifest
        self.space = manifest.space
        self.algorithm = plan.choices
        plan.cover.check(manifest)
        self._layouts: dict[tuple[str, tuple[int, ...]], Layout] = {}  # those made last, first

    # --- the state that a driver keeps from round to round -----------------------------------------------------------

    @property
    def vector_names(self) -> tuple[str, ...]:
        """Names of the server's state vectors, which every version has beside the model."""
        return self.algorithm.vectors

    def first_vectors(self) -> dict[str, Vector]:
        """Make the state vectors of version 0."""
        return self.algorithm.first_vectors(self.space.size)

    @cached_property
    def first_facts(self) -> Facts:
        """The facts before round 0."""
        untouched = (
            LayerChanges((-1,) * len(self.manifest.layers)) if self.plan.local.keeps_activations else LayerChanges()
        )
        return Facts(first_facts(self.algorithm.sync, self.space), changes=untouched)

    def facts_of(self, number: int, stored: Mapping[str, Any] | None) -> Facts:
        """Decode the facts at the beginning of a round; `stored` is what was saved of them after the round before.

        A job that an earlier program began has none, or has units of another kind: then every unit counts as just
        synchronised.
        """
        sync = self.first_facts.sync
        if stored is not None:
            facts = decode(Facts, stored, "facts", defaults=True)
            if len(facts.sync.changed) == len(sync.changed):
                return facts
        if not number:
            return self.first_facts
        rate = self.plan.local.schedule.at(number - 1)
        return Facts(replace(sync, changed=(number,) * len(sync.changed)), rate)

    @property
    def keeps_state(self) -> bool:
        """Whether devices keep something, so that a task names the device's last one."""
        return self.algorithm.keeps_state

    def inherits(self, number: int) -> bool:
        """Whether a round begins with the local models of the round before."""
        return self.algorithm.sync.hands_on and number > 0 and self.plan.when(number - 1).ends_window

    # --- the cohort and its tasks ------------------------------------------------------------------------------------

    def open(self, number: int, now: float) -> rounds.Round:
        """Open a round, which then waits for its devices."""
        bounds = self.plan.bounds
        participation = self.plan.participation
        return rounds.open_round(
            number,
            self.plan.seed,
            participation,
            now,
            lease=bounds.lease,
            offer=bounds.offer,
            max_task=bounds.max_task,
        )

    def assign(
        self,
        number: int,
        profiles: Mapping[str, DeviceProfile],
        previous: cohort.Cohort | None,
        *,
        seconds: Mapping[str, float] | None = None,
        resting: int = 0,
        away: int = 0,
    ) -> cohort.Cohort:
        """Draw the cohort of a round from the devices that are there; `previous` is that of the round before.

        `seconds` has what the tasks of devices took before; so many devices are `resting`, there but not invited;
        so many are `away` and come back.
        """
        plan = self.plan
        return cohort.assign(
            plan.seed,
            number,
            profiles,
            profiles,
            plan.participation,
            plan.cover,
            self.manifest,
            partial(plan.local.load_of, manifest=self.manifest),
            previous,
            seconds or {},
            resting,
            away,
        )

    def missing_to_begin(self, fit: int, resting: int, away: int = 0) -> int:
        """Count the devices that are missing to draw a cohort, if so many are fit, `resting` and `away`."""
        return cohort.missing_to_begin(self.plan.participation, fit, resting, away)

    def member(self, device: str, profile: DeviceProfile, seconds: float | None = None) -> cohort.Member:
        """Describe a device that may take over a free seat."""
        batch, buffers = self.plan.local.load_of(profile, self.manifest)
        return cohort.member_of(device, profile, self.plan.cover, self.manifest, batch, seconds, buffers)

    def task(
        self,
        seat: cohort.Seat,
        number: int,
        facts: Facts,
        *,
        last: tuple[int, str] | None = None,
        inherit: Inherit | None = None,
    ) -> Task:
        """Say what the device of a seat does; `last` is the round and the task in which it last took part."""
        member = seat.member
        exchange = self._exchange(number, facts, last, inherit)
        task = self.plan.local.task(member.boundary, number, task_seed(self.plan.seed, member.device), exchange)
        task = self._reusing(task, facts.changes)
        evaluate = self.plan.evaluate
        if not evaluate.on_devices:
            return task
        return replace(task, holdout=evaluate.holdout, evaluate=number % evaluate.every == 0)

    def _reusing(self, task: Task, changes: LayerChanges) -> Task:
        """Say in a task which stored activations the device may use."""
        local, covered = self.plan.local, coverage(self.manifest, task.boundary)
        frozen, good = covered.boundary.layer + (covered.boundary.head is not None), local.refresh_every
        if local.refresh_change is not None:
            good = min(good, changes.within(local.refresh_change, frozen))
        # All of a device's samples are stored anyway, and pass the same layers: using them again changes nothing.
        if frozen and local.epochs is not None and not (local.crop or local.flip or covered.measures):
            good = min(max(good, changes.unchanged_for(task.round, frozen)), MOST_STEPS)
        since = 0 if local.refresh_change is None else max(0, task.round + 1 - good)
        return replace(task, refresh_every=max(local.refresh_every, good), good_since=since)

    def _exchange(self, number: int, facts: Facts, last: tuple[int, str] | None, inherit: Inherit | None) -> Exchange:
        algorithm, when = self.algorithm, self.plan.when(number)
        exchange = Exchange(
            sync=algorithm.sync,
            sent=algorithm.sync.sent(when, facts.sync),
            changed=facts.sync.changed,
            window_from=self.plan.window_from(number),
            inherit=inherit,
            tracks=algorithm.tracks,
            fuse=algorithm.fuse(facts.rate, self.plan.local.steps),
        )
        keeps = algorithm.rules_keep or exchange.keeps_model
        return replace(exchange, last_round=last[0], last_task=last[1]) if last and keeps else exchange

    # --- updates as they come ----------------------------------------------------------------------------------------

    def layout(self, boundary: str, number: int, facts: Facts) -> Layout:
        """Describe what an update of a boundary has to have; rounds that synchronise the same units share it."""
        sync = self.algorithm.sync
        sent = sync.sent(self.plan.when(number), facts.sync)
        known = self._layouts.get((boundary, sent))
        if known is None:
            units = units_region(sync, self.space, sent)
            regions = update_regions(self.manifest, coverage(self.manifest, boundary), self.algorithm.tracks)
            known = Layout({track: region & units for track, region in regions.items()})
            self._layouts = {(boundary, sent): known, **dict(list(self._layouts.items())[:MOST_LAYOUTS])}
        return known

    def decoder(self, boundary: str, number: int, facts: Facts) -> tuple[UpdateDecoder, int]:
        """Make the check of an update; also returns the most bytes that it can have."""
        layout = self.layout(boundary, number, facts)
        room = 4 * len(layout.header) + 4096  # for another way of writing the same
        return UpdateDecoder(layout, replace(self.limits, max_header_bytes=room)), 8 + room + 4 * layout.space.size

    @cached_property
    def limits(self) -> Limits:
        """What the values of an update may be."""
        bounds = self.plan.bounds
        return Limits(max_norm=bounds.max_norm, max_value=bounds.max_value, max_other_value=bounds.max_other_value)

    def weight(self, samples: int) -> float:
        """Weigh an update by its samples, for the mean."""
        return self.plan.weigh.weight(samples)

    def sums(self, number: int, facts: Facts, draws: int, reached: Reached = lambda point: None) -> RoundSums:
        """Begin the sums of a round; `draws` is how many times updates can count at most, all together."""
        return RoundSums(self.plan, self.space, number, facts, draws, reached)

    # --- the end of a round ------------------------------------------------------------------------------------------

    def changes(
        self,
        sums: RoundSums,
        before: Vectors,
        devices: int,
        bodies: Sequence[tuple[CheckedTrack, StoredBody]] = (),
    ) -> Iterator[Change]:
        """Make the server's step: yield every new value of the model and of the state, block by block.

        `devices` have taken part in the job so far; `bodies` are all updates, for a robust rule, which sums nothing.
        """
        rates = RoundFacts(self.plan.local.schedule.at(sums.number))
        sums.meter = ChangeMeter(self.space)  # a step that failed halfway is made again
        step = server_step(self.algorithm.serve, self._moves(sums, bodies), before, rates)
        yield from sums.meter.watch(step, before[MODEL]) if self.plan.local.keeps_activations else step
        known = self.plan.serve.devices or devices
        for track, rule in self.algorithm.track_rules:
            yield from track_step(rule, track.name, sums.totals[track.name], self.space, before, known)

    def _moves(self, sums: RoundSums, bodies: Sequence[tuple[CheckedTrack, StoredBody]]) -> Iterator[Move]:
        serve = self.plan.serve
        if serve.combine == "mean":
            return mean_moves(sums.totals[MODEL], self.space)
        due = [(within(track, sums.due), body) for track, body in bodies]
        return robust_moves(due, serve.combine, serve.trim)

    def next_facts(self, sums: RoundSums) -> Facts:
        """Compute the facts after a round."""
        sync, when, known = self.algorithm.sync, self.plan.when(sums.number), sums.facts.sync
        steps = self.plan.local.steps
        units = sync.units(self.space)
        sizes = tuple(unit.only("weight").size for unit in units)
        measured: dict[int, float] = {}
        if sync.measures:
            for unit in sync.due(when, known):
                found = spread(sums.totals[MODEL], units[unit])
                if found is not None:
                    measured[unit] = found / (known.intervals[unit] * steps * sizes[unit])
        local, changes = self.plan.local, LayerChanges()
        if local.keeps_activations:
            changes = sums.facts.changes.after(sums.number, sums.meter.changes(), local.refresh_every - 1)
        return Facts(after_round(sync, when, known, sizes, measured), local.schedule.at(sums.number), changes)

    def summary(self, sums: RoundSums, regions: Collection[Region], answers: Iterable[Answer]) -> dict[str, Any]:
        """Describe a round in numbers; `regions` has what each update changed of the model."""
        samples, sizes, reports = zip(*answers, strict=True)
        names = [layer.name for layer in self.manifest.layers]
        return {
            "updates": len(reports),
            "samples": sum(samples),
            "bytes_up": sum(sizes),
            "loss": _mean([report.get("loss") for report in reports]),
            "lost_state": sum(report.get("lost_state") is True for report in reports),
            "trainers": {name: sum(self._trains(r, i) for r in regions) for i, name in enumerate(names)},
            **self.reuse(sums, reports),
            **self._synchronised(sums),
        }

    def reuse(self, sums: RoundSums, reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Count updates from activations of earlier rounds, and name the change of every layer, where there may be."""
        if not self.plan.local.keeps_activations:
            return {}
        ages = [report.get("activations_age") for report in reports]
        changes = zip((layer.name for layer in self.manifest.layers), sums.meter.changes(), strict=True)
        return {"reused": sum(isinstance(age, int) and age > 0 for age in ages), "changes": dict(changes)}

    def _trains(self, region: Region, layer: int) -> bool:
        """Whether an update trained a layer: of one that has weights, statistics alone were only measured."""
        kinds = {parameter.kind for parameter in self.space.layers[layer]}
        return any(piece.parameter.kind == "weight" or "weight" not in kinds for piece in region.layers[layer])

    def device_scores(self, answers: Iterable[tuple[str, Answer]]) -> dict[str, Any] | None:
        """Summarise how devices scored the version that they received; `answers` come with what each trains.

        Claims that cannot be are left out. None: there are no others.
        """
        evaluate, manifest = self.plan.evaluate, self.manifest
        if not evaluate.on_devices:
            return None
        names = {boundary: tier for tier, boundary in manifest.tiers.items()}
        per_sample, claims = math.prod(manifest.labels.shape), []
        for boundary, (samples, _, report) in answers:
            most = most_labels(samples, evaluate.holdout, per_sample)
            score = read_claim(report.get("evaluation"), most)
            claims += [] if score is None else [(names.get(boundary.removesuffix(STATISTICS), boundary), score)]
        return summarise(claims) if claims else None

    @cached_property
    def _layers(self) -> dict[str, Region]:
        """Every parameter layer of the model by its name for people."""
        layers = parameter_layers(self.space)
        names = layer_labels(layers, [layer.name for layer in self.manifest.layers])
        return {n: of_parameters(self.space, {p.name for p in own.parameters}) for n, own in zip(names, layers)}

    def _synchronised(self, sums: RoundSums) -> dict[str, Any]:
        """Name the parts that were synchronised and their layers, where not the whole model always is."""
        known = sums.facts.sync
        if len(known.changed) == 1:
            return {}
        parts = self.algorithm.sync.due(self.plan.when(sums.number), known)
        names = [name for name, layer in self._layers.items() if (layer & sums.due).size]
        return {"parts": list(parts), "synchronised": names}

    def by_layer(self, sums: RoundSums, after: Facts) -> dict[str, dict[str, float]]:
        """Measure how far local models were apart in a round, and the steps between synchronisations after it.

        Both by parameter layer; of a layer that was synchronised in part, its discrepancy is that of the part.
        """
        apart = {name: spread(sums.totals[MODEL], layer & sums.due) for name, layer in self._layers.items()}
        found = {"discrepancy": {name: value for name, value in apart.items() if value is not None}}
        if self.algorithm.sync.measures:
            steps = self.plan.local.steps
            rounds = zip(self._layers, after.sync.intervals)
            found["interval"] = {name: float(steps * between) for name, between in rounds}
        return found


def _mean(values: list[Any]) -> float | None:
    """Average what devices say; any number of any size may be among it."""
    kinds = (value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool))
    known = [float(value) for value in kinds if abs(value) < 1e30]
    return sum(known) / len(known) if known else None
