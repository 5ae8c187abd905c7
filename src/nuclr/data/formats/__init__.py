"""One file per format of pairs on disk; `arrow` reads Parquet files and Hugging Face datasets."""
