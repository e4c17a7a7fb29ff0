"""Converters to verl's parquet schema, one per data set: ``python -m rltrain.data_preprocess.NAME --help``."""
