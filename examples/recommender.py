"""Ratings of items by users: a net with two inputs, against Spark's ALS and the plain mean.

    python examples/recommender.py [--epochs 12]

`forward(user, item)` has two parameters, so each feature column feeds one of them, as int64: nothing has to
be said about it. The ratings are made up here, from hidden tastes and noise, so that the best possible error
is known; a fifth of them is kept for the test.
"""

from __future__ import annotations

import argparse

import numpy as np
import pyarrow as pa
import torch
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.recommendation import ALS
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import nn

from hvd_spark import HorovodEstimator

USERS, ITEMS, RATINGS, TASTES, NOISE = 400, 200, 30_000, 4, 0.5


def ratings(spark: SparkSession) -> DataFrame:
    """Columns user, item, rating: each pair at most once."""
    draw = np.random.default_rng(5)
    pairs = draw.choice(USERS * ITEMS, RATINGS, replace=False)
    user, item = pairs // ITEMS, pairs % ITEMS
    tastes, traits = draw.normal(size=(USERS, TASTES)), draw.normal(size=(ITEMS, TASTES)) / 2
    liked = 3 + draw.normal(0, 0.3, USERS)[user] + draw.normal(0, 0.3, ITEMS)[item]
    rating = liked + (tastes[user] * traits[item]).sum(axis=1) + draw.normal(0, NOISE, RATINGS)
    table = pa.table({"user": user.astype(np.int32), "item": item.astype(np.int32), "rating": rating})
    return spark.createDataFrame(table)


class Matcher(nn.Module):
    """A rating as the product of what a user likes and an item has, plus what both are like on average."""

    def __init__(self, mean: float, width: int = 8):
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, width), nn.Embedding(ITEMS, width)
        self.of_user, self.of_item = nn.Embedding(USERS, 1), nn.Embedding(ITEMS, 1)
        self.mean = nn.Parameter(torch.tensor(mean))
        for table in (self.users, self.items, self.of_user, self.of_item):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        match = (self.users(user) * self.items(item)).sum(dim=1, keepdim=True)
        return self.mean + self.of_user(user) + self.of_item(item) + match


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    epochs = parser.parse_args().epochs
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", False)
    spark = builder.config("spark.ui.showConsoleProgress", False).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    train, test = ratings(spark).cache().randomSplit([0.8, 0.2], seed=5)
    mean = train.agg(F.mean("rating")).first()[0]

    torch.manual_seed(5)
    model = HorovodEstimator(
        model=Matcher(mean),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, 5e-3, weight_decay=0.2),
        loss=nn.MSELoss(),
        feature_cols=["user", "item"],
        label_cols=["rating"],
        num_proc=2,
        batch_size=128,
        epochs=epochs,
        seed=5,
    ).fit(train)
    als = ALS(userCol="user", itemCol="item", ratingCol="rating", rank=8, regParam=0.1, seed=5).fit(train)

    error = RegressionEvaluator(labelCol="rating", metricName="rmse")
    print(f"root mean squared error on {test.count()} ratings that were not seen:")
    print(f"  always the mean  {error.evaluate(test.withColumn('prediction', F.lit(mean))):.3f}")
    print(f"  Spark's ALS      {error.evaluate(als.transform(test).na.fill(mean, ['prediction'])):.3f}")
    print(f"  hvd, two inputs  {error.evaluate(model.transform(test)):.3f}")
    print(f"  the noise        {NOISE:.3f}")
    spark.stop()


if __name__ == "__main__":
    main()
