import json
import pickle

import numpy as np
import pytest

from rltrain.common.errors import DataError
from rltrain.data.chat import ChatEncoder
from rltrain.data.prompts import encode_prompts, truncate
from rltrain.data.rows import read_rows
from rltrain.data.trial import problem_in_fork
from tests.clock import VirtualClock, hang
from tests.images import RED

ASK = [{"role": "user", "content": "what is 3 + 4 ?"}]
ASK_IDS = [1, 5, 8, 9, 15, 10, 16, 11, 2, 1, 6]


@pytest.fixture
def encoder(tokenizer_folder):
    return ChatEncoder(str(tokenizer_folder))


@pytest.fixture
def rows(tmp_path, write, good_row):
    prompts = [[{"role": "user", "content": "what is " + "7 " * length}] for length in (1, 9, 2, 12)]
    return read_rows(write(tmp_path / "rows.parquet", [good_row(i, prompt=p) for i, p in enumerate(prompts)]))


def copy_folder(source, target, **generation):
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    if generation:
        (target / "generation_config.json").write_text(json.dumps(generation))
    return target


def test_prompts_become_token_ids_and_answers_text(encoder, rows):
    assert encoder.encode(ASK) == ASK_IDS
    store = encode_prompts(rows, encoder, 99)
    assert (store.values.dtype, store.lengths.tolist(), store.num_dropped) == (np.int32, [8, 16, 9, 19], 0)
    assert [store.prompt(i).tolist() for i in range(4)] == encoder.encode_batch([row.prompt for row in rows])
    assert encoder.decode_batch([[16, 2], np.array([16, 10, 2], dtype=np.int32), []]) == ["4", "4 +", ""]


def test_stop_tokens_come_from_tokenizer_and_generation_config(encoder, tokenizer_folder, tmp_path):
    assert encoder.eos_token_ids == [2, 3]
    assert encoder.vocab_size == 62
    single = copy_folder(tokenizer_folder, tmp_path / "single", eos_token_id=3)
    assert ChatEncoder(str(single)).eos_token_ids == [2, 3]
    (single / "generation_config.json").unlink()
    assert ChatEncoder(str(single)).eos_token_ids == [2]
    (single / "generation_config.json").write_text("{")
    with pytest.raises(DataError, match="generation_config"):
        _ = ChatEncoder(str(single)).eos_token_ids


def test_a_missing_template_or_tokenizer_says_what_to_do(tokenizer_folder, tmp_path):
    bare = copy_folder(tokenizer_folder, tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    with pytest.raises(DataError, match=r"no chat template.*custom_chat_template"):
        ChatEncoder(str(bare)).encode(ASK)
    own = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert ChatEncoder(str(bare), chat_template=own).encode(ASK) == [8, 9, 15, 10, 16, 11]
    (tmp_path / "own.jinja").write_text(own)
    assert ChatEncoder(str(bare), chat_template=str(tmp_path / "own.jinja")).encode(ASK) == [8, 9, 15, 10, 16, 11]
    with pytest.raises(DataError, match="neither Jinja text nor"):
        ChatEncoder(str(bare), chat_template="no/such.jinja").encode(ASK)
    with pytest.raises(DataError, match=r"actor_rollout_ref\.model\.path"):
        ChatEncoder(str(tmp_path / "nothing")).encode(ASK)


def test_template_kwargs_reach_the_template(tokenizer_folder):
    own = "{{ messages[0]['content'] if enable_thinking else 'user' }}"
    assert ChatEncoder(str(tokenizer_folder), chat_template=own).encode(ASK) == [5]
    thinking = ChatEncoder(str(tokenizer_folder), chat_template=own, template_kwargs={"enable_thinking": True})
    assert len(thinking.encode(ASK)) == 6


def test_an_encoder_pickles_without_its_tokenizer(encoder):
    encoder.encode(ASK)
    data = pickle.dumps(encoder)
    assert len(data) < 2000
    assert pickle.loads(data).encode(ASK) == ASK_IDS


def test_a_refusing_template_names_file_and_row(tmp_path, write, good_row, tokenizer_folder):
    strict = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}what"
    path = write(
        tmp_path / "r.parquet", [good_row(0), good_row(1, prompt=[{"role": "system", "content": "a"}]), good_row(2)]
    )
    with pytest.raises(DataError, match=r"r\.parquet' row 1: .*no system role"):
        encode_prompts(read_rows(path), ChatEncoder(str(tokenizer_folder), chat_template=strict), 9)


@pytest.mark.fault("A chat template of the model folder that never ends, or fills the memory, is refused, exit 2")
@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "does not end within 1 s"),
        ("{{ 7 ** 100000000 }}", "does not end within 1 s"),
        ("{{ 'a' * 10 ** 10 }}", "asks for more than 2,048 MiB of memory"),
        ("{{ 'a' * 11000000 }}", "writes more than 10,000,000 characters"),
    ],
)
def test_endless_template_is_rejected(tokenizer_folder, template, said):
    encoder = ChatEncoder(str(tokenizer_folder), chat_template=template)
    # On a slow machine the last two take long until they are refused.
    limit = {"cpu_s": 1} if "1 s" in said else {}
    with pytest.raises(DataError, match=f"{said}.*custom_chat_template"):
        encoder.try_template([ASK], **limit)


def test_trial_timeout():
    """The template uses no CPU time, so the kernel's CPU limit does not end it."""
    assert problem_in_fork(hang, 1, clock=VirtualClock()) == "does not end within 10 s"


@pytest.mark.parametrize(
    "template",
    [
        "{{ range(10 ** 9)|list }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('id') }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_template_errors_are_data_errors(tokenizer_folder, template):
    encoder = ChatEncoder(str(tokenizer_folder), chat_template=template)
    encoder.try_template([ASK])
    with pytest.raises(DataError, match=r"the chat template of .* rejects the conversation"):
        encoder.encode(ASK)


def test_vision_prompts_are_refused_by_name(tmp_path, write, good_row, encoder):
    path = write(tmp_path / "v.parquet", [good_row(0, images=[]), good_row(1, images=[{"bytes": RED}])])
    with pytest.raises(DataError, match=r"v\.parquet' row 1 holds an image: prompts have images, but config.json in"):
        encode_prompts(read_rows(path), encoder, 99)
    with pytest.raises(DataError, match=r"has an image, but the row has none\. Does data\.image_key name"):
        encoder.encode([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what"}]}])


def test_overlong_prompts_are_filtered_and_rows_follow(rows, encoder):
    store = encode_prompts(rows, encoder, 9, filter_overlong=True)
    assert store.row_index.tolist() == [0, 2]
    assert store.num_dropped == 2
    kept = rows.select(store.row_index)
    assert [encoder.encode(row.prompt) for row in kept] == [store.prompt(i).tolist() for i in range(2)]
    with pytest.raises(DataError, match=r"drops every prompt.*max_prompt_length=3.*shortest has 8"):
        encode_prompts(rows, encoder, 3, filter_overlong=True)


class Ticking(VirtualClock):
    """Two seconds pass between two calls of the clock."""

    def monotonic(self) -> float:
        self.advance(2.0)
        return super().monotonic()


def test_the_search_for_wrong_rows_ends(tmp_path, write, good_row, tokenizer_folder):
    """Tokenising row by row may take long, so only the rows that are found in time are reported."""
    strict = "{{ raise_exception('no') }}"
    rows = read_rows(write(tmp_path / "r.parquet", [good_row(i) for i in range(9)]))
    with pytest.raises(DataError, match=r"(?s)3 or more prompts .* row 2: "):
        encode_prompts(rows, ChatEncoder(str(tokenizer_folder), chat_template=strict), 99, clock=Ticking())


def test_overlong_prompts_are_an_error_with_file_row_and_length(rows, encoder):
    with pytest.raises(DataError) as caught:
        encode_prompts(rows, encoder, 9, truncation="error")
    message = str(caught.value)
    for part in ("2 of 4", "rows.parquet' row 1: 16 tokens", "row 3: 19 tokens", "data.max_prompt_length=19"):
        assert part in message
    assert len(encode_prompts(rows, encoder, 19, truncation="error")) == 4


@pytest.mark.parametrize(
    ("how", "limit", "expected"),
    [
        ("left", 3, [4, 5, 6]),
        ("right", 3, [1, 2, 3]),
        ("middle", 4, [1, 2, 5, 6]),
        ("middle", 3, [1, 5, 6]),
        ("middle", 1, [6]),
        ("left", 6, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_truncation_keeps_the_named_side(how, limit, expected):
    assert truncate([1, 2, 3, 4, 5, 6], limit, how) == expected
