"""``rltrain resolution model=PATH dev=FILES test=FILES [key=value ...]``: Find the best image resolution.

model=PATH          as for rltrain evaluate: a Hugging Face folder or hub name, a run, or RUN/global_step_N
dev=FILES           rows for the search; several as A,B
test=FILES          other rows, on which the chosen and the default bounds are scored
min_pixels=A,B      bounds to try, none for no bound: all combinations of both; without either, a quarter, half,
max_pixels=A,B      twice and four times the pixels that images have by default
n=N temperature=T   responses per prompt (1), and their temperature (0: greedy)
out=FOLDER          folder of the results (default: resolution/NAME next to the model)
--config FILE       settings of a file, such as RUN/config.yaml
--dry-run           show the settings, their image tokens, and the problems of the search
key=value           any key of training; data.min_pixels and data.max_pixels are the default bounds
Exit code 0: done; 2: an argument is wrong; 130 or 75: stopped, and the same command resumes.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack

from rltrain.common import logs
from rltrain.common.stop import Stop
from rltrain.main_ppo import main as guarded
from rltrain.run.program import explained
from rltrain.tools.resolution.request import read_search


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return guarded(argv, explained(str(__doc__), _search))


def _search(arguments: argparse.Namespace, stop: Stop) -> int:
    stop.says("no response yet: the same command starts again")
    request = read_search(arguments.overrides, arguments.config, arguments.problems)
    # Import here, so that --help and errors of the arguments do not wait for it.
    from rltrain.run.build import begin_ray
    from rltrain.tools.resolution.search import RESULT, search, show_search, show_settings
    from rltrain.tools.resolution.settings import find_settings

    with logs.session():
        settings = find_settings(request)
    show_settings(settings)
    if arguments.dry_run:
        return 0
    with ExitStack() as closing:
        with logs.session():
            begin_ray(request.on("dev").settings(request.model).config, stop, closing)
        result = search(request, settings, stop)
    show_search(result)
    sys.stdout.write(f"{request.root / RESULT}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
