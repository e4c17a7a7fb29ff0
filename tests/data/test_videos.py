"""Videos of rows: the choice of frames, tokens, pixels and positions as the processor's, decoding, and bad videos."""

import importlib.util
import sys
from io import BytesIO

import numpy as np
import pytest
import torch

if not importlib.util.find_spec("torchvision"):
    pytest.skip("torchvision is not installed (scripts/test.sh installs it)", allow_module_level=True)

from transformers import AutoModelForImageTextToText, AutoProcessor

from rltrain.common.errors import DataError
from rltrain.config.schema.families import FAMILIES as ROWS
from rltrain.data.chat import ChatEncoder
from rltrain.data.images import mrope_positions
from rltrain.data.media.videos import Clip, StoredVideo, VideoSettings, VideoSize
from rltrain.data.prompts import encode_prompts
from rltrain.data.rows import read_rows
from rltrain.run.preflight.models import PreflightResult, check_images
from rltrain.trainer.plan import ImageSizes
from tests.tiny_vision import FAMILIES, IMAGE, VIDEO, picture, png_of, save_tiny_families

NAN = float("nan")
FRAMES = [picture(120, 60, seed=number) for number in range(7)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return save_tiny_families(tmp_path_factory)


@pytest.fixture(params=[family for family in FAMILIES if ROWS[family].videos])
def folder(request, folders) -> str:
    return folders[request.param]


def listed(frames=FRAMES, **options) -> dict:
    return {"video": [{"bytes": png_of(frame)} for frame in frames], **options}


def mp4(number: int = 30, rate: int = 10) -> bytes:
    """Return a video whose frame i is a grey of 8 i."""
    import av

    with av.open(file := BytesIO(), "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = 128, 64, "yuv420p"
        for index in range(number):
            frame = av.VideoFrame.from_ndarray(np.full((64, 128, 3), 8 * index, dtype=np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


# -- frames ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("frames", "rate", "options", "expected"), [
    (100, 10.0, {}, 20),  # 10 s x 2 frames per second
    (100, 10.0, {"fps": 0.5}, 4),  # the least, where 5 would be rounded down
    (100, 10.0, {"fps": 0.1, "min_frames": 1}, 2),
    (100, 10.0, {"fps": 10.0}, 64),
    (100, 10.0, {"fps": 10.0, "max_frames": 30}, 30),
    (100, 10.0, {"fps": 10.0, "max_frames": 80}, 64),  # a row cannot raise the maximum
    (3, 10.0, {}, 2),
    (1, 10.0, {}, 2),
])  # fmt: skip
def test_number_of_frames(frames, rate, options, expected):
    options = dict.fromkeys(("fps", "min_frames", "max_frames", "min_pixels", "max_pixels"), NAN) | options
    clip = Clip.of(VideoSize(60, 30, frames, rate, **options), VideoSettings(), 28)
    assert len(clip.indices) == expected
    assert (clip.indices[0], clip.indices[-1]) == (0, frames - 1)
    assert max(np.diff(clip.indices), default=0) - min(np.diff(clip.indices), default=0) <= 1


def test_frames_that_are_too_large_name_the_keys():
    size = VideoSize(8000, 4000, 64, 2.0, *[NAN] * 5)
    with pytest.raises(DataError, match=r"64 frames of 8000 x 4000 .*data\.video_max_pixels or data\.video_max_frames"):
        Clip.of(size, VideoSettings(), 28)
    clip = Clip.of(size, VideoSettings(max_pixels=100_000), 28)
    assert (clip.width % 28, clip.height % 28) == (0, 0)
    assert 80_000 < clip.width * clip.height <= 100_000


def test_a_file_is_decoded_at_the_chosen_frames():
    video = StoredVideo.read({"video": mp4()}, None)
    size = video.measure()
    assert size[:4] == (128, 64, 30, 10.0)
    clip = Clip.of(size, VideoSettings(), 4)
    assert len(clip.indices) == 6
    opened = video.open(clip)
    assert opened.frames.shape == (6, 64, 128, 3)
    assert abs(opened.frames.mean((1, 2, 3)) - 8 * np.array(clip.indices)).max() < 4


# -- tokens and positions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["list", "file"])
def test_tokens_pixels_and_positions_are_those_of_transformers(folder, kind):
    """Images and videos in any order. No video is longer in time than in tokens on a side (see `mrope_positions`)."""
    first = listed(fps=12.0) if kind == "list" else {"video": mp4(21, rate=28)}
    text, media = "1<video>+<image>2=<video>?", (first, listed(FRAMES[:3], fps=4.0))
    encoder, image = ChatEncoder(folder), picture(84, 56, seed=9)
    found = encoder.encode_prompt([{"role": "user", "content": text}], [image], media)
    stored = [StoredVideo.read(video, None) for video in media]
    videos = [video.open(encoder.bounded_size(video.measure())) for video in stored]
    expected = by_transformers(folder, [image], videos)
    assert found.tokens.tolist() == expected["input_ids"][0].tolist()
    starts = found.images.places[np.cumsum(found.images.num_tokens) - found.images.num_tokens]
    is_image = (found.tokens[starts] == IMAGE).repeat(found.images.num_rows)
    assert np.array_equal(found.images.pixel_values[is_image], expected["pixel_values"])
    assert np.array_equal(found.images.pixel_values[~is_image], expected["pixel_values_videos"])
    wanted = {name: expected[name] for name in ("image_grid_thw", "video_grid_thw", "mm_token_type_ids")}
    if "second_per_grid_ts" in expected:
        wanted["second_per_grid_ts"] = torch.as_tensor(expected["second_per_grid_ts"])
    model = AutoModelForImageTextToText.from_pretrained(folder).model
    positions, _ = model.get_rope_index(expected["input_ids"], **wanted)
    assert np.array_equal(found.images.positions, positions[:, 0])


def by_transformers(folder, images, videos):
    processor = AutoProcessor.from_pretrained(folder)
    kinds = {"<video>": {"type": "video"}, "<image>": {"type": "image"}}
    pieces = ["1", "<video>", "+", "<image>", "2=", "<video>", "?"]
    content = [kinds.get(piece, {"type": "text", "text": piece}) for piece in pieces]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    return processor(
        text=[text], images=images, videos=[video.frames for video in videos], do_sample_frames=False,
        video_metadata=[video.size.metadata for video in videos], return_tensors="pt", return_mm_token_type_ids=True,
    )  # fmt: skip


def test_text_after_a_long_video_follows_its_last_position_in_time():
    """Compared with vLLM's positions in tests/workers/test_engine_images.py."""
    tokens = np.array([7, VIDEO, VIDEO, VIDEO, VIDEO, 8, 9])
    found = mrope_positions(tokens, (IMAGE, VIDEO), np.array([[4, 2, 2]]), 2, np.array([2.6]))
    assert found.tolist() == [[0, 1, 3, 6, 8, 9, 10], [0, 1, 1, 1, 1, 9, 10], [0, 1, 1, 1, 1, 9, 10]]


# -- rows --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def make(tmp_path, write, good_row):
    """Write rows of texts and videos; return the path."""

    def made(*rows):
        return write(
            tmp_path / "train.parquet",
            [good_row(number, prompt=[{"role": "user", "content": text}], videos=videos)
             for number, (text, videos) in enumerate(rows)],
        )  # fmt: skip

    return made


def test_rows_are_read_counted_and_found_changed(folders, make, tmp_path):
    for number, frame in enumerate(FRAMES):
        frame.save(tmp_path / f"{number}.png")
    names = [f"{number}.png" for number in range(7)]
    path = make(("<video>1", [{"video": names, "fps": 3.0}]), ("2", []), ("<video><video>", [{"video": names[:2]}] * 2))
    rows, encoder = read_rows(path), ChatEncoder(folders["qwen2_5_vl"])
    assert rows.num_media.tolist() == [[0, 1], [0, 0], [0, 2]]
    store = encode_prompts(rows, encoder, 500)
    assert store.has_videos
    assert store.num_images.tolist() == [3, 0, 2]  # steps in time
    expected = encoder.encode_prompt([{"role": "user", "content": "<video>1"}], (), [listed(fps=3.0)])
    assert np.array_equal(store.encoded(0).images.pixel_values, expected.images.pixel_values)
    assert store.encoded(0).tokens.tolist() == expected.tokens.tolist()
    assert store.image_rows[0] == len(expected.images.pixel_values)
    before = rows.fingerprint()
    picture(120, 60, seed=50).save(tmp_path / "3.png")
    assert read_rows(path).fingerprint() != before
    with pytest.raises(DataError, match=rf"^'{path}' row 0: the images have changed since"):
        store.encoded(0)


def test_options_of_a_row_belong_to_its_fingerprint(make):
    prints = {read_rows(make(("<video>", [listed(fps=rate)]))).fingerprint() for rate in (1.0, 2.0)}
    assert len(prints) == 2


@pytest.mark.parametrize(("videos", "message"), [
    ([{"video": []}], "empty list of frames"),
    ([{"video": "gone.mp4"}], "cannot be read: .*gone.mp4"),
    ([{"video": "https://host/a.mp4"}], "web address"),
    ([listed(video_start=3.0)], "option 'video_start' of a video is not supported"),
    ([listed(fps=-1.0)], r"option fps=-1.0 of a video must be a number above 0"),
    ([listed([FRAMES[0], picture(60, 60)])], "frames have different sizes"),
    ([{"video": b"\0\0\0\x20ftypisom" + bytes(100)}], "cannot be read"),
])  # fmt: skip
def test_a_bad_video_names_file_row_and_field(make, videos, message):
    path = make(("1", []), ("<video>", videos))
    with pytest.raises(DataError, match=rf"'{path}' row 1: field 'videos\[0\]': .*{message}"):
        read_rows(path)


def test_a_damaged_video_is_found_before_the_run(make):
    file = mp4()
    with pytest.raises(DataError, match=r"row 0: field 'videos\[0\]': "):
        read_rows(make(("<video>", [{"video": file[: len(file) // 2]}])))


def test_a_missing_decoder_is_named(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(DataError, match=r"row 0: field 'videos\[0\]': .*pip install 'rltrain\[videos\]'"):
        read_rows(make(("<video>", [{"video": b"\0\0\0\x20ftypisom"}])))


@pytest.mark.parametrize(("text", "videos", "family", "message"), [
    ("1", [listed()], "qwen3_vl", "0 slots for videos .<video>. and the row has 1 videos"),
    ("<video>", [], "qwen3_vl", "1 slots for videos .<video>. and the row has 0 videos"),
    ("<video>", [listed()], "glm4v", "holds a video: prompts with videos cannot be used with glm4v: .*Use qwen2_vl"),
    ("<video>", [listed()], "internvl", "holds a video: prompts with videos cannot be used with internvl"),
    ("<video>" + "1" * 600, [listed()], "qwen3_vl", r"longer than .*a smaller data\.video_max_frames"),
])  # fmt: skip
def test_a_video_that_does_not_fit_is_an_error(folders, make, text, videos, family, message):
    with pytest.raises(DataError, match=message):
        encode_prompts(read_rows(make((text, videos))), ChatEncoder(folders[family]), 500)


def problems_of_engine(folder: str, engine: str) -> list[str]:
    """Return the problems of prompts with videos of up to 100 tokens, of which the engine computes 99 at once."""
    from rltrain.config.load import load_config

    rollout = "actor_rollout_ref.rollout"
    cfg = load_config([
        "data.train_files=a", f"actor_rollout_ref.model.path={folder}", "trainer.device=cpu",
        f"{rollout}.name={engine}", f"{rollout}.max_num_batched_tokens=99",
    ]).config  # fmt: skip
    check_images(cfg, found := PreflightResult(images=ImageSizes(most_images=1, most_tokens=100, videos=True)))
    return [problem for problem in found.problems if "video" in problem]


def test_an_engine_without_videos_is_refused(folders):
    assert not problems_of_engine(folders["qwen3_vl"], "hf")
    (problem,) = problems_of_engine(folders["qwen3_vl"], "sglang")
    assert "rollout.name=sglang: prompts have videos" in problem
    assert "rollout.name=hf or rollout.name=vllm" in problem


def test_a_video_that_vllm_cannot_encode_at_once_is_refused(folders):
    assert not problems_of_engine(folders["qwen3_vl"], "vllm")  # encodes two frames at once
    (problem,) = problems_of_engine(folders["qwen2_5_vl"], "vllm")
    assert "rollout.max_num_batched_tokens=99: vLLM encodes a video at once" in problem
    assert "Set it to 100 or more." in problem
