"""Search in a corpus by words (BM25), with an index on disk: sqlite's FTS5, which needs no server or package.

The first process builds the index of a corpus, and the others wait for it. It is named by a hash of the corpus, is
created atomically, and is read-only afterwards for any number of processes.
"""

import argparse
import fcntl
import gzip
import json
import os
import re
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import xxhash

from rltrain.common.errors import DataError, command
from rltrain.common.storage import bounded_lines
from rltrain.runtime.slots.limits import current_limits

_LAYOUT = "2"  # of an index; indexes of other versions are rebuilt
_READ_BYTES = 1 << 22
# Maximum corpus size for an index that a trajectory builds: it takes seconds, and a call has a deadline.
_MAX_BUILT_BYTES = 64 << 20
_UNPACKED = {".gz": 4, ".parquet": 4}  # approximate text bytes per byte of the file
_BATCH, _MAX_LINE_BYTES = 2000, 64 << 20
# Maximum words of a query; a longer one would match most of the corpus.
_MAX_QUERY_CHARS, _MAX_WORDS = 1000, 32
# Approximate limit of passages that a search ranks, at a microsecond each. If a query matches more, its most common
# words are removed until two are left. Frequencies are stored for words in more than _NOTED passages.
_MAX_RANKED, _NOTED = 2_000_000, 1000
# Steps of sqlite between two checks of the clock, and the share of a call's deadline that a search may take.
_STEPS, _SHARE_OF_DEADLINE = 100_000, 0.8
_WORD = re.compile(r"\w+")
_NOT_BUILT = (
    "corpus={0} is large and has no index yet. Build it before the run, which takes a while: "
    "python -m rltrain.agents.ready.search {0} --tokenizer '{1}' --folder {2}"
)
# Stop words are removed from a query, because nearly all passages contain them: they do not distinguish passages, and
# ranking all passages takes time.
_COMMON = frozenset(
    _WORD.findall(
        "a an and are as at be been by did do does for from had has have he her his how i in is it its of on or she "
        "that the their they this to was were what when where which who whom whose why will with"
    )
)


class Search:
    """A tool ``search`` over the passages of a file.

    Args:
        corpus: jsonl (also .gz) or parquet; a row has ``contents`` (its first line is the title), or ``title`` and
            ``text``.
        topk: Passages that a search returns.
        tokenizer: Tokenizer of FTS5; ``trigram`` for texts without spaces between words.
        folder: Folder of the indexes; default: ``.rltrain`` next to the corpus.

    Raises DataError if the corpus cannot be read, or is large and has no index yet.
    """

    def __init__(
        self, corpus: str, topk: int = 3, tokenizer: str = "porter unicode61", folder: str | None = None
    ) -> None:
        self._index = index_of(corpus, tokenizer, folder, _MAX_BUILT_BYTES)
        self._topk, self._tokenizer = topk, tokenizer

    def search(self, query: str) -> str:
        """Search for passages by words.

        Args:
            query: What to look for.
        """
        words = _words(str(query))
        if not words:
            return "Error: the query has no words."
        try:
            passages = _search(self._index, words, self._topk, self._tokenizer)
        except sqlite3.OperationalError as error:
            if "interrupted" not in str(error):
                raise
            return "Error: the search took too long. Use fewer or rarer words."
        return "\n".join(f"Doc {rank}(Title: {title}) {text}" for rank, (title, text) in enumerate(passages, 1)) or (
            "No passage has these words."
        )


def index_of(
    corpus: str, tokenizer: str = "porter unicode61", folder: str | None = None, most: int | None = None
) -> Path:
    """Return the index of a corpus; build it if it does not exist.

    most: maximum bytes of text to build an index of. Raises DataError for a larger corpus, and for an unreadable one.
    """
    path = Path(corpus).expanduser().absolute()
    if not path.is_file():
        raise DataError(f"corpus={corpus}: the file does not exist. Give a jsonl or parquet file of passages.")
    status = path.stat()
    may_build = most is None or status.st_size * _UNPACKED.get(path.suffix, 1) <= most
    return _index_of(path, (status.st_size, status.st_mtime_ns), tokenizer, folder, may_build)


# The index is cached, because a process creates many instances.
@cache
def _index_of(path: Path, changed: tuple[int, int], tokenizer: str, folder: str | None, may_build: bool) -> Path:
    indexes = Path(folder).expanduser() if folder else path.parent / ".rltrain"
    record_file = indexes / f"search-{xxhash.xxh64_hexdigest(f'{path} {tokenizer}'.encode())}.json"
    # Nothing is written if the index exists, so that the folder may be read-only.
    if (digest := _stored_digest(record_file, changed)) and _index(indexes, digest).exists():
        return _index(indexes, digest)
    try:
        indexes.mkdir(parents=True, exist_ok=True)
        with (indexes / "search.lock").open("a", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the process that holds the lock ends
            digest = _stored_digest(record_file, changed) or _digest(path, tokenizer)
            record_file.write_text(json.dumps([*changed, digest]), "utf-8")
            if not _index(indexes, digest).exists():
                if not may_build:
                    raise DataError(_NOT_BUILT.format(path, tokenizer, indexes))
                _build(path, _index(indexes, digest), tokenizer)
            return _index(indexes, digest)
    except (OSError, sqlite3.Error) as error:
        raise DataError(
            f"the index of corpus={path} cannot be stored in {indexes}: {error}. Give another folder with folder=…"
        ) from error


def _index(indexes: Path, digest: str) -> Path:
    return indexes / f"search-{digest}.sqlite"


def _stored_digest(record_file: Path, changed: tuple[int, int]) -> str | None:
    """Return the stored digest of a corpus if the file is unchanged: hashing many gigabytes takes a while."""
    with suppress(OSError, ValueError):
        *earlier, digest = json.loads(record_file.read_text("utf-8"))
        if tuple(earlier) == changed:
            return str(digest)
    return None


def _digest(path: Path, tokenizer: str) -> str:
    digest = xxhash.xxh3_128(f"{_LAYOUT} {tokenizer} {path.suffix}".encode())
    with path.open("rb") as stream:
        while block := stream.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _build(path: Path, index: Path, tokenizer: str) -> None:
    partial = index.with_suffix(f".{os.getpid()}")
    try:
        _write(path, partial, tokenizer)
        os.replace(partial, index)
    finally:
        partial.unlink(missing_ok=True)


def _write(path: Path, index: Path, tokenizer: str) -> None:
    with closing(sqlite3.connect(index)) as database:
        # The database is written without syncs, because a crash can only lose an unfinished index.
        database.execute("PRAGMA journal_mode=OFF")
        database.execute("PRAGMA synchronous=OFF")
        try:
            database.execute(f"CREATE VIRTUAL TABLE passages USING fts5(title, text, {_option(tokenizer)})")
        except sqlite3.OperationalError as error:
            raise DataError(f"tokenizer={tokenizer!r}: sqlite {sqlite3.sqlite_version} says {error}.") from error
        database.executemany("INSERT INTO passages VALUES (?, ?)", _passages(path))
        database.execute("INSERT INTO passages(passages) VALUES ('optimize')")
        database.execute("CREATE VIRTUAL TABLE temp.terms USING fts5vocab(main, passages, row)")
        database.execute("CREATE TABLE common (term TEXT PRIMARY KEY, number INTEGER) WITHOUT ROWID")
        database.execute("INSERT INTO common SELECT term, doc FROM temp.terms WHERE doc > ?", (_NOTED,))
        database.commit()


def _passages(path: Path) -> Iterator[tuple[str, str]]:
    number = 0
    for number, record in enumerate(_records(path), 1):
        text, title = (record.get(name) for name in ("text", "title")) if isinstance(record, dict) else (None, None)
        contents = record.get("contents") if isinstance(record, dict) else None
        if isinstance(contents, str):
            title, _, text = contents.partition("\n")
        if not isinstance(text, str):
            raise DataError(
                f"{path}: row {number - 1} is not a passage. A row has 'contents' (its first line is the title), or "
                "'title' and 'text'."
            )
        yield _plain(title or ""), _plain(text)
    if not number:
        raise DataError(f"{path} has no passages.")


def _records(path: Path) -> Iterator[Any]:
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            for batch in pq.ParquetFile(path).iter_batches(_BATCH):
                yield from batch.to_pylist()
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{path} cannot be read as parquet: {error}") from error
        return
    opener: Any = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opener(path, "rb") as file:
            for line in bounded_lines(file, _MAX_LINE_BYTES):
                number += 1
                yield json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}: line {number} is not JSON: {error}") from error
    except (OSError, EOFError, UnicodeDecodeError, DataError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _plain(text: Any) -> str:
    """Return a text that sqlite can store: a lone surrogate becomes a question mark."""
    return str(text).strip().strip('"').encode(errors="replace").decode()


def _words(query: str) -> list[str]:
    words = list(dict.fromkeys(_WORD.findall(query[:_MAX_QUERY_CHARS].lower())))
    return ([word for word in words if word not in _COMMON] or words)[:_MAX_WORDS]


def _search(index: Path, words: list[str], most: int, tokenizer: str) -> list[tuple[str, str]]:
    # Inside quotes, FTS5 parses no syntax. Each search opens a connection, because methods of an instance may run in
    # several threads, and opening takes a fraction of a millisecond.
    deadline = time.monotonic() + _SHARE_OF_DEADLINE * current_limits().timeout_s
    with closing(sqlite3.connect(f"{index.as_uri()}?mode=ro&immutable=1", uri=True)) as database:
        database.set_progress_handler(lambda: time.monotonic() > deadline, _STEPS)
        query = " OR ".join(f'"{word}"' for word in _rarest_words(database, words, tokenizer))
        return database.execute(
            "SELECT title, text FROM passages WHERE passages MATCH ? ORDER BY rank, rowid LIMIT ?", (query, most)
        ).fetchall()


def _rarest_words(database: sqlite3.Connection, words: list[str], tokenizer: str) -> list[str]:
    """Return the rarest words of a query, as many as can be ranked in time."""
    # The words are inserted into a temporary table, because only FTS5 can tokenise them as in its index.
    database.execute(f"CREATE VIRTUAL TABLE temp.words USING fts5(word, {_option(tokenizer)})")
    database.executemany("INSERT INTO temp.words(rowid, word) VALUES (?, ?)", enumerate(words))
    database.execute("CREATE VIRTUAL TABLE temp.terms USING fts5vocab(temp, words, instance)")
    numbers = dict(
        database.execute(
            "SELECT doc, MIN(COALESCE(number, 0)) FROM temp.terms LEFT JOIN main.common USING (term) GROUP BY doc"
        )
    )
    rarest = sorted(range(len(words)), key=lambda place: numbers.get(place, 0))
    sums = accumulate(numbers.get(place, 0) for place in rarest)
    ranked = enumerate(zip(rarest, sums, strict=True))
    return [words[place] for rank, (place, total) in ranked if rank < 2 or total <= _MAX_RANKED]


def _option(tokenizer: str) -> str:
    quoted = tokenizer.replace("'", "''")
    return f"tokenize='{quoted}'"


@command
def main(argv: list[str] | None = None) -> int:
    """Build an index before a run, because for millions of passages this takes longer than a tool call may."""
    parser = argparse.ArgumentParser(description=main.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("corpus", help="jsonl (also .gz) or parquet, with contents, or title and text")
    parser.add_argument("--tokenizer", default="porter unicode61", help="FTS5's; as in the run")
    parser.add_argument("--folder", help="where to keep it; default: .rltrain next to the corpus")
    parser.add_argument("--query", help="search for this afterwards")
    options = parser.parse_args(argv)
    sys.stdout.write(f"{index_of(options.corpus, options.tokenizer, options.folder)}\n")
    if options.query:
        sys.stdout.write(Search(options.corpus, 3, options.tokenizer, options.folder).search(options.query) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
