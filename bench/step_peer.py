"""TRL's side of bench.step: its GRPOTrainer on the same files, in a separate environment.

    PEER_PYTHON bench/step_peer.py '{"folder": ..., "limit": 128, ...}'      prints one line of JSON at the end

Phases are timed around the trainer's methods: generation (with tokenising and, for vLLM, the weight sync), the two
log-prob passes without gradient, and the rest of the two training steps (the update). TRL's way of loading weights into
vLLM does not work on a CPU, where vLLM has packed them; vLLM's `reload_weights` is called instead. Imports nothing of
rltrain.
"""

import importlib.util
import json
import os
import sys
import time
from collections import defaultdict

STARTED = time.perf_counter()


def reload(trainer) -> None:
    """Load the trainer's weights into the engine in this process."""
    engine = trainer.vllm_generation.llm
    engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(trainer.model.state_dict().items())})
    engine.reset_prefix_cache()


def read_rows(file: str):
    """Return the prompts in TRL's format: images in a separate column, which is decoded when a batch is drawn."""
    import pyarrow.parquet as pq
    from datasets import Dataset, Image, List

    columns = [name for name in ("prompt", "images", "reward_model") if name in pq.read_schema(file).names]
    rows = [row | row.pop("reward_model", {}) for row in pq.read_table(file, columns=columns).to_pylist()]
    if "images" not in columns:
        return Dataset.from_list(rows)
    for row in rows:
        for message in row["prompt"]:
            # TRL itself puts the images first.
            message["content"] = message["content"].removeprefix("<image>")
        row["images"] = [{"bytes": image["bytes"], "path": None} for image in row["images"]]
    return Dataset.from_list(rows).cast_column("images", List(Image()))


def main() -> None:  # noqa: C901 - one script
    task = json.loads(sys.argv[1])
    for name, value in {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }.items():
        os.environ[name] = value
    import torch

    torch.set_num_threads(1)
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    bf16 = task["dtype"] == "bfloat16"
    per_step = task["prompts"] * task["answers"]
    engine = (
        {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.1}
        if task["engine"] == "vllm"
        else {}
    )
    config = GRPOConfig(
        output_dir=os.path.join(task["folder"], "peer"), use_cpu=True, bf16=bf16, seed=task["seed"], report_to=[],
        save_strategy="no", logging_steps=1, disable_tqdm=True, learning_rate=task["lr"], lr_scheduler_type="constant",
        max_grad_norm=1.0, weight_decay=0.01, per_device_train_batch_size=task["micro_batch"],
        gradient_accumulation_steps=per_step // 2 // task["micro_batch"],
        steps_per_generation=per_step // task["micro_batch"], num_generations=task["answers"], num_iterations=1,
        max_completion_length=task["limit"], max_steps=2 * task["steps"], beta=task["kl"], temperature=1.0,
        gradient_checkpointing=False, shuffle_dataset=False, loss_type="dapo", **engine,
    )  # fmt: skip
    seconds: dict = defaultdict(float)
    steps: list = []
    lengths: list = []
    rewards: list = []
    prompt_lengths: list = []

    def timed(name, function):
        def wrapper(*arguments, **named):
            started = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                seconds[name] += time.perf_counter() - started

        return wrapper

    class Clock(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step % 2 == 0:
                seconds.clear()
                self.started = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step % 2 == 0:
                step = time.perf_counter() - self.started
                record = dict(seconds) | {"step": step, "to_here": time.perf_counter() - STARTED}
                record["update_actor"] = step - record.pop("scored")
                steps.append(record)

    class Timed(GRPOTrainer):
        def _get_per_token_logps_and_entropies(self, model, *arguments, **named):
            method = super()._get_per_token_logps_and_entropies
            if torch.is_grad_enabled():
                return method(model, *arguments, **named)
            return timed("ref" if model is self.ref_model else "old_log_prob", method)(model, *arguments, **named)

    spec = importlib.util.spec_from_file_location("reward", os.path.join(task["folder"], "reward.py"))
    scorer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(scorer)

    def reward(completions, completion_ids, ground_truth, **kwargs):
        lengths.append(sum(map(len, completion_ids)) / len(completion_ids))
        texts = [completion[0]["content"] for completion in completions]
        scores = [scorer.reward("", text, truth) for text, truth in zip(texts, ground_truth, strict=True)]
        rewards.append(sum(scores) / len(scores))
        return scores

    trainer = Timed(
        model=os.path.join(task["folder"], "model"), reward_funcs=reward, args=config,
        train_dataset=read_rows(os.path.join(task["folder"], "train.parquet")), callbacks=[Clock()],
    )  # fmt: skip
    if task["engine"] == "vllm":
        trainer.vllm_generation.sync_weights = lambda: reload(trainer)
    trainer._generate = timed("gen", trainer._generate)
    trainer._generate_and_score_completions = timed("scored", trainer._generate_and_score_completions)
    tokenize = trainer._tokenize_prompts

    def tokenize_and_count(*arguments, **named):
        tokens = tokenize(*arguments, **named)
        prompt_lengths.extend(map(len, tokens[0]))
        return tokens

    trainer._tokenize_prompts = tokenize_and_count
    trainer.train()
    prompt_tokens = sum(prompt_lengths) / len(prompt_lengths)
    import transformers
    import trl

    versions = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    for entry, length, mean in zip(steps, lengths, rewards, strict=True):
        entry |= {"response_length": length, "reward": mean}
    sys.stdout.write(
        "\nRESULT " + json.dumps({"steps": steps, "prompt_tokens": prompt_tokens, "versions": versions}) + "\n"
    )
    sys.stdout.flush()
    os._exit(0)  # an engine in this process may hang at exit


if __name__ == "__main__":
    main()
