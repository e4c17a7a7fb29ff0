"""``rltrain simulate key=value ...``: Estimate the seconds of a step, as rltrain train … --dry-run --device CHIP.

key=value            any key of training; only config.json of the model is read, and nothing of the data
--device CHIP        such as H100, H20, 910B3 (default: the device of this machine)
--nodes N            trainer.nnodes=N
--lengths LENGTHS    mean:10426,max:27648 (with spread:, alike:, prompt:), or the folder of a run for the lengths of
                     its saved samples (default: half of data.max_response_length on average)
--assume A=X,B=Y     other assumptions; all are printed with the result
--config FILE        settings of a file
Exit code 0: estimated; 2: an argument is wrong, or a device would be out of memory.
"""

from __future__ import annotations

import sys

from rltrain.main_ppo import dry_run
from rltrain.main_ppo import main as guarded
from rltrain.run.program import explained


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    program = explained(str(__doc__), lambda arguments, stop: dry_run(arguments), estimates=True)
    return guarded(["--dry-run", "--device", "", *words], program)


if __name__ == "__main__":
    sys.exit(main())
