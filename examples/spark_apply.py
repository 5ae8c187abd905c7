"""Apply a popularity correction to a folder of Parquet files with Spark.

    pip install '.[engines]'
    python examples/spark_apply.py FIX.safetensors GALLERY OUT [COLUMN]

FIX is what `nuclr hubness` or `PopularityCorrection.save` has written, and COLUMN ("embedding") holds the vectors. OUT
gets the same rows with a column `bias`: rank by the score minus it. On a cluster, start it with
`spark-submit --files FIX.safetensors`, and nuclr installed on all machines.
"""

import sys
from collections.abc import Iterator

import numpy as np
import pandas as pd
import torch
from pyspark import SparkFiles
from pyspark.sql import SparkSession
from pyspark.sql.functions import pandas_udf

from nuclr.popularity import PopularityCorrection

BATCH = 8192  # rows at a time: 25 MB at a width of 768


def main() -> None:
    path, gallery, out, column = [*sys.argv[1:], "embedding"][:4]
    settings = {"spark.sql.execution.arrow.maxRecordsPerBatch": BATCH}
    spark = SparkSession.builder.appName("nuclr").config(map=settings).getOrCreate()
    spark.sparkContext.addFile(path)
    name = path.rpartition("/")[2]

    @pandas_udf("float")
    def bias(batches: Iterator[pd.Series]) -> Iterator[pd.Series]:
        torch.set_num_threads(1)  # Spark starts a process per core
        fix = PopularityCorrection.load(SparkFiles.get(name))
        for vectors in batches:
            # With center=True, each batch would have a constant of its own.
            yield pd.Series(fix.bias(np.stack(vectors), center=False).numpy())

    spark.read.parquet(gallery).withColumn("bias", bias(column)).write.parquet(out)


if __name__ == "__main__":
    main()
