"""report.html shows the contents of a run folder, and needs no other file."""

import base64
import io
import json
import re

import pandas as pd
import pytest
import yaml

from rltrain.config.load import load_config, to_dict
from rltrain.run.report.page import page_of, write_page
from rltrain.tools.report import main

SCRIPT = "<script>alert(1)</script>"


def write_lines(file, lines):
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def line(step, **more):
    scores = {"critic/score/mean": 0.5 + step / 5000, "critic/score/sem": 0.02, "actor/grad_norm": 1 / step}
    times = {f"timing_s/{name}": 1.0 for name in ("gen", "reward", "old_log_prob", "ref", "adv", "update_actor")}
    return {"step": step, **scores, **times, "timing_s/step": 6.5, "response_length/max": 40 + step, **more}


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    (folder / "samples").mkdir(parents=True)
    write_lines(folder / "metrics.jsonl", [line(step) for step in range(1, 7)])
    settings = to_dict(load_config(["data.train_files=a.parquet", "data.seed=7"]).config)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    (folder / "env.json").write_text(json.dumps({"torch": "2.13.0", "devices": [], "host": SCRIPT}))
    (folder / "train.log").write_text(
        "2026-01-01 00:00:00,000 all is well\n"
        "2026-01-01 00:00:01,000 warning: the disk is slow\n2026-01-01 00:00:02,000 warning: the disk is slow\n"
    )
    row = {"step": 6, "row": 0, "sample": 0, "data_source": "d", "question": "1+1=?", "prompt": "1+1=?",
           "ground_truth": "2", "answer": f"two {SCRIPT}", "score": 0.0, "finish_reason": "stop"}  # fmt: skip
    pd.DataFrame([row, row | {"answer": "2", "score": 1.0}]).to_parquet(folder / "samples" / "train_000006.parquet")
    return folder


def shown(page):
    """Return the page without its scripts."""
    return re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)


def test_a_page_opens_offline_and_shows_what_the_run_has(run):
    page = write_page(run).read_text()
    # Whatever would be fetched has an address in one of these.
    assert not re.findall(r"<(?:script|img|link|iframe)[^>]*(?:src|href)=\"(?!data:)", page)
    assert "@import" not in shown(page)
    words = shown(page)
    for word in ("Learning", "Lengths of answers", "Time", "Seconds of a step", "Answers", "Warnings"):
        assert f"<h2>{word}</h2>" in words
    assert "the disk is slow</td><td>2</td>" in words
    assert "all is well" not in words
    assert re.search(r"data.seed</td><td>7</td><td>\w+</td>", words)
    assert "data.shuffle" not in words  # it is the default


def test_what_a_model_or_a_machine_says_is_text_and_no_script(run):
    page = page_of(run)
    assert SCRIPT not in page
    assert "two &lt;script&gt;" in shown(page)


def test_a_run_that_has_metrics_alone_has_a_page_and_a_folder_that_is_none_a_sentence(tmp_path, run, capsys):
    for name in ("config.yaml", "env.json", "train.log", "samples/train_000006.parquet"):
        (run / name).unlink()
    assert main([str(run), "--html", str(tmp_path / "elsewhere.html")]) == 0
    assert capsys.readouterr().out == f"written: {tmp_path / 'elsewhere.html'}\n"
    assert "<h2>Learning</h2>" in (tmp_path / "elsewhere.html").read_text()
    for folder, said in ((tmp_path / "none", "is not a folder"), (tmp_path, "metrics.jsonl does not exist")):
        assert main([str(folder), "--html"]) == 2
        assert said in capsys.readouterr().err
    # A step that was cut off in the middle of its first line leaves none.
    (run / "metrics.jsonl").write_text('{"step": 1, "cri')
    assert "0" in page_of(run)


def test_pictures_of_prompts_are_shown_small(tmp_path, run):
    from PIL import Image

    Image.new("RGB", (1000, 500), "red").save(picture := tmp_path / "red.png")
    table = pd.DataFrame({"images": [[{"bytes": picture.read_bytes()}]]})
    table.to_parquet(tmp_path / "data.parquet")
    file = run / "samples" / "train_000006.parquet"
    rows = pd.read_parquet(file)
    rows.assign(images=f"'{tmp_path / 'data.parquet'}' row 0", num_images=1).to_parquet(file)
    found = re.search(r'<img[^>]*src="data:image/jpeg;base64,([^"]*)"', page_of(run))
    assert Image.open(io.BytesIO(base64.b64decode(found[1]))).size == (320, 160)
    (tmp_path / "data.parquet").unlink()
    assert "<img" not in page_of(run)
