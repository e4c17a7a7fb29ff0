"""Models and files that are small enough to create in a test."""

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Glm4MoeConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)

CHARACTERS = "0123456789+-=? "
SPECIALS = ["<pad>", "<eos>", "<user>", "<assistant>", "<unk>"]
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def save_tiny_tokenizer(folder: Path, template: str = TEMPLATE, characters: str = "") -> None:
    """Save a tokenizer with one token per character and a chat template. characters: other ones than usual, which are
    decoded without spaces."""
    vocabulary = {token: number for number, token in enumerate([*SPECIALS, *(characters or CHARACTERS)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    if characters:
        tokenizer.decoder = decoders.Fuse()
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
        additional_special_tokens=["<user>", "<assistant>"],
    )  # fmt: skip
    fast.chat_template = template
    fast.save_pretrained(folder)


def save_tiny_model(
    folder: Path, seed: int = 0, heads: int = 2, kv_heads: int = 1, positions: int = 128, width: int = 32,
    layers: int = 2,
) -> Path:  # fmt: skip
    """A random Qwen3 over the tiny tokenizer."""
    sizes = _sizes(heads, kv_heads, positions, width) | {"num_hidden_layers": layers}
    return _save(folder, Qwen3Config(**sizes), seed)


def save_tiny_moe(folder: Path, heads: int = 2, kv_heads: int = 1, **changes: object) -> Path:
    """The same with 8 experts per layer, of which a token uses two."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, **changes}
    return _save(folder, Qwen3MoeConfig(**_sizes(heads, kv_heads, 128, 32) | experts), 0)


def save_tiny_biased_moe(folder: Path, **changes: object) -> Path:
    """The same with routers that select by score and a correction bias, which is not 0."""
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1}
    own = {"n_group": 2, "topk_group": 2, "first_k_dense_replace": 1, "head_dim": 16, "num_hidden_layers": 3}
    _save(folder, Glm4MoeConfig(**_sizes(2, 1, 128, 32) | experts | own | {"tie_word_embeddings": False} | changes), 0)
    weights = load_file(folder / "model.safetensors")
    for name, bias in weights.items():
        if name.endswith("e_score_correction_bias"):
            bias.copy_(torch.linspace(-0.1, 0.1, len(bias)))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def _sizes(heads: int, kv_heads: int, positions: int, width: int) -> dict[str, object]:
    return {
        "vocab_size": len(CHARACTERS) + len(SPECIALS), "hidden_size": width, "intermediate_size": 2 * width,
        "num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 32,
        "max_position_embeddings": positions, "tie_word_embeddings": True, "eos_token_id": 1, "pad_token_id": 0,
        "bos_token_id": None, "initializer_range": 0.2,
    }  # fmt: skip


def _save(folder: Path, config: PretrainedConfig, seed: int) -> Path:
    save_tiny_tokenizer(folder)
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def save_tiny_reward_model(folder: Path, template: str = TEMPLATE, heads: int = 2) -> Path:
    """Save a random one-layer classifier with one label over the tiny tokenizer, with a separate chat template."""
    save_tiny_tokenizer(folder, template)
    config = Qwen3Config(
        vocab_size=len(CHARACTERS) + len(SPECIALS), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=heads, num_key_value_heads=1, head_dim=8, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        num_labels=1, initializer_range=0.5,
    )  # fmt: skip
    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


def save_scripted_judge(folder: Path) -> Path:
    """Save a judge with another tokenizer: it replies yes if a message ends with a digit above 4, else no."""
    characters = CHARACTERS + "yesno"
    save_tiny_tokenizer(folder, "{{ messages[0]['content'] }}", characters)
    tokens = [*SPECIALS, *characters]
    place, size = {token: number for number, token in enumerate(tokens)}, len(tokens)
    config = Qwen3Config(
        vocab_size=size, hidden_size=size, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=256, tie_word_embeddings=False, eos_token_id=1,
        pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    follower = dict.fromkeys(tokens, "n") | dict.fromkeys("56789", "y") | {"n": "o", "y": "e", "e": "s"}
    follower |= {"o": "<eos>", "s": "<eos>"}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.lm_head.weight.zero_()
        for token, following in follower.items():
            model.lm_head.weight[place[following], place[token]] = 3.0
    model.save_pretrained(folder)
    return folder


def save_tiny_adapter(folder: Path, model: Path) -> Path:
    """New adapters of rank 2 for all linear layers of a model."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), config).save_pretrained(folder)
    return folder


def write_arithmetic(
    file: Path, rows: Iterable[int], data_source: str = "rltrain/arithmetic", image: bytes | None = None
) -> Path:
    """Write sums of small numbers in verl's schema. image: an encoded image before each."""
    records = []
    for index in rows:
        left, right = index % 7, index % 4
        records.append(
            {
                "data_source": data_source,
                "prompt": [{"role": "user", "content": f"{'<image>' if image else ''}{left}+{right}=?"}],
                **({"images": [{"bytes": image}]} if image else {}),
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(left + right)},
                "extra_info": {"index": index, "split": "train"},
            }
        )
    pq.write_table(pa.Table.from_pylist(records), file, write_page_checksum=True)
    return file


def small_run(model: Path, files: tuple[Path, Path], folder: Path, **changes: object) -> list[str]:
    """Return the arguments of a run of a few seconds: 2 steps of 4 prompts x 4 responses and two optimizer
    steps each.
    """
    keys = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": files[0],
        "data.val_files": files[1],
        "data.train_batch_size": 4,
        "data.max_prompt_length": 16,
        "data.max_response_length": 8,
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 64,
        # AdamW divides a gradient by its own size: with the usual eps, rounding of one next to 0 would be a part of
        # a step.
        "actor_rollout_ref.actor.optim.lr": 5e-3,
        "actor_rollout_ref.actor.optim.eps": 1e-2,
        "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.actor.entropy_coeff": 0.01,
        "actor_rollout_ref.rollout.n": 4,
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": 1,
        "trainer.logger": "console",
        "trainer.report": False,  # a page takes seconds
        "trainer.val_before_train": False,
        "trainer.max_actor_ckpt_to_keep": "null",
        "trainer.total_training_steps": 2,
        # Of a few batches each; the number of steps alone ends these runs.
        "trainer.total_epochs": 100000,
        "trainer.default_local_dir": folder,
    }
    keys |= {name.replace("__", "."): value for name, value in changes.items()}
    return [f"{name}={value}" for name, value in keys.items()]


def small_config():
    """The defaults, on the CPU."""
    from rltrain.config.schema import Config

    config = Config()
    config.trainer.device = "cpu"
    config.trainer.nnodes, config.trainer.n_gpus_per_node = 1, 2
    ref = config.actor_rollout_ref.ref
    ref.ulysses_sequence_parallel_size = ref.ring_attention_size = 1
    return config
