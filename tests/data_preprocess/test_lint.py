import sys
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rltrain.data.chat import ChatEncoder
from rltrain.data_preprocess import lint as linter
from rltrain.data_preprocess.common import row, write_splits
from rltrain.data_preprocess.lint import lint, main
from rltrain.rewards.custom import CustomReward
from tests.images import BLUE, RED
from tests.tiny import TEMPLATE, save_tiny_tokenizer

# Scores as in the vision scripts: most of it for the answer, the rest for a thinking block at the start.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if data_source == "slow":
        while True:
            pass
    return 0.9 * ("boxed{" + str(ground_truth) + "}" in solution_str) + 0.1 * solution_str.startswith("<think>")
"""


def sum_row(number, truth=None, **changes):
    made = row("rltrain/arithmetic", f"{number}+1=?", str(truth or number + 1), ability="math", split="train", index=0)
    return made | changes


def picture_row(text, images, truth="3"):
    return row("openai/gsm8k", text, truth, ability="math", split="train", index=0, images=images)


def answered(source, truth, **more):
    return row(source, f"{truth}?", truth, ability="math", split="train", index=0, **more)


def write(folder, rows, name="train"):
    return str(write_splits(folder, {name: rows})[name])


@pytest.fixture
def custom(tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    return CustomReward(str(tmp_path / "reward.py"))


@pytest.fixture
def encoder(tmp_path):
    save_tiny_tokenizer(tmp_path / "model")
    return ChatEncoder(str(tmp_path / "model"))


def test_every_bad_row_is_counted_and_the_first_few_are_shown(tmp_path, capsys):
    rows = [sum_row(i, data_source=None if i % 2 else "rltrain/arithmetic") for i in range(12)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "bad.parquet")
    (tmp_path / "text.parquet").write_text("hello")
    assert main([str(tmp_path / "bad.parquet"), str(tmp_path / "text.parquet")]) == 2
    shown = capsys.readouterr().out
    assert "rows with schema errors: 6\n" in shown
    assert [f"row {i}:" in shown for i in (1, 3, 5, 7)] == [True, True, True, False]
    assert "… and 3 more" in shown
    assert "files that cannot be read: 1\n" in shown
    assert shown.endswith("6 usable rows, 7 problems\n")


def test_a_column_that_exists_twice_is_named_with_its_file(tmp_path, capsys):
    table = pa.Table.from_pylist([sum_row(1)])
    twice = pa.Table.from_arrays([*table.columns, table["prompt"]], names=[*table.column_names, "prompt"])
    pq.write_table(twice, file := tmp_path / "twice.parquet")
    assert main([str(file)]) == 2
    assert f"'{file}' has 2 columns named 'prompt'." in capsys.readouterr().out


def test_duplicates_are_seen_across_files_by_text_and_picture(tmp_path):
    train = write(tmp_path, [sum_row(1), sum_row(2), sum_row(1)])
    test = write(tmp_path, [sum_row(2), sum_row(3)], "test")
    red, blue = ({"bytes": data, "path": None} for data in (RED, BLUE))
    pictures = write(tmp_path, [picture_row("<image> Find x.", [image]) for image in (red, blue, red)], "pictures")
    _, findings = lint([train, test, pictures])
    assert findings == {
        "repeated prompts": [
            f"{train!r} row 2: as {train!r} row 0",
            f"{test!r} row 0: as {train!r} row 1",
            f"{pictures!r} row 2: as {pictures!r} row 0",
        ]
    }


def test_prompts_over_the_limit_are_named_with_their_length(tmp_path, encoder, capsys):
    file = write(tmp_path, [sum_row(1), sum_row(123456789)])
    limit = len(encoder.encode([{"role": "user", "content": "1+1=?"}]))
    _, findings = lint([file], encoder=encoder, max_prompt_length=limit)
    assert findings == {"prompts over the limit": [f"{file!r} row 1: {limit + 8} tokens, limit {limit}"]}
    with pytest.raises(SystemExit):
        main([file, "--max-prompt-length", "5"])
    assert "--tokenizer FOLDER" in capsys.readouterr().err


def test_image_slots_and_images_must_agree(tmp_path):
    image = {"bytes": RED, "path": None}
    texts = {"<image> one": [image], "two": [image], "<image><image> three": [image], "<image> four": []}
    rows = [picture_row(text, images) for text, images in texts.items()]
    file = write(tmp_path, rows)
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "What?"}]
    given = rows[0] | {"prompt": [{"role": "user", "content": parts}]}
    pq.write_table(pa.Table.from_pylist([given]), tmp_path / "parts.parquet")
    assert lint([str(tmp_path / "parts.parquet")])[1] == {}
    found = lint([file])[1]["image slots that do not match the images"]
    said = [line.partition("row ")[2].split(" in")[0] for line in found]
    assert said == ["1: 0 <image>", "2: 2 <image>", "3: 1 <image>"]


@pytest.mark.parametrize("has_pil", [True, False])
def test_unreadable_images_are_named_with_and_without_pil(tmp_path, monkeypatch, has_pil):
    if has_pil:
        pytest.importorskip("PIL")
    else:
        monkeypatch.setitem(sys.modules, "PIL", None)
    (tmp_path / "there.png").write_bytes(BLUE)
    given = [(data, None) for data in (RED, b"no picture", RED[:45])]
    given += [(None, str(tmp_path / name)) for name in ("there.png", "gone.png")] + [(None, None)]
    images = [{"bytes": data, "path": path} for data, path in given]
    rows = [picture_row(f"<image> {i}", [image]) for i, image in enumerate(images)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    found = lint([str(tmp_path / "a.parquet")])[1]["rows with schema errors"]
    bad = [1, 2, 4, 5] if has_pil else [1, 4, 5]  # only Pillow detects that an image is truncated
    assert [int(line.split("row ")[1][0]) for line in found] == bad


def test_answers_that_their_scorer_refuses_are_found(tmp_path):
    truths = {
        "openai/gsm8k": ("1,234", "x"), "HuggingFaceH4/MATH-500": ("\\frac{1}{2}", "\\boxed{7}"),
    }  # fmt: skip
    rows = [answered(source, truth) for source in truths for truth in truths[source]]
    file = write(tmp_path, [sum_row(1), sum_row(2, truth="three"), sum_row(3), *rows])
    _, findings = lint([file])
    assert [line.split(": ")[1] for line in findings["ground truths that their scorer rejects"]] == [
        "answer 'three' earns 0 at best",
        "answer 'x' earns 0 at best",
    ]
    assert len(findings) == 1


def test_a_scorer_that_hangs_is_stopped(tmp_path, custom, monkeypatch):
    monkeypatch.setattr(linter, "ScoringSlot", partial(linter.ScoringSlot, timeout_s=0.2))
    file = write(tmp_path, [sum_row(1, data_source="slow")])
    _, findings = lint([file], custom=custom)
    assert "earns -inf at best" in findings["ground truths that their scorer rejects"][0]


def test_sources_without_a_scorer_are_counted_others_left_alone(tmp_path):
    rows = [sum_row(i, data_source="no/such") for i in range(3)]
    rows += [answered("Dahoas/full-hh-rlhf", "x", style="model")]
    rows += [answered("rltrain/arithmetic", '{"inputs": ["1"], "outputs": ["1"]}') | {"ability": "code"}]
    _, findings = lint([write(tmp_path, rows)])
    (line,) = findings["data sources without a scorer"]
    assert line.startswith("3 rows of 'no/such': no scorer for data_source='no/such'")
    assert len(findings) == 1


def test_truths_that_are_written_otherwise_are_read_and_those_that_nothing_matches_are_named(tmp_path):
    fine = {"math_dapo": '["5"]', "lighteval/MATH": " \\boxed{5}\r", "qa_em/x": ["five"]}
    truths = ("{'value': '5', 'unit': 'cm'}", '{"value": 5}', "nan", " ")
    wrong = [answered("lighteval/MATH", truth) for truth in truths]
    for number, (source, truth) in enumerate(fine.items()):
        assert lint([write(tmp_path, [answered(source, truth)], f"fine{number}")])[1] == {}
    found = lint([write(tmp_path, wrong)])[1]["ground truths that no response can match"]
    assert ["a mapping" in line for line in found] == [True, True, False, False]
    number = answered("openai/gsm8k", "5") | {"reward_model": {"style": "rule", "ground_truth": 5.0}}
    pq.write_table(pa.Table.from_pylist([number]), tmp_path / "float.parquet")
    assert lint([str(tmp_path / "float.parquet")])[1] == {}


def test_a_format_of_special_tokens_is_out_of_reach(tmp_path, custom, encoder):
    file = write(tmp_path, [sum_row(1), sum_row(2)])
    encoder.tokenizer.add_special_tokens({"additional_special_tokens": ["<think>"]})
    (line,) = lint([file], encoder=encoder, custom=custom)[1]["format rewards out of reach"]
    assert line.startswith("<think>: special tokens, which are left out of the text that is scored")
    assert "earns 0.9 at best" in line


def test_a_format_that_the_template_makes_unreachable_is_found(tmp_path, custom, encoder):
    file = write(tmp_path, [sum_row(1), sum_row(2)])
    assert lint([file], encoder=encoder, custom=custom)[1] == {}
    opening = TEMPLATE.replace("<assistant>{% endif %}", "<assistant><think>\n{% endif %}")
    closed = TEMPLATE.replace("<assistant>{% endif %}", "<assistant><think>\n\n</think>\n\n{% endif %}")
    for template, reachable in ((opening, False), (closed, True)):
        assert template != TEMPLATE
        other = ChatEncoder(encoder.path, chat_template=template)
        found = lint([file], encoder=other, custom=custom)[1].get("format rewards out of reach", [])
        assert len(found) == (0 if reachable else 1)
        assert all("the chat template opens <think> itself" in line and "earns 0.9 at best" in line for line in found)


def test_the_command_line_takes_the_run_s_reward_and_tokenizer(tmp_path, custom, encoder, capsys):
    file = write(tmp_path, [sum_row(1, data_source="mine")])
    options = ["--tokenizer", encoder.path, "--max-prompt-length", "99"]
    assert main([file, *options]) == 2
    said = capsys.readouterr().out
    assert "data sources without a scorer: 1" in said
    assert "--reward-file my_reward.py" in said
    assert "custom_reward_function" not in said
    with pytest.raises(SystemExit):
        main([file, f"custom_reward_function.path={custom.path}"])
    assert "lint takes flags instead of keys" in capsys.readouterr().err
    assert main([file, *options, "--reward-file", custom.path]) == 0
    assert main([file, "--tokenizer", str(tmp_path / "none"), "--max-prompt-length", "9"]) == 2
    assert "no tokenizer" in capsys.readouterr().err
