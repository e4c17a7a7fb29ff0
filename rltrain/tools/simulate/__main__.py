"""``python -m rltrain.simulate key=value ... --lengths LENGTHS [--device CHIP]``: what a step would take.

  key=value            any key of training; of the model only its config.json is read, of the data nothing
  --device CHIP        such as H100, H20, 910B3; without it the device of this machine, or that of --from
  --nodes N            trainer.nnodes=N
  --lengths LENGTHS    mean:10426,max:27648 (with spread:, alike:, prompt:), a file with a number of tokens in each
                       line, or the folder of a run, whose kept answers count
  --from RUN           the settings, lengths and seconds of a run: its ratios correct what is foretold
  --assume A=X,B=Y     other assumptions; all are printed with the result
  --sweep              key=a,b means each; prints the best combinations that fit a device, and why
  --best N             of a sweep (5)
  --config FILE        settings of a file
Exit code 0: foretold; 2: something is wrong with what was given.
"""

from __future__ import annotations

import argparse
import sys

from rltrain.base.errors import ConfigError, short
from rltrain.base.program import explained
from rltrain.base.stop import Stop
from rltrain.main_ppo import main as guarded


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in ("--device", "--nodes", "--lengths", "--assume"):
        parser.add_argument(flag)
    parser.add_argument("--from", dest="run")
    parser.add_argument("--best", default="5")
    parser.add_argument("--sweep", action="store_true")
    wrong, own = "", argparse.Namespace()
    try:
        own, words = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    except argparse.ArgumentError as error:
        wrong, words = f"{error}. See --help.", []

    def program(arguments: argparse.Namespace, stop: Stop) -> int:
        if wrong:
            raise ConfigError(wrong)
        return _simulate(own, arguments)

    return guarded(words, explained(str(__doc__), program))


def _simulate(own: argparse.Namespace, arguments: argparse.Namespace) -> int:
    # Imported here, so that --help need not wait for it.
    from rltrain.run.preflight.memory_room import look_at_memory
    from rltrain.tools.simulate.report import calibrated, describe
    from rltrain.tools.simulate.request import read_request

    if not own.best.isdecimal() or not int(own.best):
        raise ConfigError(f"--best {short(own.best)} is no number of combinations. Give 1 or more.")
    request = read_request(own, arguments)
    if request.calibration:
        sys.stdout.write(calibrated(request.calibration))
    if own.sweep:
        from rltrain.tools.simulate.sweep import sweep

        sys.stdout.write(sweep(request, int(own.best)))
        return 0
    loaded, plan, found = request.foretell(request.words)
    sys.stdout.write(describe(found, plan, request))
    sys.stdout.flush()
    config = loaded.config
    if size := request.memory_bytes(loaded):
        config.trainer.device_memory_gb = size / 2**30
    lines, too_large = look_at_memory(config, plan)
    sys.stdout.write("\n".join([*lines, *([f"it would run out of memory: {too_large}"] if too_large else [])]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
