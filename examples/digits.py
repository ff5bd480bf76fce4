"""Handwritten digits, twice: images as PNG files in a binary column, and as arrays of numbers.

    python examples/digits.py [--epochs 8]

Image files stay compressed in the DataFrame: `transform_fn` decodes them on the workers, a batch at a time,
and goes with the model wherever it predicts. Both ways give the net the same pixels, so (with rows dealt by
their content, `row_order="global"`) both end with the same net. The 1797 images of 8x8 pixels come with
scikit-learn; Spark's logistic regression on the pixels is what a convolution has to beat.
"""

from __future__ import annotations

import argparse
import io

import numpy as np
import torch
from PIL import Image
from pyspark.ml.classification import LogisticRegression
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.functions import array_to_vector
from pyspark.sql import DataFrame, SparkSession
from sklearn.datasets import load_digits
from torch import nn

from hvd_spark import HorovodEstimator


def digits(spark: SparkSession) -> DataFrame:
    """Columns png (binary), pixels (64 numbers from 0 to 16), digit (0 to 9)."""
    rows = []
    for image, digit in zip(*load_digits(return_X_y=True), strict=True):
        file = io.BytesIO()
        Image.fromarray(image.reshape(8, 8).astype(np.uint8)).save(file, format="PNG")
        rows.append((bytearray(file.getvalue()), image.tolist(), int(digit)))
    return spark.createDataFrame(rows, "png binary, pixels array<float>, digit int").cache()


def decode(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Runs on the workers: files in, an array (rows, 1, 8, 8) out."""
    images = [np.asarray(Image.open(io.BytesIO(file)), np.float32) for file in batch["png"]]
    return {"image": np.stack(images)[:, None]}


class Net(nn.Module):
    """Two convolutions and a linear layer; 10 logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 4 * 4, 10),
        )  # fmt: skip

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.layers(image / 16)


def estimator(epochs: int, **columns: object) -> HorovodEstimator:
    torch.manual_seed(1)  # for the first weights
    return HorovodEstimator(
        model=Net(), optimizer=lambda parameters: torch.optim.Adam(parameters, 2e-3),
        loss=nn.CrossEntropyLoss(), label_cols=["digit"], num_proc=2, batch_size=16, epochs=epochs,
        validation=0.1, metrics={"accuracy": lambda logits, digit: (logits.argmax(1) == digit).float()},
        row_order="global", seed=1, **columns,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    epochs = parser.parse_args().epochs
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", False)
    spark = builder.config("spark.ui.showConsoleProgress", False).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    train, test = digits(spark).randomSplit([0.8, 0.2], seed=1)
    measure = MulticlassClassificationEvaluator(labelCol="digit", metricName="accuracy")

    as_vectors = [frame.withColumn("features", array_to_vector("pixels")) for frame in (train, test)]
    linear = LogisticRegression(labelCol="digit", regParam=0.01).fit(as_vectors[0])
    print(f"right, of {test.count()} images that were not seen:")
    print(f"  logistic regression  {measure.evaluate(linear.transform(as_vectors[1])):.1%}")
    ways = {
        "hvd, PNG files": estimator(
            epochs, feature_cols=["image"], transform_fn=decode, transform_cols=["png"]
        ),
        "hvd, arrays": estimator(epochs, feature_cols=["pixels"], shapes={"pixels": (1, 8, 8)}),
    }
    for name, way in ways.items():
        model = way.fit(train)
        print(f"  {name:<20} {measure.evaluate(model.transform(test)):.1%}")
    model.transform(test).select("digit", "prediction", "probability").show(5, truncate=60)
    spark.stop()


if __name__ == "__main__":
    main()
