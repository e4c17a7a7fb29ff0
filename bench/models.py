"""Decoder families that are computed as transformers computes them: tiny models of each, on the CPU.

    python -m bench.models [--out models.md] [--no-vllm] [FAMILY ...]

Each row is a configuration with transformers' default sizes, or with the fields given here, made small by
`rltrain.run.preflight.small`, as every run does before it loads a model. Training, the embedded engine, adapters and a
round trip through an export are compared with transformers' eager forward on each sample alone, by log-probs, gradients
or weights; vLLM through the weight sync of a run, twice, in a process per family. The page keeps the rows that were not
requested, and with --no-vllm its results for vLLM.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import nn

from bench.table import parse, table
from rltrain.common.device import get_device
from rltrain.common.errors import ConfigError, SyncError
from rltrain.data.chat import ChatEncoder
from rltrain.data.images import EncodedPrompt
from rltrain.models.forward import PolicyModel, trunk
from rltrain.models.load import load_config, model_kind
from rltrain.models.weights.lora import Lora
from rltrain.models.weights.names import gathered_weights
from rltrain.models.weights.shard import empty_packed, sharded_model
from rltrain.models.weights.spec import ModelSpec
from rltrain.run.preflight import model_check
from rltrain.run.preflight.model_check import CannotTry, Wrong, differences
from rltrain.run.preflight.small import random_model, small_copy
from rltrain.workers.state.weight_sync import WeightSync
from tests.exported import export_huggingface

TITLES = ("family", "peculiar", "trains packed", "`rollout.name=hf`", "`rollout.name=vllm`", "export", "LoRA")
_WORKS, _NOT_RUN = "works", "-"
_FAR = 1e-3


@dataclass(frozen=True)
class Family:
    """A row. kind: transformers' model_type; fields: of the configuration; longest: of a sequence; vllm: tried;
    recomputes: with gradient checkpointing."""

    kind: str
    peculiar: str
    fields: dict[str, Any] = field(default_factory=dict)
    longest: int = 64
    vllm: bool = False
    recomputes: bool = True


def _rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **fields}


_LONGROPE = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48, "original_max_position_embeddings": 64}
_PER_KIND = {"full_attention": _rope("dynamic"), "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
_EXPERTS = {"num_experts_per_tok": 6, "n_routed_experts": 64, "n_shared_experts": 1}
FAMILIES = {
    "llama": Family("llama", "rotary frequencies of Llama 3", vllm=True, fields={
        "num_key_value_heads": 8, "rope_parameters": _rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0,
                                                           original_max_position_embeddings=16)}),
    "llama4": Family("llama4_text", "chunked attention, layers without rotation, temperature by position, experts"),
    "qwen2": Family("qwen2", "biases, tied", {"tie_word_embeddings": True}, vllm=True),
    "qwen2_sw": Family("qwen2", "a window in upper layers", {"use_sliding_window": True, "max_window_layers": 28}),
    "qwen2_moe": Family("qwen2_moe", "a shared expert behind a gate"),
    "qwen3": Family("qwen3", "norms of queries and keys", vllm=True),
    "qwen3_moe": Family("qwen3_moe", "experts", vllm=True),
    "qwen3_next": Family("qwen3_next", "gated delta nets, experts"),
    "qwen3_5": Family("qwen3_5_text", "gated delta nets"),
    "qwen3_5_moe": Family("qwen3_5_moe_text", "gated delta nets, experts"),
    "qwen4_exp": Family("qwen4_exp_text", "gated delta nets, an indexer"),
    "qwen3_vl": Family("qwen3_vl", "a vision tower, with texts alone (vlm.md)"),
    "mistral": Family("mistral", "a window everywhere", vllm=True),
    "ministral": Family("ministral", "windows in some layers", {"head_dim": 128}),
    "ministral3": Family("ministral3", "queries scaled by position, yarn"),
    "mixtral": Family("mixtral", "experts", vllm=True),
    "mixtral_jitter": Family("mixtral", "noise of the router in training, left out", {"router_jitter_noise": 0.1}),
    "gemma": Family("gemma", "scaled embeddings"),
    "gemma2": Family("gemma2", "soft-capping in attention and head, windows"),
    "gemma2_nocap": Family("gemma2", "soft-capping in the head alone", {"attn_logit_softcapping": None}),
    "gemma3": Family("gemma3_text", "two rotary bases, windows", vllm=True),
    "gemma3n": Family("gemma3n_text", "AltUp, layers that share keys, inputs per layer"),
    "gemma4": Family("gemma4_text", "heads of two sizes"),
    "gemma4_shared_kv": Family("gemma4_text", "the same, layers that share keys", {"num_kv_shared_layers": 12}),
    "vaultgemma": Family("vaultgemma", "soft-capping in attention"),
    "phi2": Family("phi", "a parallel block, partial rotation, biases"),
    "phi3": Family("phi3", "one weight for queries, keys and values; a window", {"sliding_window": 2047}),
    "phi4mini": Family("phi3", "longrope within its limit", {
        "rope_parameters": _rope("longrope", **_LONGROPE), "original_max_position_embeddings": 64}),
    "phi3_longrope_beyond": Family("phi3", "longrope beyond its limit", longest=65, fields={
        "rope_parameters": _rope("longrope", **_LONGROPE), "original_max_position_embeddings": 64}),
    "phimoe": Family("phimoe", "experts that training draws by chance, taken as in evaluation"),
    "glm": Family("glm", "partial, interleaved rotation"),
    "glm4": Family("glm4", "norms before and after"),
    "glm4_moe": Family("glm4_moe", "sigmoid routing with a bias, shared experts"),
    "glm4_moe_lite": Family("glm4_moe_lite", "latent attention, experts"),
    "glm_moe_dsa": Family("glm_moe_dsa", "sparse attention with an indexer"),
    "deepseek_v2": Family("deepseek_v2", "latent attention", {"num_experts_per_tok": 6}),
    "deepseek_v3": Family("deepseek_v3", "latent attention, grouped routing (Kimi K2, Moonlight)"),
    "deepseek_v32": Family("deepseek_v32", "sparse attention with an indexer"),
    "deepseek_v4": Family("deepseek_v4", "compressed attention"),
    "gpt_oss": Family("gpt_oss", "attention sinks, windows, clamped experts"),
    "olmo": Family("olmo", "norms without weights"),
    "olmo2": Family("olmo2", "norms after"),
    "olmo3": Family("olmo3", "windows"),
    "olmoe": Family("olmoe", "experts"),
    "flex_olmo": Family("flex_olmo", "experts"),
    "olmo_hybrid": Family("olmo_hybrid", "gated delta nets"),
    "granite": Family("granite", "multipliers"),
    "granitemoe": Family("granitemoe", "experts"),
    "granitemoeshared": Family("granitemoeshared", "experts, a shared one"),
    "granite4_h": Family("granitemoehybrid", "Mamba 2"),
    "granite4_attn": Family("granitemoehybrid", "the same class, attention alone", {
        "layer_types": ["full_attention"] * 32, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "granite_swa": Family("granite_swa", "attention sinks"),
    "granitemoe_swa": Family("granitemoe_swa", "attention sinks, experts"),
    "smollm3": Family("smollm3", "layers without rotation"),
    "cohere": Family("cohere", "a parallel block, a scaled head"),
    "cohere2": Family("cohere2", "windows, full layers without rotation"),
    "cohere2_moe": Family("cohere2_moe", "experts"),
    "minimax": Family("minimax", "lightning attention"),
    "minimax_m2": Family("minimax_m2", "norms over all heads, partial rotation"),
    "minimax_m3": Family("minimax_m3_vl_text", "experts"),
    "falcon_h1": Family("falcon_h1", "Mamba next to attention"),
    "nemotron": Family("nemotron", "partial rotation, relu2", {"num_key_value_heads": 8}),
    "nemotron_h": Family("nemotron_h", "Mamba 2"),
    "nemotron_h_attn": Family("nemotron_h", "layers of attention, experts or MLP alone", {
        "layers_block_type": ["full_attention", "moe", "mlp"] * 2, "num_hidden_layers": 6}),
    "seed_oss": Family("seed_oss", "biases"),
    "ernie4_5": Family("ernie4_5", "interleaved rotation"),
    "ernie4_5_moe": Family("ernie4_5_moe", "experts with a bias"),
    "hunyuan_dense": Family("hunyuan_v1_dense", "norms behind the rotation", {"head_dim": 128}),
    "hunyuan_moe": Family("hunyuan_v1_moe", "experts", {"head_dim": 128}),
    "exaone4": Family("exaone4", "full layers without rotation, norms after"),
    "exaone_moe": Family("exaone_moe", "experts"),
    "lfm2": Family("lfm2", "short convolutions", {"layer_types": ["conv", "full_attention"] * 16}),
    "lfm2_moe": Family("lfm2_moe", "short convolutions, experts", {"layer_types": ["conv", "full_attention"] * 16}),
    "apertus": Family("apertus", "xIELU"),
    "arcee": Family("arcee", "relu2"),
    "dots1": Family("dots1", "experts", {**_EXPERTS, "n_group": 1, "first_k_dense_replace": 1}),
    "longcat_flash": Family("longcat_flash", "two attentions a layer, experts that do nothing, latent attention"),
    "afmoe": Family("afmoe", "gated attention, layers without rotation"),
    "mimo_v2_flash": Family("mimo_v2_flash", "attention sinks, windows, narrower values"),
    "solar_open": Family("solar_open", "experts"),
    "youtu": Family("youtu", "latent attention"),
    "minicpm3": Family("minicpm3", "latent attention, scaled layers"),
    "hyperclovax": Family("hyperclovax", "multipliers"),
    "kimi_linear": Family("kimi_linear", "Kimi delta attention"),
    "stablelm": Family("stablelm", "partial rotation"),
    "starcoder2": Family("starcoder2", "a window, LayerNorm"),
    "helium": Family("helium", "interleaved rotation"),
    "nanochat": Family("nanochat", "a soft-capped head"),
    "cwm": Family("cwm", "windows"),
    "jais2": Family("jais2", "relu2, biases"),
    "jamba": Family("jamba", "Mamba"),
    "bamba": Family("bamba", "Mamba 2"),
    "zamba2": Family("zamba2", "Mamba 2"),
    "mamba2": Family("mamba2", "no attention"),
    "recurrent_gemma": Family("recurrent_gemma", "recurrent layers"),
    "rwkv": Family("rwkv", "no attention"),
    "gpt2": Family("gpt2", "learnt positions"),
    "gpt_neox": Family("gpt_neox", "Pythia"),
    "gpt_bigcode": Family("gpt_bigcode", "one head of keys"),
    "opt": Family("opt", "learnt positions"),
    "gptj": Family("gptj", "custom attention"),
    "falcon": Family("falcon", "custom attention"),
    "bloom": Family("bloom", "ALiBi"),
    "mpt": Family("mpt", "ALiBi"),
    "xglm": Family("xglm", "custom attention"),
    "biogpt": Family("biogpt", "does not name its layers"),
    "diffllama": Family("diffllama", "differential attention: two calls a layer"),
    "doge": Family("doge", "a dynamic mask"),
    "hy_v3": Family("hy_v3", "experts"),
    "hy_v4": Family("hy_v4", "sparse attention with an indexer"),
    "laguna": Family("laguna", "heads that differ by layer"),
    "mellum": Family("mellum", "windows, experts"),
    "axk1": Family("axk1", "latent attention, experts"),
    "axk2": Family("axk2", "sparse attention with an indexer"),
    "zaya": Family("zaya", "convolutions within attention"),
    "inkling": Family("inkling_text", "convolutions next to attention"),
    "jetmoe": Family("jetmoe", "experts of attention; with enable_gradient_checkpointing=False", recomputes=False),
    "hrm_text": Family("hrm_text", "layers that are run through again and again"),
    "modernbert_decoder": Family("modernbert-decoder", "a head that is more than a matrix"),
    "persimmon": Family("persimmon", "relu2, norms of queries and keys"),
    "bitnet": Family("bitnet", "norms within blocks"),
    "llama_dynamic_rope": Family("llama", "dynamic NTK beyond its limit", longest=65, fields={
        "rope_parameters": _rope("dynamic"), "max_position_embeddings": 64}),
    "gemma3_dynamic_rope": Family("gemma3_text", "the same, in one kind of layer", longest=65, fields={
        "rope_parameters": _PER_KIND, "max_position_embeddings": 64}),
}  # fmt: skip


def row_of(name: str, *, vllm: bool) -> str:
    """Return the row of the table. Needs a process group of one process."""
    family = FAMILIES[name]
    cells = [name, family.peculiar, *_cells(name, family, vllm)]
    return f"| {' | '.join(cells)} |"


def _cells(name: str, family: Family, vllm: bool) -> list[str]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    rest = [_NOT_RUN] * 4
    if family.kind not in CONFIG_MAPPING:
        return [f"not in transformers {version('transformers')}", *rest]
    config = CONFIG_MAPPING[family.kind](**family.fields)
    spec = ModelSpec("", gradient_checkpointing=family.recomputes, longest=family.longest)
    verdict = _said(lambda: empty_packed(PolicyModel, spec, config))
    verdict = verdict if verdict != _WORKS else _said(lambda: differences(PolicyModel, spec, config, decodes=False))
    if verdict != _WORKS:
        return [verdict, *rest]
    with tempfile.TemporaryDirectory() as folder:
        model = _save(config, Path(folder, "model"))
        return [
            verdict,
            _said(lambda: differences(PolicyModel, spec, config, decodes=True)),
            _by_vllm(name) if vllm and family.vllm else _NOT_RUN,
            _said(lambda: _export(model, Path(folder, "exported"))),
            _adapters(model),
        ]


def _said(check: Callable[[], object]) -> str:
    """Return the text of a cell: works, or the reason of a refusal."""
    try:
        check()
    except (Wrong, ConfigError) as error:
        # The suggested fix is for a run.
        return "refused: " + re.split(r"\. (?:Use|Keep|Set|Raise) ", str(error))[0].rstrip(".")
    except CannotTry as error:
        return f"not tried: {error}"
    return _WORKS


def _save(config: Any, folder: Path) -> Path:
    """Save a small copy with random weights as a checkpoint."""
    from tests.tiny import save_tiny_tokenizer

    small = small_copy(config)
    save_tiny_tokenizer(folder)
    random_model(small, decoder_only=False, trust_remote_code=False).save_pretrained(folder)
    return folder


def _plain(folder: Path) -> Any:
    config = load_config(str(folder))
    kind = model_kind(config, decoder_only=False)
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def _policy(folder: Path, lora: Lora | None = None) -> PolicyModel:
    return sharded_model(PolicyModel, ModelSpec(str(folder), lora=lora, longest=32), get_device("cpu"))


def _export(folder: Path, out: Path) -> None:
    """Check that a model read by the trainer and written again has the same names and numbers."""
    config = load_config(str(folder))
    if problems := export_huggingface(_policy(folder), config, ChatEncoder(str(folder)), str(out)):
        raise Wrong(problems[0])
    before, after = (_plain(each).state_dict() for each in (folder, out))
    differing = [name for name in before | after if not torch.equal(before[name], after[name])]
    if differing:
        raise Wrong(f"{differing[0]} differs")


def _adapters(folder: Path) -> str:
    """Try adapters on all linear layers; if all-linear is refused because the experts are not linear, on the linear
    ones."""
    verdict = _said(lambda: _train_adapters(folder, "all-linear"))
    if "does not reach the experts" not in verdict:
        return verdict
    layers = trunk(_plain(folder)).named_modules()
    targets = {name.rpartition(".")[2] for name, layer in layers if type(layer) is nn.Linear}
    verdict = _said(lambda: _train_adapters(folder, sorted(targets)))
    return verdict if verdict != _WORKS else "works; experts if named"


def _train_adapters(folder: Path, targets: Any) -> None:
    """Check that merged weights compute the same as randomly filled adapters."""
    lora = Lora("actor_rollout_ref.model", 4, 8, targets, None, None, torch.float32, 0)
    policy, plain = _policy(folder, lora), _plain(folder)
    generator, samples = torch.Generator().manual_seed(0), model_check.trial_samples()
    model_check.packed_scores(policy.train(), samples).sum().backward()
    for weight in policy.parameters():
        # A router may use the weight of a layer without calling it: adapters there learn nothing and change nothing.
        if weight.grad is not None:
            local: Any = weight.detach()
            local.to_local().normal_(std=0.2, generator=generator)
    merged = {weight.name: weight.values for weight in gathered_weights(policy, torch.float32)}
    with torch.no_grad():
        base = model_check.plain_scores(plain, samples)
        plain.load_state_dict(merged, strict=False)
        expected = model_check.plain_scores(plain, samples)
        scores = model_check.packed_scores(policy.eval(), samples)
    if model_check.distance(expected, base) < 0.01:
        raise Wrong("has no layer with adapters that changes anything")
    if (off := model_check.distance(scores, expected)) > _FAR:
        raise Wrong(f"is off by {off:.2g}")


def _by_vllm(name: str) -> str:
    """Try vLLM in a separate process, because it starts once per process."""
    if not importlib.util.find_spec("vllm"):
        return _NOT_RUN
    command = [sys.executable, "-m", "bench.models", "--vllm", name]
    process = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    return (process.stdout.strip().splitlines() or [f"fails: {process.stderr.strip().splitlines()[-1]}"])[-1]


def _say_vllm(name: str) -> None:
    """Run the weight sync of a run, with first and with other weights, each with its canary."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from tests.workers.engines import engine_of

    family = FAMILIES[name]
    with tempfile.TemporaryDirectory() as folder:
        model = _save(CONFIG_MAPPING[family.kind](**family.fields), Path(folder, "model"))
        policy, plain = _policy(model), _plain(model)
        engine = engine_of("vllm", str(model))
        text = EncodedPrompt(np.arange(2, 30, dtype=np.int32))

        def log_probs(text: EncodedPrompt) -> torch.Tensor:
            row = torch.from_numpy(text.tokens).long()
            with torch.no_grad():
                return model_check.plain_tail(plain, row, len(row) - 1)

        sync = WeightSync(
            policy, engine, get_device("cpu"), torch.float32, bucket_bytes=1 << 20, gap_limit=_FAR, canary=text,
            log_probs=log_probs,
        )  # fmt: skip
        try:
            for update in range(2):
                sync.run(update, lambda: None)
                engine.sleep()
                with torch.no_grad():
                    for weight, plain_weight in zip(policy.model.parameters(), plain.parameters(), strict=True):
                        local: Any = weight
                        plain_weight.mul_(1.1)
                        local.to_local().mul_(1.1)
            verdict = _WORKS
        except SyncError as error:
            verdict = f"refused at the sync: {str(error).splitlines()[0]}"
        except Exception as error:  # noqa: BLE001 - what an engine raises is what the table is to say
            verdict = f"fails: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
    sys.stdout.write(verdict + "\n")
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads would keep running for a while


_PAGE = """# Families of models

Tiny models of each family against transformers. [models.md](../../docs/models.md) lists them by result.

"works": log-probs, and the gradient of every weight, are those of transformers' eager forward (the check allows a
distance of 1e-3 and 1e-2, relative to their size; rounding is around 1e-6); the exported folder has the names and
numbers of the one that was read; adapters, on all linear layers, compute what the merged weights do; vLLM took over two
versions of the policy's weights and gave its log-probs. "-" was not run: the model is refused, or vLLM is not tried
with this family. Its CPU kernel has no latent attention of a small size: with DeepSeek-V3 it is tried at the kernel's
(`tests/workers/test_moe_engines.py`).

{command}

{table}
"""


def rows_of(page: str) -> dict[str, str]:
    """Return the rows of a page by the name of their family."""
    rows = [line for line in page.splitlines() if line.startswith("| ")][1:]
    return {row.split(" | ")[0].removeprefix("| "): row for row in rows}


def page_of(rows: Sequence[str]) -> str:
    """Return the page with these rows."""
    command = (
        f"`python -m bench.models` wrote this on {date.today()}, with transformers {version('transformers')} and torch "
        f"{version('torch')}, in float32 on a CPU."
    )
    return _PAGE.format(command=command, table=table(TITLES, rows))


def main(argv: Sequence[str] | None = None) -> None:
    """Print rows, and write the page if all families were run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", choices=[*FAMILIES, []])
    parser.add_argument("--no-vllm", action="store_true")
    parser.add_argument("--vllm", help=argparse.SUPPRESS)
    options = parse(parser, argv, out="models.md", families=["qwen3"], no_vllm=True)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if options.vllm:
        _say_vllm(options.vllm)
    rows = rows_of(options.out.read_text()) if options.out.is_file() else {}
    for name in options.families or FAMILIES:
        row = row_of(name, vllm=not options.no_vllm)
        if options.no_vllm and name in rows:
            cells, before = row.split(" | "), rows[name].split(" | ")
            row = " | ".join([*cells[:4], before[4] if cells[2] == _WORKS else cells[4], *cells[5:]])
        rows[name] = row
        sys.stderr.write(row + "\n")
    dist.destroy_process_group()
    options.out.write_text(page_of([rows[name] for name in FAMILIES if name in rows]))
    print(table(TITLES, [rows[name] for name in options.families or FAMILIES]))


if __name__ == "__main__":
    main()
