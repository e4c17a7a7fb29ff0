"""rltrain sft key=value ...: supervised fine-tuning, with the checkpoints and reports of rltrain train.

It takes the keys of rltrain train, and translates keys of verl's SFT trainer (model.partial_pretrain, optim.lr,
data.max_length and others). Rows have messages, or a prompt and a response; see rltrain train --help sft. Another run
starts from the newest checkpoint with actor_rollout_ref.model.path=RUN.
"""

from __future__ import annotations

import sys

from rltrain.common.errors import ConfigError
from rltrain.config.verl.sft import as_training
from rltrain.main_ppo import main as train


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    if words and words[0] in ("-h", "--help") and len(words) == 1:
        sys.stdout.write(f"usage: rltrain sft [--config FILE] key=value ...\n\n{__doc__}")
        return 0
    try:
        return train(list(as_training(words)))
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
