"""What the rows of a DataFrame look like, before they are trained on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import types as T

from hvd_core.train.quality import ColumnReport
from hvd_core.train.quality import examine as examine_rows

from . import preflight, session

_SCHEMA = T.StructType([T.StructField("report", T.StringType(), False)])


def examine(frame: DataFrame, columns: Sequence[str] | None = None) -> list[ColumnReport]:
    """Nulls, NaN, infinities and the range of each column (None: of all), for each partition, whose number
    stands for the rank; a job. A fit says the same of its own ranks in `model.summary.data`.

        for report in hvd_spark.examine(df):
            print(report)
    """
    preflight.check_frame(frame)
    preflight.check_finite(frame)
    preflight.check_interpreter(frame.sparkSession)
    names = list(frame.columns if columns is None else columns)
    neutral = {name: f"c{i}" for i, name in enumerate(frame.columns)}
    chosen = frame.toDF(*neutral.values()).select(*(neutral[name] for name in names))

    def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from _reports(names, batches)

    rows = session.map_in_arrow(chosen, look, _SCHEMA, barrier=False).collect()
    found = [ColumnReport(**json.loads(row.report)) for row in rows]
    return sorted(found, key=lambda report: (names.index(report.column), report.rank))


def _reports(names: list[str], batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    from pyspark import TaskContext

    context = TaskContext.get()
    named = (pa.RecordBatch.from_arrays(batch.columns, names=names) for batch in batches)
    reports = examine_rows(named, rank=context.partitionId() if context is not None else 0)
    lines = pa.array([json.dumps(asdict(report)) for report in reports], pa.string())
    yield pa.RecordBatch.from_arrays([lines], names=["report"])
