"""Search in a corpus: results and their format, hostile queries, and an index shared by many processes."""

import gzip
import json
import multiprocessing
import os
import shlex
import sqlite3

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rltrain.agents.ready.search import Search, index_of, main
from rltrain.common.errors import DataError

PASSAGES = [
    ("Paris", "Paris is the capital of France, on the Seine."),
    ("Berlin", "Berlin is the capital of Germany, on the Spree."),
    ("Seine", "The Seine is a river of France that flows through Paris to the Channel."),
    ("Caf\u00e9", 'A caf\u00e9 sells coffee; "NEAR" and AND are words of a query language.'),
    ("\u6771\u4eac", "\u6771\u4eac\u306f\u65e5\u672c\u306e\u9996\u90fd\u3067\u3059"),
]


@pytest.fixture
def corpus(tmp_path):
    file = tmp_path / "corpus.jsonl"
    rows = [{"id": str(i), "contents": f'"{title}"\n{text}'} for i, (title, text) in enumerate(PASSAGES)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_passages_are_written_as_search_r1_writes_them(corpus):
    assert Search(str(corpus), topk=1).search("Which river flows through Paris?") == (
        "Doc 1(Title: Seine) The Seine is a river of France that flows through Paris to the Channel."
    )
    two = Search(str(corpus), topk=2).search("capital of Germany").splitlines()
    assert [line.partition(")")[0] for line in two] == ["Doc 1(Title: Berlin", "Doc 2(Title: Paris"]


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("", "has no words"),
        ("\x00 \ud800", "has no words"),
        ("zebra", "No passage has these words."),
        ('NEAR("x" AND', "Title: Caf\u00e9"),
        ("title: text: -rowid ^berlin*", "Title: Berlin"),
        ('"; DROP TABLE passages; --', "No passage"),
        ("seine " * 100_000, "Title: Seine"),
        (None, "No passage"),
    ],
)
def test_no_query_is_read_as_a_language(corpus, query, words):
    assert words in Search(str(corpus)).search(query)


@given(st.text(max_size=80))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_query_raises(corpus, query):
    assert isinstance(Search(str(corpus)).search(query), str)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no passages"),
        ("{\n", "line 1 is not JSON"),
        ('{"contents": "a\\nb"}\n{"id": 1}\n', "row 1 is not a passage"),
        ("3\n", "row 0 is not a passage"),
    ],
)
def test_invalid_corpus_is_rejected_without_an_index(tmp_path, text, words):
    (tmp_path / "bad.jsonl").write_text(text)
    with pytest.raises(DataError, match=words):
        Search(str(tmp_path / "bad.jsonl"))
    assert not list((tmp_path / ".rltrain").glob("*.sqlite*"))
    with pytest.raises(DataError, match="the file does not exist"):
        Search(str(tmp_path / "none.jsonl"))
    (tmp_path / "bad.parquet").write_text("PAR")
    (tmp_path / "bad.jsonl.gz").write_text("{}")
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "caf\xe9"}')
    for name in ("bad.parquet", "bad.jsonl.gz", "latin.jsonl"):
        with pytest.raises(DataError, match=f"{name} cannot be read"):
            Search(str(tmp_path / name))


def _indexed(corpus, barrier, names):
    barrier.wait()
    names.put(str(index_of(corpus)))


def test_processes_that_come_at_once_share_one_index(tmp_path):
    corpus = tmp_path / "many.jsonl"
    corpus.write_text("".join(json.dumps({"title": str(i), "text": f"word{i} " * 50}) + "\n" for i in range(5000)))
    context = multiprocessing.get_context("spawn")
    barrier, names = context.Barrier(3), context.Queue()
    processes = [context.Process(target=_indexed, args=(str(corpus), barrier, names)) for _ in range(3)]
    for process in processes:
        process.start()
    told = {names.get(timeout=60) for _ in processes}
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert len(told) == 1
    (index,) = (tmp_path / ".rltrain").glob("*.sqlite*")
    assert str(index) in told
    assert "Title: 4321)" in Search(str(corpus), topk=1).search("word4321")


def test_an_index_belongs_to_the_content(corpus, tmp_path):
    first = index_of(str(corpus))
    os.utime(corpus, ns=(1, 1))
    assert index_of(str(corpus)) == first
    corpus.write_text(json.dumps({"title": "New", "text": "zebra"}) + "\n")
    assert "Title: New" in Search(str(corpus)).search("zebra")
    assert len(list((tmp_path / ".rltrain").glob("*.sqlite"))) == 2


def test_the_index_is_only_read(corpus):
    found = Search(str(corpus))
    index = index_of(str(corpus))
    index.chmod(0o444)
    before = index.read_bytes()
    assert "Berlin" in found.search("Spree")
    assert index.read_bytes() == before
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        sqlite3.connect(f"{index.as_uri()}?mode=ro&immutable=1", uri=True).execute("DELETE FROM passages")


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.jsonl.gz"])
def test_no_trajectory_builds_the_index_of_a_large_corpus(corpus, tmp_path, name):
    (tmp_path / "corpus.jsonl.gz").write_bytes(gzip.compress(corpus.read_bytes()))
    file = tmp_path / name
    with pytest.raises(DataError, match=r"has no index yet. Build it before the run, .*ready\.search") as refusal:
        index_of(str(file), most=file.stat().st_size - 1)
    command = shlex.split(str(refusal.value).partition(": ")[2])
    assert command[:3] == ["python", "-m", "rltrain.agents.ready.search"]
    assert main(command[3:]) == 0
    assert index_of(str(file), most=0)
    assert "Berlin" in Search(str(file)).search("Spree")


def test_an_index_can_be_built_before_a_run(corpus, tmp_path, capsys):
    assert main([str(corpus), "--folder", str(tmp_path / "kept"), "--query", "Spree"]) == 0
    place, found = capsys.readouterr().out.splitlines()
    assert place.startswith(str(tmp_path / "kept" / "search-"))
    assert found.startswith("Doc 1(Title: Berlin)")
    assert main([str(tmp_path / "none.jsonl")]) == 2
    assert capsys.readouterr().err.startswith("error: corpus=")
