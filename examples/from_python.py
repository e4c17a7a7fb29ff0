"""A notebook in one file: GRPO with code of one's own, step by step, and an evaluation of what came of it.

    python examples/from_python.py MODEL TRAIN.parquet VAL.parquet RUN_FOLDER [key=value ...]

Data in verl's schema (rltrain data gsm8k --help makes some); docs/api.md explains every call.
"""

import re
import sys

import rltrain


def last_number(data_source, solution_str, ground_truth, extra_info=None):
    """Reward 1 for an answer whose last number is right, 0.1 for one with any number."""
    numbers = re.findall(r"-?\d+", solution_str)
    right = bool(numbers) and numbers[-1] == str(ground_truth)
    return {"score": 1.0 if right else 0.1 * bool(numbers), "acc": float(right)}


def centered(inputs, cfg):
    """A_i = r_i - mean reward of the answers to the same prompt."""
    import torch

    num_groups = int(inputs.groups.max()) + 1
    sums = torch.zeros(num_groups, dtype=inputs.scores.dtype).index_add(0, inputs.groups, inputs.scores)
    return inputs.scores - (sums / inputs.groups.bincount(minlength=num_groups).clamp(min=1))[inputs.groups]


class History:
    """A callback: keeps the rewards of the run."""

    def __init__(self):
        self.rewards = []

    def on_step(self, step, metrics):
        self.rewards.append(metrics["critic/rewards/mean"])


def main():
    model, train_file, val_file, folder, *further = sys.argv[1:]
    words = [f"actor_rollout_ref.model.path={model}", f"data.train_files={train_file}", f"data.val_files={val_file}"]
    config = rltrain.load_config([*words, f"trainer.default_local_dir={folder}", *further])
    history = History()
    with rltrain.build(config, reward=last_number, advantage=centered, callbacks=[history]) as trainer:
        first = trainer.step()
        sys.stdout.write(f"after one step: loss {first['actor/pg_loss']:.3f}, {trainer.num_steps} step made\n")
        trainer.fit()  # the other steps of the plan, with validation and checkpoints
    sys.stdout.write(f"mean rewards: {' '.join(f'{reward:.2f}' for reward in history.rewards)}\n")
    answers = rltrain.read_samples(folder)
    sys.stdout.write(f"{len(answers)} answers of the last step were kept; the best: {answers['score'].max():g}\n")
    metrics = rltrain.evaluate(
        {"actor_rollout_ref": {"model": {"path": model}}, "data": {"val_files": val_file},
         "trainer": {"default_local_dir": f"{folder}/base", "device": config.config.trainer.device}},
        reward=last_number,
    )  # fmt: skip
    found = {name: value for name, value in metrics.items() if name.startswith("val-core/")}
    sys.stdout.write(f"the model before training: {found}\n")


if __name__ == "__main__":
    main()
