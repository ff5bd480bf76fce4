"""S7: a driver that an unpacked Spark's `spark-submit` starts, on a Python that has no pyspark of its own."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def main() -> None:
    import pyspark

    import hvd_spark
    from tests.spark import cluster_job, jobs

    pip = any(dist.metadata["Name"] == "pyspark" for dist in importlib.metadata.distributions())
    spark = cluster_job.session("local[2]")
    try:
        got = hvd_spark.run(jobs.reduce_rank, num_proc=2)
        df = cluster_job.cluster_frame(spark)
        model = cluster_job.estimator(epochs=1).fit(df)
        rows = model.transform(df).count()
    finally:
        spark.stop()
    cluster_job.tell(case="home", where=pyspark.__file__, pip=pip, got=got, rows=rows, python=sys.executable)


if __name__ == "__main__":
    main()
