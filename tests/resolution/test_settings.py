"""The arguments of a search, the bounds to try, and the errors."""

import importlib.util

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

if not importlib.util.find_spec("torchvision"):
    pytest.skip("torchvision is not installed (scripts/test.sh installs it)", allow_module_level=True)

from rltrain.common.errors import ConfigError, DataError
from rltrain.common.stop import Stop
from rltrain.data_preprocess import rectangles
from rltrain.tools.resolution import search
from rltrain.tools.resolution.__main__ import main
from rltrain.tools.resolution.request import Bounds, read_search
from rltrain.tools.resolution.settings import MIN_PROMPTS, Setting, Settings, find_settings
from tests.tiny_vision import save_tiny_vision_model

DEFAULT = Bounds(None, None)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Rectangles of 84 x 84 pixels, which take 9 tokens."""
    folder = tmp_path_factory.mktemp("rectangles")
    rectangles.main(["--output", str(folder), "--num-train", "24", "--num-test", "20"])
    return folder / "train.parquet", folder / "test.parquet"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_vision_model(tmp_path_factory.mktemp("model") / "sees", "qwen2_5_vl", tied=False)


def words(model, files, *more, longest=64):
    keys = [f"model={model}", f"dev={files[0]}", f"test={files[1]}", f"data.max_prompt_length={longest}"]
    return [*keys, "trainer.device=cpu", "trainer.n_gpus_per_node=1", "actor_rollout_ref.rollout.name=hf", *more]


def settings_of(*arguments, **options):
    return find_settings(read_search(words(*arguments, **options), [], []))


def test_without_bounds_fewer_and_more_pixels_than_by_default_are_tried(model, files):
    found = settings_of(model, files)
    by_bounds = {setting.bounds: setting.tokens for setting in found.tried}
    assert by_bounds == {DEFAULT: 9, Bounds(None, 1764): 1, Bounds(None, 3528): 4, Bounds(14112, None): 25}
    assert [setting.is_default for setting in found.tried] == [True, False, False, False]
    # Its processor has bounds of its own.
    same = "every image gets the size that it has with min_14112_max_none"
    assert found.notes == [f"min_28224_max_none is left out: {same}"]
    assert found.num_prompts == 24


def test_bounds_under_which_prompts_are_too_long_are_left_out_and_refused_where_they_are_named(model, files):
    found = settings_of(model, files, longest=20)
    assert [setting.tokens for setting in found.tried] == [9, 1, 4]
    assert "data.max_prompt_length=20" in found.notes[0]
    with pytest.raises(
        ConfigError, match=r"data\.min_pixels=28224 data\.max_pixels=null: .*data\.max_prompt_length=20"
    ):
        settings_of(model, files, "min_pixels=none,28224", longest=20)


def test_named_bounds_are_combined_and_those_that_change_no_image_are_left_out(model, files):
    found = settings_of(model, files, "min_pixels=none,9000", "max_pixels=3528,1000000", "data.max_pixels=7056")
    assert {setting.bounds for setting in found.tried} == {Bounds(None, 7056), Bounds(None, 3528), Bounds(9000, 10**6)}
    assert found.notes == [
        "min_none_max_1000000 is left out: every image gets the size that it has with min_none_max_7056"
    ]
    with pytest.raises(ConfigError, match="there is nothing to search"):
        settings_of(model, files, "max_pixels=1000000")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["data=a.parquet"], "data=a.parquet: dev=FILES is searched on"),
        (["max_pixels=10,many"], "max_pixels=10,many: 'many' is not a whole number"),
    ],
)
def test_words_that_mean_nothing_are_told(more, message, model, files, capfd):
    assert main(words(model, files, *more)) == 2
    assert message in capfd.readouterr().err


def test_what_is_not_given_is_named_in_one_go(capfd):
    assert main(["data.max_prompt_length=64"]) == 2
    told = capfd.readouterr().err
    assert all(f"{name}= is not given" in told for name in ("dev", "test", "model"))


def test_rows_that_were_searched_on_cannot_be_the_test(model, files, capfd):
    assert main(words(model, [files[0], files[0]])) == 2
    assert "is in dev= and in test=" in capfd.readouterr().err


def test_models_that_see_nothing_or_at_one_size_alone_are_refused(tiny_model, files, tmp_path):
    with pytest.raises(ConfigError, match="sees no images, so there is no resolution to search"):
        settings_of(tiny_model, files)
    tiles = save_tiny_vision_model(tmp_path / "tiles", "internvl", tied=False)
    with pytest.raises(ConfigError, match="scales every image to tiles of one size"):
        settings_of(tiles, files)


def test_splits_with_few_prompts_or_without_images_are_refused(model, files, arithmetic_files, tmp_path):
    few = tmp_path / "few.parquet"
    pq.write_table(pq.read_table(files[1]).slice(0, MIN_PROMPTS - 1), few)
    with pytest.raises(DataError, match=rf"test={few}: 19 prompts cannot distinguish resolutions\. Give at least 20"):
        settings_of(model, [files[0], few])
    with pytest.raises(DataError, match=r"no prompt has an image\. data\.image_key names the column"):
        settings_of(model, [arithmetic_files[0], files[1]])


def test_a_dry_run_shows_what_images_cost_and_answers_nothing(model, files, tmp_path, capfd):
    assert main(words(model, files, f"out={tmp_path / 'out'}", "--dry-run")) == 0
    told = capfd.readouterr().out
    assert "min_none_max_none (default) │ 9.0" in told
    assert not (tmp_path / "out").exists()


def test_a_setting_that_is_worse_on_the_first_quarter_is_stopped(model, files, tmp_path, monkeypatch):
    """Of 80 prompts, 20 are evaluated first. With 1764 pixels scores are worse, with 3528 better than the default."""
    scores = {"min_none_max_none": 0.5, "min_none_max_1764": 0.0, "min_none_max_3528": 1.0}
    evaluated = []

    def evaluate(request, model, stop):
        folder = request.folder(model)
        evaluated.append(f"{folder.parent.name}/{folder.name}")
        words = [word for word in request.words if word.startswith("data.val_max_samples=")]
        count = int(words[0].partition("=")[2]) if words else 80
        columns = {"row": range(count), "sample": [0] * count, "data_source": ["a"] * count}
        columns |= {"reward": [scores[folder.name]] * count, "reward_failed": [0] * count}
        folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), folder / "answers.parquet")
        return {"answers": "answers.parquet"}

    monkeypatch.setattr(search, "evaluate_model", evaluate)
    bounds = [DEFAULT, Bounds(None, 1764), Bounds(None, 3528)]
    tried = [Setting(each, tokens, each == DEFAULT) for each, tokens in zip(bounds, (9, 1, 4), strict=True)]
    request = read_search(words(model, files, f"out={tmp_path}"), [], [])
    result = search.search(request, Settings(tried, [], 80), Stop())
    assert [(part["value"], part["prompts"], part["stopped"]) for part in result["settings"]] == [
        (0.5, 80, False), (0.0, 20, True), (1.0, 80, False),
    ]  # fmt: skip
    assert result["chosen"]["name"] == "min_none_max_3528"
    assert result["difference"] == {"value": 0.5, "low": 0.5, "high": 0.5}
    assert "dev/min_none_max_1764" not in evaluated
