"""Times contenders turn by turn, and what the times say."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from side_by_side import Ranks

LEAST_PAIRS = 15


@dataclass(frozen=True)
class Contender:
    """One way to do the same thing. `prepare(turn)` writes the inputs and `check(turn)` asserts the result,
    both outside of the timing."""

    name: str
    call: Callable[[], Any]
    prepare: Callable[[int], None]
    check: Callable[[int], None]


Times = dict[str, np.ndarray]


def slowest(by_rank: Sequence[np.ndarray]) -> np.ndarray:
    """A collective is done when the last rank is."""
    return np.max(by_rank, axis=0)


def at_the_mean_rate(by_rank: Sequence[np.ndarray]) -> np.ndarray:
    """The time at the mean of the ranks' rates: of ranks that need not wait for each other."""
    return 1 / np.mean([1 / times for times in by_rank], axis=0)


def race(
    ranks: Ranks,
    contenders: Sequence[Contender],
    *,
    budget_s: float,
    most: int = 300,
    least: int = LEAST_PAIRS,
    combine: Callable[[Sequence[np.ndarray]], np.ndarray] = slowest,
) -> Times:
    """Seconds per contender and turn, those of the ranks combined.

    All contenders have a turn, then all have the next, each time in another order. As many turns as fit into
    `budget_s`, but `least` to `most`.
    """
    orders = random.Random(0)  # the same on all ranks
    taken: dict[str, list[float]] = {contender.name: [] for contender in contenders}

    def turn(number: int) -> None:
        for contender in orders.sample(contenders, len(contenders)):
            contender.prepare(number)
            ranks.barrier()
            begin = time.perf_counter()
            contender.call()
            taken[contender.name].append(time.perf_counter() - begin)
            contender.check(number)

    turn(0)
    begin = time.perf_counter()
    turn(1)
    turn(2)
    each_s = (time.perf_counter() - begin) / 2
    turns = ranks.agree(min(most, max(least, int(budget_s / each_s))))
    for times in taken.values():
        times.clear()
    for number in range(turns):
        turn(number)
    all_times = ranks.gather(taken)
    return {name: combine([np.array(theirs[name]) for theirs in all_times]) for name in taken}


def take_turns(calls: Mapping[str, Callable[[], float | None]], turns: int) -> Times:
    """The same in one process, in whose calls nobody else takes part: seconds per call and turn, which a call
    that times a part of itself returns."""
    orders = random.Random(0)
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name in orders.sample(list(calls), len(calls)):
            begin = time.perf_counter()
            own_s = calls[name]()
            taken[name].append(time.perf_counter() - begin if own_s is None else own_s)
    return {name: np.array(times) for name, times in taken.items()}


def median_us(times: np.ndarray) -> float:
    return float(np.median(times)) * 1e6


def p99_us(times: np.ndarray) -> float:
    return float(np.quantile(times, 0.99)) * 1e6


def ratio(of: np.ndarray, to: np.ndarray) -> tuple[float, float, float]:
    """Median `of` / median `to` of paired times, and the ends of its 95 % interval (bootstrap over pairs)."""
    picks = np.random.default_rng(0).integers(0, len(of), (500, len(of)))
    ratios = np.median(of[picks], axis=1) / np.median(to[picks], axis=1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(np.median(of) / np.median(to)), float(low), float(high)


def geometric_mean(values: Sequence[float]) -> float | None:
    return statistics.geometric_mean(values) if values else None
