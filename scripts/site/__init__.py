"""The documentation site of this repository (`make docs`), from the files that are also read in the repository.

`pages` lists the pages in their order, `keys`, `recipes` and `notebooks` generate pages from other files, and `hooks`
passes them to MkDocs. Pages keep their paths, `docs/README.md` and `bench/results/…`, so that a link that works in the
repository works on the site.
"""
