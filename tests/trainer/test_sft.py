"""Supervised fine-tuning: the learned tokens; loss and weights equal a plain loop in float64."""

import json

import pytest
import torch
from PIL import Image
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from rltrain.common.errors import ConfigError, DataError
from rltrain.common.stop import Stop
from rltrain.config.check import check
from rltrain.config.load import load_config
from rltrain.config.schema import DataConfig, SFTConfig
from rltrain.config.verl.sft import as_training
from rltrain.data.chat import ChatEncoder
from rltrain.data.turns.demonstrations import encode_demonstrations, read_demonstrations
from rltrain.run.splits import load_data
from tests.distance import distance
from tests.local import local_trainer
from tests.tiny_tools import CALL, save_calling_tokenizer
from tests.tiny_vision import save_tiny_vision_model

STEPS, LR, EPS = 5, 1e-2, 1e-2


def conversation(number):
    """A row of two turns of the assistant."""
    turns = [("user", f"{number}+{number}=?"), ("assistant", str(2 * number)), ("user", "1+1=?"), ("assistant", "2")]
    return {"messages": [{"role": role, "content": text} for role, text in turns], "data_source": f"s{number % 2}"}


@pytest.fixture
def words(tiny_model, tmp_path):
    """words(rows, *others): arguments of `rltrain train` for a supervised run on these rows."""

    def make(rows, *others):
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        keys = {
            "model.partial_pretrain": tiny_model, "data.train_files": tmp_path / "rows.jsonl", "data.max_length": 64,
            "data.train_batch_size": 4, "data.micro_batch_size_per_gpu": 2, "optim.lr": LR, "optim.eps": EPS,
            "optim.lr_warmup_steps_ratio": 0, "optim.lr_scheduler": "constant", "trainer.device": "cpu",
            "model.enable_gradient_checkpointing": False, "trainer.default_local_dir": tmp_path / "run",
        }  # fmt: skip
        return list(as_training([*(f"{key}={value}" for key, value in keys.items()), *others]))

    return make


def encoded(words):
    """Prompt tokens, response tokens and mask of each row, as texts of tokens."""
    data = load_data(load_config(words).config)
    tokenizer, store = data.encoder.tokenizer, data.prompts["train"]
    for number in range(len(store)):
        tokens, mask = store.responses[number]
        yield (
            tokenizer.decode(store.prompt(number)),
            "".join(tokenizer.convert_ids_to_tokens(tokens[mask].tolist())),
            "".join(tokenizer.convert_ids_to_tokens(tokens[~mask].tolist())),
        )


def test_the_tokens_of_the_assistant_are_learned_and_no_others(words):
    (row,) = encoded(words([conversation(3)]))
    assert row[1:] == ("6<eos>2<eos>", "1+1=?<assistant>")
    (row,) = encoded(words([conversation(3)], "sft.turns=last"))
    assert row[1:] == ("2<eos>", "")
    assert "6" in row[0]


def test_prompt_and_response_columns_are_read_under_names_of_verl(words):
    rows = [{"extra": {"q": "1+2=?", "a": "3"}}]
    keys = ("data.prompt_dict_keys=['q']", "data.prompt_key=extra", "data.response_key=extra")
    for order in (keys, keys[::-1]):
        (row,) = encoded(words(rows, *order, "+data.response_dict_keys=['a']"))
        assert row[1:] == ("3<eos>", "")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [{"role": "user", "content": "1"}]}, "no assistant turn"),
        ({"messages": [{"role": "assistant", "content": "1"}]}, "begins with an assistant turn"),
        ({"messages": "1"}, "not a list of messages"),
        ({"question": "1"}, "neither sft.messages_key=messages nor data.prompt_key=prompt"),
        (conversation(1) | {"tools": "[{"}, "tools is '\\[\\{'; it must be a list of JSON schemas"),
        (conversation(1) | {"tools": "[1]"}, "tools is '\\[1\\]'; it must be a list of JSON schemas"),
    ],
)
def test_an_unusable_row_is_named(words, row, message):
    config = load_config(words([conversation(1), row])).config
    with pytest.raises(DataError, match=rf"rows\.jsonl' row 1: .*{message}"):
        read_demonstrations(config.data.train_files, config.sft, config.data, -1)


def test_a_template_that_writes_a_turn_differently_is_refused(words):
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    config = load_config(words([conversation(1)])).config
    rows = read_demonstrations(config.data.train_files, config.sft, config.data, -1)
    encoder = ChatEncoder(config.actor_rollout_ref.model.path, chat_template=template)
    with pytest.raises(DataError, match=r"row 0: the chat template writes an assistant turn differently"):
        encode_demonstrations(rows, encoder, 64, False, "error")


def test_rows_over_the_limit_are_an_error_dropped_or_cut(words):
    rows = [conversation(1), conversation(111111111)]
    with pytest.raises(DataError, match=r"1 of 2 rows are longer than .* = 30 tokens"):
        load_data(load_config(words(rows, "data.max_length=30")).config)
    assert len(list(encoded(words(rows, "data.max_length=30", "data.filter_overlong_prompts=True")))) == 1
    cut = list(encoded(words(rows, "data.max_length=30", "data.truncation=right")))
    assert cut[1][1:] == ("2222222", "")


@pytest.mark.parametrize("length", ["abc", "1", "-3"])
def test_a_maximum_length_that_is_no_length_is_refused(words, length):
    with pytest.raises(ConfigError, match=f"data.max_length={length}: give a number of tokens, at least 2"):
        words([conversation(1)], f"data.max_length={length}")


@pytest.mark.parametrize("key", ["data.max_length", "data.multiturn.messages_key", "model.partial_pretrain"])
def test_a_mistyped_key_of_verls_trainer_gets_a_suggestion(words, key):
    with pytest.raises(ConfigError, match=f"unknown key '{key}s'. Did you mean {key}?"):
        words([conversation(1)], f"{key}s=1")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("actor_rollout_ref.rollout.n=2", "n=2: with sft.enabled=True a row has one response"),
        ("data.truncation=left", "data.truncation=left: with sft.enabled=True use right"),
        ("trainer.val_only=True", "trainer.val_only=True: with sft.enabled=True"),
        ("actor_rollout_ref.rollout.tail=oversample", "needs generated responses"),
    ],
)
def test_settings_that_need_generated_responses_are_refused(words, word, message):
    with pytest.raises(ConfigError, match=message):
        check(load_config(words([conversation(1)], word)))


def plain_loop(config, data):
    """Loss of each step and the weights after the last, by transformers and AdamW in float64, one row at a time."""
    model = AutoModelForCausalLM.from_pretrained(config.actor_rollout_ref.model.path, dtype=torch.float64)
    optim, store = config.actor_rollout_ref.actor.optim, data.prompts["train"]
    settings = {"betas": tuple(optim.betas), "eps": EPS, "weight_decay": optim.weight_decay}
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=LR, **settings), []
    order = local_order(config, data)
    for step in range(STEPS):
        sums, count = torch.zeros((), dtype=torch.float64), 0
        for row in order[step]:
            prompt, (tokens, mask) = torch.from_numpy(store.prompt(row)), map(torch.from_numpy, store.responses[row])
            ids = torch.cat([prompt, tokens]).long()
            of_response = slice(len(prompt) - 1, -1)
            losses_of_row = F.cross_entropy(model(ids[None]).logits[0, of_response], tokens.long(), reduction="none")
            sums, count = sums + losses_of_row[mask].sum(), count + int(mask.sum())
        optimizer.zero_grad()
        (sums / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip_grad)
        optimizer.step()
        losses.append((sums / count).item())
    return losses, {name: weight.detach() for name, weight in model.named_parameters()}


def local_order(config, data):
    """Rows of each step, in the run's order."""
    from rltrain.run.assemble import sampler_of
    from rltrain.trainer.plan import make_plan

    plan = make_plan(config, len(data.prompts["train"]))
    sampler = sampler_of(config, plan, data.rows["train"])
    return [sampler.rows(step) for step in range(STEPS)]


def moved(words):
    """Loss of each step, the weights after the last, and the trainer."""
    trainer = local_trainer(words)
    losses = [trainer.step(step).metrics["train/loss"] for step in range(1, STEPS + 1)]
    weights = trainer.worker.actor.policy.model.state_dict()
    return losses, {name: weight.full_tensor() for name, weight in weights.items()}, trainer


@pytest.mark.smoke("Supervised fine-tuning equals a plain loop")
@pytest.mark.usefixtures("process_group")
def test_loss_and_weights_equal_a_plain_loop_for_any_cut(words):
    rows = [conversation(number) for number in range(20)]
    arguments = words(rows)
    found, weights, trainer = moved(arguments)
    expected, expected_weights = plain_loop(load_config(arguments).config, trainer.data)
    start = AutoModelForCausalLM.from_pretrained(load_config(arguments).config.actor_rollout_ref.model.path)
    before = {name: weight.detach().double() for name, weight in start.named_parameters()}
    assert distance(torch.tensor(found), torch.tensor(expected)) < 1e-5
    steps = {name: weights[name].double() - before[name] for name in before}
    assert distance(steps, {name: expected_weights[name] - before[name] for name in before}) < 1e-5
    for size in (1, 4):
        other, other_weights, _ = moved(words(rows, f"data.micro_batch_size_per_gpu={size}"))
        assert distance(torch.tensor(other), torch.tensor(found)) < 1e-5
        assert distance({name: other_weights[name].double() - before[name] for name in before}, steps) < 1e-5


@pytest.mark.usefixtures("process_group")
def test_validation_reports_the_loss_per_token_of_each_source(words, tmp_path):
    rows = [conversation(number) for number in range(8)]
    trainer = local_trainer(words(rows, f"data.val_files={tmp_path}/rows.jsonl"))
    metrics = trainer.validation.run(0, Stop()).metrics
    assert {"val/loss", "val/loss/s0", "val/loss/s1"} <= metrics.keys()
    losses, _ = plain_loop(trainer.cfg, trainer.data)
    step = trainer.step(1).metrics
    assert abs(step["train/loss"] - losses[0]) < 1e-4 * losses[0]
    # All of these rows have as many tokens of the assistant, as operands below 5 have sums of one digit.
    later = trainer.validation.run(1, Stop()).metrics
    assert later["val/loss"] < metrics["val/loss"]
    assert not {name for name in step if name.startswith(("critic/", "reward/", "rollout/"))}


@pytest.mark.usefixtures("process_group")
def test_training_and_validation_see_the_images(words, tmp_path):
    save_tiny_vision_model(tmp_path / "vision", "qwen2_5_vl", tied=True)
    rows = []
    for number in range(4):
        Image.new("RGB", (56, 56), (255 * (number % 2), 0, 99)).save(tmp_path / f"{number}.png")
        turns = [{"role": "user", "content": "<image>1+1=?"}, {"role": "assistant", "content": str(number % 2)}]
        rows.append({"messages": turns, "images": [{"path": f"{number}.png"}]})
    (tmp_path / "images.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = (f"data.val_files={tmp_path}/images.jsonl", f"model.partial_pretrain={tmp_path}/vision")
    trainer = local_trainer(words(rows, *data))
    expected = loss_with_images(tmp_path / "vision", trainer.data.prompts["train"])
    assert abs(trainer.validation.run(0, Stop()).metrics["val/loss"] - expected) < 1e-4 * expected
    assert abs(trainer.step(1).metrics["train/loss"] - expected) < 1e-4 * expected
    # Images of the validation only.
    trainer = local_trainer(words([conversation(number) for number in range(4)], *data))
    assert abs(trainer.validation.run(0, Stop()).metrics["val/loss"] - expected) < 1e-4 * expected


def loss_with_images(folder, store):
    """Loss per token of all rows by transformers in float64, one row at a time."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64)
    losses = []
    for row in range(len(store)):
        prompt, tokens = torch.from_numpy(store.prompt(row)), torch.from_numpy(store.responses[row][0]).long()
        ids, images = torch.cat([prompt, tokens]), store.encoded(row).images
        pixels, grids = torch.from_numpy(images.pixel_values).double(), torch.from_numpy(images.grids)
        kinds = (ids == model.config.image_token_id).int()
        logits = model(ids[None], pixel_values=pixels, image_grid_thw=grids, mm_token_type_ids=kinds[None]).logits
        losses.append(F.cross_entropy(logits[0, len(prompt) - 1 : -1], tokens, reduction="none"))
    return torch.cat(losses).mean().item()


def test_calls_are_learned_and_results_are_not(tmp_path):
    """Call, result and next turn have the tokens that a rollout would have."""
    save_calling_tokenizer(tmp_path / "model")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
    turns = [
        {"role": "user", "content": "2+3?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "5"},
        {"role": "assistant", "content": "5"},
    ]
    schema = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": turns, "tools": [schema]}))
    sft, data = SFTConfig(enabled=True), DataConfig()
    rows = read_demonstrations(str(tmp_path / "rows.jsonl"), sft, data, -1)
    encoder = ChatEncoder(str(tmp_path / "model"))
    store = encode_demonstrations(rows, encoder, 512, False, "error")
    tokens, mask = store.responses[0]
    whole = encoder.encode_batch([turns], answered=True, tools=[schema])[0]
    assert [*store.prompt(0), *tokens] == whole[:-1]  # without the newline after the end token
    parts = ["".join(encoder.tokenizer.convert_ids_to_tokens(part.tolist())) for part in (tokens[mask], tokens[~mask])]
    assert parts[0] == f"{CALL}<|im_end|>5<|im_end|>"
    assert parts[1] == "\n<|im_start|>user<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
