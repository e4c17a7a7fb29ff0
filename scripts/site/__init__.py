"""The pages of this repository as a site (`make docs`), from the same files that are read beside the code.

`pages` says which files are pages and in which order, `keys`, `recipes` and `notebooks` make pages of what is no page,
and `hooks` hands all of it to MkDocs. Pages keep their places, `docs/README.md` and `bench/results/…`, so that a link
that works in the repository works in the site.
"""
