"""Arrival delays of the 336,776 flights that left New York in 2013, learnt on a Ray Dataset by two ranks.

    python examples/ray_flight_delays.py [--epochs 6] [--num-proc 2] [--out DIR]

The flights, net and figure of flight_delays.py, without Spark: what can be known before take-off goes in, and
the net under L1 loss is compared with the constant median on days that it has not seen.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import pandas as pd
import ray
import torch
from flights import CATEGORIES, IDS, LABEL, NUMBERS, SEED, WEATHER, DelayNet, TrainFacts, draw, read_tables

import hvd_ray


def prepare() -> pd.DataFrame:
    """Flights joined with the weather; "part" is 0 for training, 1 for validation, 2 for test days. Rows of
    one day share its storms, so they stay together."""
    flights, weather = (table.to_pandas() for table in read_tables())
    rows = flights.merge(weather, "left", ["origin", "time_hour"]).dropna(subset=LABEL)
    date = pd.to_datetime({"year": 2013, "month": rows["month"], "day": rows["day"]})
    rows["yearday"], rows["weekday"] = date.dt.day_of_year, date.dt.day_of_week
    rows["departs_min"] = rows["hour"] * 60 + rows["minute"]
    rows["arrives_min"] = rows["sched_arr_time"] // 100 * 60 + rows["sched_arr_time"] % 100
    rows["part"] = np.random.default_rng(SEED).choice(3, 366, p=[0.72, 0.08, 0.2])[rows["yearday"]]
    rows[WEATHER] = rows[WEATHER].fillna(rows[WEATHER].median())
    for name in CATEGORIES:
        rows[f"{name}_id"] = rows[name].astype("category").cat.codes.astype(np.int64)
    rows[LABEL] = rows[LABEL].astype(float)
    return rows[list(dict.fromkeys([*IDS, *NUMBERS, "hour", "part", LABEL]))]


def facts_of(train: pd.DataFrame) -> TrainFacts:
    return TrainFacts(
        levels=[int(train[name].max()) + 2 for name in IDS],
        mean=train[NUMBERS].mean().tolist(),
        std=train[NUMBERS].std().tolist(),
        median=float(train[LABEL].median()),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--num-proc", type=int, default=2, help="ranks; the embedded Ray gets as many CPUs")
    parser.add_argument("--out", type=Path, default=Path(), help="where the .png goes")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    ray.init(num_cpus=args.num_proc, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    print("Joining flights with the weather ...", flush=True)
    rows = prepare()
    train, test = rows[rows["part"] < 2], rows[rows["part"] == 2]
    facts = facts_of(train)
    torch.manual_seed(SEED)  # for the first weights; the estimator's seed governs all that follows
    estimator = hvd_ray.HorovodEstimator(
        model=DelayNet(facts),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=2e-3),
        loss=torch.nn.L1Loss(),
        lr_schedule=lambda epoch: 0.6**epoch,
        feature_cols=[*IDS, *NUMBERS],
        input_columns=[*IDS, NUMBERS],
        label_cols=[LABEL],
        validation="part",
        num_proc=args.num_proc,
        batch_size=512,
        epochs=args.epochs,
        seed=SEED,
    )
    print(f"Training on {args.num_proc} ranks ...", flush=True)
    started = time.monotonic()
    model = estimator.fit(ray.data.from_pandas(train))
    fit_s = time.monotonic() - started
    scored = model.predict(ray.data.from_pandas(test)).to_pandas()
    truth, predicted, quartiles = scored[LABEL], scored["prediction"], [0.25, 0.5, 0.75]
    hours = [
        {"hour": hour, "true": part[LABEL].quantile(quartiles), "predicted": part["prediction"].median()}
        for hour, part in scored.groupby("hour")
        if len(part) >= 100
    ]
    draw(model.history, hours, args.out / "ray_flight_delays.png")
    ray.shutdown()
    print(f"\nrows        {model.result.rows_sent:,} given, {model.result.rows_seen:,} seen in an epoch")
    print(f"wall clock  fit {fit_s:.1f} s")
    print("mean absolute error on unseen days, minutes")
    print(f"  hvd, {args.num_proc} ranks  {(predicted - truth).abs().mean():.2f}")
    print(f"  constant median  {(facts.median - truth).abs().mean():.2f}")
    print(f"\nwritten: {args.out / 'ray_flight_delays.png'}")


if __name__ == "__main__":
    main()
