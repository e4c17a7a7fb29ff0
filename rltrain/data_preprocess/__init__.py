"""Converters to verl's parquet schema, one per data set: ``python -m rltrain.data_preprocess.NAME --help``."""

import sys

# data_preprocess/ at the top of a checkout is a symlink for readers. Converters may be run through it as programs, but
# an import through it would create a second copy of every class.
if __name__ != "rltrain.data_preprocess" and sys.argv[0] != "-m":
    raise ImportError(
        "import rltrain.data_preprocess: importing through the symlink would create a second copy of every class"
    )
