"""The life of one run: it is put together, fitted, watched, saved and reported."""
