"""verl's side of bench.step: verl 0.5.0 on the same files, in a separate environment, on the CPU.

    PEER_PYTHON bench/step_verl.py '{"folder": ..., "limit": 128, ...}'      prints one line of JSON at the end

verl 0.5.0 has no CPU path. `run_on_cpu` replaces device calls in each of its processes: memory functions do nothing,
process groups use gloo, attention is SDPA instead of flash-attention, and FSDP gets the CPU. Ray counts a GPU that
does not exist. The training loop, the padding and `rollout.name=hf` are verl's. Imports nothing of rltrain.
"""

import copy
import json
import os
import shutil
import sys
import time

STARTED = time.perf_counter()


def run_on_cpu() -> None:
    """Replace verl's device calls. Ray calls it in each process before any other code."""
    import torch
    from torch.distributed import fsdp

    task = json.loads(os.environ["STEP_VERL_TASK"])
    torch.set_num_threads(1)
    torch.manual_seed(task["seed"])  # verl has no seed of sampling
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(torch.cpu, name, lambda *_: 0)
    torch.cpu.mem_get_info = lambda *_: (0, 0)
    torch.cpu.empty_cache = torch.cpu.set_device = lambda *_: None
    torch.cpu.current_device = torch.cpu.get_device_name = lambda *_: "cpu"
    start_group = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda *_, backend=None, **named: start_group(backend="gloo", **named)
    build = fsdp.FullyShardedDataParallel.__init__

    def build_on_cpu(self, *arguments, **named):
        named |= {"device_id": torch.device("cpu"), "sync_module_states": False, "cpu_offload": None}
        if task["dtype"] == "float32":
            named["mixed_precision"] = None
        build(self, *arguments, **named)

    fsdp.FullyShardedDataParallel.__init__ = build_on_cpu
    if task["dtype"] == "float32":
        torch.autocast = lambda *_, **__: torch.amp.autocast("cpu", enabled=False)

    import transformers
    import verl.utils.device
    from verl.utils.tracking import Tracking
    from verl.workers.rollout.hf_rollout import HFRollout

    verl.utils.device.get_nccl_backend = lambda: "gloo"
    load = transformers.AutoConfig.from_pretrained

    def load_without_flash_attention(*arguments, **named):
        return load(*arguments, **named | {"attn_implementation": "sdpa"})

    transformers.AutoConfig.from_pretrained = load_without_flash_attention

    start = HFRollout.__init__

    def start_rollout(self, module, config):
        start(self, module, copy.deepcopy(config))
        self.config.n = 1  # the trainer repeats the prompts already

    HFRollout.__init__ = start_rollout

    def log(self, data, step, backend=None):
        with open(os.path.join(task["folder"], "verl.jsonl"), "a") as file:
            numbers = {name: float(value) for name, value in data.items()}
            file.write(json.dumps(numbers | {"to_here": time.time()}) + "\n")

    Tracking.log = log


def copy_model(folder: str) -> None:
    """Copy the model to verl_model/, with the name that transformers 4 has for the class of its tokenizer."""
    target = os.path.join(folder, "verl_model")
    shutil.copytree(os.path.join(folder, "model"), target, dirs_exist_ok=True)
    path = os.path.join(target, "tokenizer_config.json")
    with open(path) as file:
        config = json.load(file)
    with open(path, "w") as file:
        json.dump(config | {"tokenizer_class": "PreTrainedTokenizerFast"}, file)


def overrides(task: dict) -> list[str]:
    """Return verl's keys, with the values of `bench.step.run_ours`."""
    folder, prompts, answers = task["folder"], task["prompts"], task["answers"]
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return [
        "algorithm.adv_estimator=grpo", f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/train.parquet", f"data.train_batch_size={prompts}",
        f"data.max_prompt_length={task['longest']}", f"data.max_response_length={task['limit']}",
        "data.shuffle=False", "data.dataloader_num_workers=0", f"actor_rollout_ref.model.path={folder}/verl_model",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "actor_rollout_ref.model.use_remove_padding=False",
        f"{actor}.ppo_mini_batch_size={prompts // task['updates']}",
        f"{actor}.ppo_micro_batch_size_per_gpu={task['micro_batch']}", f"{actor}.optim.lr={task['lr']}",
        f"{actor}.use_kl_loss={task['kl'] > 0}", f"{actor}.kl_loss_coef={task['kl']}",
        f"{actor}.use_torch_compile=False", f"{actor}.fsdp_config.forward_prefetch=False",
        f"{rollout}.name=hf", f"{rollout}.mode=sync", f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.n={answers}",
        f"{rollout}.log_prob_micro_batch_size_per_gpu={task['micro_batch']}",
        f"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu={task['micro_batch']}",
        f"custom_reward_function.path={folder}/reward.py", "custom_reward_function.name=reward",
        "trainer.device=cpu", "trainer.n_gpus_per_node=1", "trainer.nnodes=1", "trainer.logger=[]",
        f"trainer.total_training_steps={task['steps']}", "trainer.total_epochs=1000", "trainer.val_before_train=False",
        "trainer.test_freq=-1", "trainer.save_freq=-1", "trainer.resume_mode=disable",
        f"trainer.default_local_dir={folder}/verl",
    ]  # fmt: skip


def main() -> None:
    task = json.loads(sys.argv[1])
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment = threads | {"HF_HUB_OFFLINE": "1", "STEP_VERL_TASK": sys.argv[1]}
    os.environ |= environment
    log = os.path.join(task["folder"], "verl.jsonl")
    if os.path.exists(log):
        os.remove(log)
    copy_model(task["folder"])
    import hydra
    import ray

    started = time.time() - (time.perf_counter() - STARTED)
    ray.init(
        address="local", num_cpus=8, num_gpus=1, resources={"cpu": 1}, include_dashboard=False,
        runtime_env={"env_vars": environment, "worker_process_setup_hook": run_on_cpu},
    )  # fmt: skip
    run_on_cpu()
    from verl.trainer.main_ppo import run_ppo

    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        run_ppo(hydra.compose("ppo_trainer", overrides=overrides(task)))
    import torch
    import transformers

    phases = ("gen", "old_log_prob", "ref", "update_actor", "step")
    steps = []
    with open(log) as file:
        for line in map(json.loads, file):
            steps.append(
                {phase: line.get(f"timing_s/{phase}", 0.0) for phase in phases}
                | {"response_length": line["response_length/mean"], "prompt_length": line["prompt_length/mean"],
                   "reward": line["critic/score/mean"], "to_here": line["to_here"] - started}
            )  # fmt: skip
    versions = {"verl": "0.5.0", "transformers": transformers.__version__, "torch": torch.__version__}
    prompt_tokens = sum(step["prompt_length"] for step in steps) / len(steps)
    result = {"steps": steps, "prompt_tokens": prompt_tokens, "versions": versions}
    sys.stdout.write("\nRESULT " + json.dumps(result) + "\n")
    sys.stdout.flush()
    ray.shutdown()


if __name__ == "__main__":
    main()
