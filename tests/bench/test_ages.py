"""Prints how far each table of the benches is behind the library: a figure is true of what it was made with."""

from bench import ages


def test_every_table_has_an_age(capsys):
    ages.main()
    said = capsys.readouterr().out
    with capsys.disabled():
        print(said)
    found = ages.ages()
    tables = {table.name for table in (ages.ROOT / "bench/results").glob("*.md")}
    assert {age.table for age in found} <= tables
    if found:
        assert f"{found[0].table:28} {found[0].day}  {found[0].commits:4} commits to rltrain/ since" in said
        assert found == sorted(found, key=lambda age: -age.commits)
