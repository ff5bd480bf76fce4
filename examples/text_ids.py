"""Reviews: Spark turns words into ids, an embedding and a convolution over word pairs tell good from bad.

    python examples/text_ids.py [--epochs 4]

The reviews are made up here, so that the answer is known: "not good" is bad. Spark's logistic regression on
word counts cannot see which word a "not" belongs to; the net reads words in their order. Rows of ids must
have one length: shorter ones are filled with 0, which `padding_idx` ignores.
"""

from __future__ import annotations

import argparse
import random

import torch
from pyspark.ml import Pipeline
from pyspark.ml.classification import LogisticRegression
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import CountVectorizer, Tokenizer
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import nn

from hvd_spark import HorovodEstimator

GOOD, BAD = ["good", "great", "friendly", "clean"], ["bad", "awful", "rude", "dirty"]
THINGS = ["room", "breakfast", "staff", "pool", "view", "bed"]
LENGTH = 16  # words of the longest review


def reviews(spark: SparkSession, count: int = 4000) -> DataFrame:
    """Columns text and label: 1 when more of what a review says is good than bad."""
    draw, rows = random.Random(3), []
    while len(rows) < count:
        claims, score = [], 0
        for thing in draw.sample(THINGS, 3):
            is_good, is_negated = draw.random() < 0.5, draw.random() < 0.25
            word = draw.choice(GOOD if is_good else BAD)
            claims.append(f"{thing} was {'not ' if is_negated else ''}{word}")
            score += 1 if is_good != is_negated else -1
        rows.append((" and ".join(claims), int(score > 0)))
    return spark.createDataFrame(rows, "text string, label int")


def with_ids(reviews: DataFrame, vocabulary: list[str]) -> DataFrame:
    """Adds ids: LENGTH numbers for each row, 0 where there is no (known) word."""
    number_of = F.create_map(*(F.lit(x) for i, word in enumerate(vocabulary) for x in (word, i + 1)))
    words = F.split(F.lower("text"), " ")
    found = F.transform(words, lambda word: F.coalesce(number_of[word], F.lit(0)))
    filled = F.concat(found, F.array_repeat(F.lit(0), LENGTH))
    return reviews.withColumn("ids", F.slice(filled, 1, LENGTH))


class Reader(nn.Module):
    """ids (B, LENGTH) to one logit each: the best word pair of each of 32 kinds decides."""

    def __init__(self, words: int, width: int = 16):
        super().__init__()
        self.embedding = nn.Embedding(words + 1, width, padding_idx=0)
        self.pairs = nn.Conv1d(width, 32, kernel_size=2)
        self.head = nn.Linear(32, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        pairs = self.pairs(self.embedding(ids).transpose(1, 2)).relu()
        return self.head(pairs.sum(dim=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    epochs = parser.parse_args().epochs
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", False)
    spark = builder.config("spark.ui.showConsoleProgress", False).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    train, test = reviews(spark).randomSplit([0.8, 0.2], seed=3)

    words = Tokenizer(inputCol="text", outputCol="words")
    counts = CountVectorizer(inputCol="words", outputCol="features")
    baseline = Pipeline(stages=[words, counts, LogisticRegression()]).fit(train)  # has learnt the words, too
    vocabulary = baseline.stages[1].vocabulary

    torch.manual_seed(3)
    reader = HorovodEstimator(
        model=Reader(len(vocabulary)), optimizer=lambda parameters: torch.optim.Adam(parameters, 5e-3),
        loss=nn.BCEWithLogitsLoss(), feature_cols=["ids"], label_cols=["label"], threshold=0.5,
        num_proc=2, batch_size=32, epochs=epochs, seed=3,
    ).fit(with_ids(train, vocabulary))  # fmt: skip

    accuracy = MulticlassClassificationEvaluator(metricName="accuracy")
    scored = reader.transform(with_ids(test, vocabulary))
    print(f"right, of {test.count()} reviews that were not seen:")
    print(f"  logistic regression on word counts  {accuracy.evaluate(baseline.transform(test)):.1%}")
    print(f"  hvd, embedding and word pairs       {accuracy.evaluate(scored):.1%}")
    scored.select("text", "label", "prediction").show(5, truncate=90)
    spark.stop()


if __name__ == "__main__":
    main()
