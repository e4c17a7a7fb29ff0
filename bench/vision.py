"""Responses with one encoding of a shared image against one encoding each: time and peak memory of both passes.

    python -m bench.vision                   prints the table and writes it to bench/results/

Three ways run in one process and in turns: transformers' forward over padded rows, with the pixels repeated for every
response; packed rows with separate prompts and images; packed rows that share both, as in a run. Seconds are CPU
seconds of the process, which other work on the machine disturbs less than wall-clock time. Memory is that of the
tensors that live at the peak of a pass, which is the same in every run and on an accelerator.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig, Qwen3VLConfig

from bench.table import finished_row, parse, table, write
from rltrain.common.columns.batch import Batch, DictionaryColumn
from rltrain.common.columns.ragged import Ragged
from rltrain.common.device import get_device
from rltrain.data.images import PromptImages, mrope_positions
from rltrain.models.attention.packing import pack
from rltrain.models.forward import PolicyModel, model_numbers
from rltrain.models.load import recompute_activations
from rltrain.models.weights.shard import sharded_model
from rltrain.models.weights.spec import ModelSpec

CPU = torch.device("cpu")
ANSWERS = 8
# Edge of the image in pixels, tokens of the question, and tokens of a response.
EDGE, QUESTION, LENGTHS = 448, 32, (128, 512)
WAYS = ("padded", "packed", "shared")
TITLES = (
    "model", "work on", "pass", "padded, s", "packed, s", "shared, s", "times as fast as padded", "as packed",
    "padded, MiB", "packed, MiB", "shared, MiB", "padded / shared", "packed / shared",
)  # fmt: skip
WORKS = {"log_prob": "log-prob pass", "update": "update (forward + backward)"}
FAMILIES = {"Qwen2.5-VL": Qwen2_5_VLConfig, "Qwen3-VL": Qwen3VLConfig}
IMAGE, _VOCABULARY, _MERGE = 4, 2048, 2
_IDS = {"image_token_id": IMAGE, "video_token_id": 5, "vision_start_token_id": 2, "vision_end_token_id": 3}


def make_model(family: str, folder: Path, size: int = 256, layers: int = 4) -> str:
    """Create a random model. Its tower takes about a fifth of a token's compute per patch, as in Qwen2.5-VL-3B."""
    text = {
        "vocab_size": _VOCABULARY, "hidden_size": size, "intermediate_size": 3 * size, "num_hidden_layers": layers,
        "num_attention_heads": size // 64, "num_key_value_heads": max(size // 128, 1), "head_dim": 64,
        "max_position_embeddings": 4096, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]},
    }  # fmt: skip
    vision = {"depth": layers - 1, "hidden_size": size // 2, "intermediate_size": size, "num_heads": 2}
    vision |= {"out_hidden_size": size}
    if family == "Qwen2.5-VL":
        text.pop("head_dim")
        vision |= {"patch_size": 14, "window_size": 112, "fullatt_block_indexes": [layers - 2]}
    else:
        text["rope_parameters"] |= {"mrope_interleaved": True}
        vision |= {"patch_size": 16, "num_position_embeddings": 1024, "deepstack_visual_indexes": [0]}
    torch.manual_seed(0)
    config = FAMILIES[family](text_config=text, vision_config=vision, tie_word_embeddings=False, **_IDS)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    return str(folder)


def make_batch(policy: PolicyModel, length: int, edge: int) -> Batch:
    """Return a question with one image, and its responses."""
    vision: Any = policy.model.config.vision_config
    generator, side = torch.Generator().manual_seed(0), edge // vision.patch_size
    patches, tokens = side**2, side**2 // _MERGE**2
    words = torch.randint(8, _VOCABULARY, (QUESTION,), generator=generator, dtype=torch.int32)
    prompt = torch.cat(
        [words[: QUESTION // 2], torch.full((tokens,), IMAGE, dtype=torch.int32), words[QUESTION // 2 :]]
    )
    width, grids = 3 * vision.temporal_patch_size * vision.patch_size**2, np.array([[1, side, side]])
    images = PromptImages(
        torch.randn(patches, width, generator=generator).numpy(), grids, np.array([patches]), np.array([tokens]),
        np.flatnonzero(prompt == IMAGE), mrope_positions(prompt.numpy(), IMAGE, grids, _MERGE),
    )  # fmt: skip
    answers = torch.randint(8, _VOCABULARY, (ANSWERS * length,), generator=generator, dtype=torch.int32)
    response = Ragged(answers, torch.full((ANSWERS,), length))
    once = torch.zeros(ANSWERS, dtype=torch.long)
    mask = response.like(torch.ones(len(answers), dtype=torch.bool))
    columns = {"prompt": DictionaryColumn(Ragged.from_rows([prompt]), once), "images": DictionaryColumn([images], once)}
    return Batch({**columns, "response": response, "response_mask": mask})


def brought_along(batch: Batch) -> Batch:
    """Return the batch with a prompt and an image per response."""
    (prompt, *_), (images, *_) = batch.dictionary("prompt").values, batch.dictionary("images").values
    numbers = torch.arange(len(batch))
    copies = DictionaryColumn([replace(images, pixel_values=images.pixel_values.copy()) for _ in numbers], numbers)
    prompts = DictionaryColumn(Ragged.from_rows([prompt for _ in numbers]), numbers)
    return Batch({**dict(batch.items()), "prompt": prompts, "images": copies})


def padded_log_probs(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropy by transformers alone. All responses have one length, so there is no padding."""
    (prompt, *_), (images, *_) = batch.dictionary("prompt").values, batch.dictionary("images").values
    answers = torch.stack(list(batch.ragged("response").rows())).long()
    tokens = torch.cat([prompt.long().expand(len(answers), -1), answers], 1)
    logits = model(
        input_ids=tokens, attention_mask=torch.ones_like(tokens), mm_token_type_ids=(tokens == IMAGE).int(),
        pixel_values=torch.from_numpy(images.pixel_values).repeat(len(answers), 1),
        image_grid_thw=torch.from_numpy(images.grids).repeat(len(answers), 1), use_cache=False,
        logits_to_keep=answers.shape[1] + 1,
    ).logits[:, :-1]  # fmt: skip
    log_pi = torch.log_softmax(logits, -1)
    return log_pi.gather(-1, answers[..., None]).flatten(), -(log_pi.exp() * log_pi).sum(-1).flatten()


class Case:
    """One model and the responses of one length. ``run`` is a pass over them in one of the ways."""

    def __init__(self, family: str, length: int, folder: Path, edge: int = EDGE) -> None:
        if not (folder / "config.json").exists():
            make_model(family, folder)
        spec = ModelSpec(str(folder), gradient_checkpointing=True, tower="trained")
        self.policy = sharded_model(PolicyModel, spec, get_device("cpu")).train()
        self.plain = AutoModelForImageTextToText.from_pretrained(folder).train()
        recompute_activations(self.plain, "actor_rollout_ref.model")
        self.batch = make_batch(self.policy, length, edge)
        self._apart = brought_along(self.batch)

    def run(self, way: str, work: str) -> Tensor:
        """Return log-probs [tokens of the responses]; the update takes the gradient of their sum with the entropy's."""
        updates = work == "update"
        with torch.set_grad_enabled(updates):
            if way == "padded":
                log_probs, entropy = padded_log_probs(self.plain, self.batch)
            else:
                batch, share = (self.batch, True) if way == "shared" else (self._apart, False)
                log_probs, entropy, *_ = self.policy(pack(batch, CPU, share=share), 1.0, True)
            if updates:
                (log_probs.sum() + 0.01 * entropy.sum()).backward()
                (self.plain if way == "padded" else self.policy).zero_grad()
        return log_probs.detach()


def in_turns(run: Callable[[str, str], Any], work: str, repeats: int) -> list[list[float]]:
    """Return the CPU seconds of each way in each turn, after a warm-up turn."""
    turns = []
    for _ in range(repeats + 1):
        turn = []
        for way in WAYS:
            started = time.process_time()
            run(way, work)
            turn.append(time.process_time() - started)
        turns.append(turn)
    return [list(times) for times in zip(*turns[1:], strict=True)]


def peak_mib(action: Callable[[], Any]) -> float:
    """Return the peak MiB of the tensors that ``action`` creates."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        action()
    events = sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    return max(accumulate(changes)) / 2**20


def rows_of(family: str, case: Case, length: int, options: argparse.Namespace) -> Iterator[str]:
    """Yield the table rows of one model and one length of responses."""
    vision: Any = case.policy.model.config.vision_config
    patches = (options.edge // vision.patch_size) ** 2
    for work, title in WORKS.items():
        seconds = in_turns(case.run, work, options.repeats)
        # Ratios of neighbours in time, because a disturbance affects a whole turn.
        ratios = [
            statistics.median(one / other for one, other in zip(times, seconds[-1], strict=True)) for times in seconds
        ]
        mib = [peak_mib(partial(case.run, way, work)) for way in WAYS]
        cells = [f"{min(value):.2f}" for value in seconds] + [f"{value:.2f}" for value in ratios[:-1]]
        cells += [f"{value:,.0f}" for value in mib] + [f"{value / mib[-1]:.2f}" for value in mib[:-1]]
        shape = f"{patches:,} patches, {patches // _MERGE**2 + QUESTION} + {ANSWERS} x {length}"
        yield f"| {family} | {shape} | {title} | {' | '.join(cells)} |"


def differences(case: Case) -> float:
    """Return the largest difference between the log-probs of the three ways."""
    first, *others = (case.run(way, "log_prob") for way in WAYS)
    return max(float((first - log_probs).abs().max()) for log_probs in others)


def start() -> None:
    """Set one thread, and a process group of one for FSDP."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.set_defaults(edge=EDGE, lengths=LENGTHS, families=list(FAMILIES))
    options = parse(
        parser, out="vision_cpu.md", work="outputs/bench_vision", repeats=1, edge=112, lengths=(8,),
        families=["Qwen2.5-VL"],
    )  # fmt: skip
    start()
    rows, models, apart = list[str](), [], 0.0
    for family in options.families:
        for length in options.lengths:
            case = Case(family, length, options.work / family, options.edge)
            if length == options.lengths[0]:
                apart = max(apart, differences(case))
                sizes = model_numbers(case.policy)
                share = sizes["row_flops"] / 2 / sizes["matmul_parameters"]
                models.append(f"{family} {sizes['num_parameters'] / 1e6:.1f} M weights, {share:.2f}")
            for row in rows_of(family, case, length, options):
                finished_row(rows, row)
    write(
        options,
        f"{ANSWERS} answers to one image of {options.edge} x {options.edge} pixels. Random models, and what the tower "
        f"does for a patch in tokens: {', '.join(models)}. fp32, one thread, with entropy, tower trained, activations "
        "recomputed.",
        f"The three ways ran in turns. Seconds are CPU seconds, the least of {options.repeats}; times as fast is the "
        "median over the turns. MiB: tensors that a pass makes and that live at its peak, gradients of the weights "
        f"included. The log-probs of the three ways differ by at most {apart:.0e}.",
        "`padded`: transformers' forward, the image encoded per answer. `packed`: rltrain's packed forward, prompt "
        "and image per answer. `shared`: what a run computes.",
        table(TITLES, rows),
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
