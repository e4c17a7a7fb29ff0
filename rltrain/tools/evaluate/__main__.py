"""``rltrain evaluate model=PATH data=FILES [key=value ...]``: Report scores of models, with confidence intervals.

model=PATH          a Hugging Face folder or hub name, a run folder (its newest checkpoint) or RUN/global_step_N;
                    several as A,B or as a pattern. Settings of a run's validation (lengths, reward, sampling,
                    template) are read from its config.yaml unless they are given here
data=FILES          data files as for training; several as A,B
n=N                 responses per prompt (1)
temperature=T       0: greedy
out=FOLDER          folder of the results (default: evaluation/NAME next to the model)
--config FILE       settings of a file, such as RUN/config.yaml
--dry-run           show the settings and the problems of the evaluation
key=value           any key of training: actor_rollout_ref.rollout.name=vllm, data.max_response_length=4096 …
Exit code 0: done; 2: an argument is wrong; 130 or 75: stopped, and the same command resumes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from rltrain.common import logs
from rltrain.common.errors import ConfigError
from rltrain.common.imports import IMPORTING
from rltrain.common.stop import Stop
from rltrain.config.loaded import LoadedConfig
from rltrain.main_ppo import main as guarded
from rltrain.run.program import explained
from rltrain.tools.evaluate.arguments import split_arguments


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return guarded(argv, explained(str(__doc__), _evaluate))


def _evaluate(arguments: argparse.Namespace, stop: Stop) -> int:
    split_arguments(arguments.overrides, arguments.problems)
    # Import here, so that --help and errors of the arguments do not wait for it.
    with logs.session(), logs.waiting(IMPORTING):
        from pandas import read_parquet

        from rltrain.api import check_settings
        from rltrain.common.storage import write_json
        from rltrain.run.build import begin_ray
        from rltrain.tools.evaluate.evaluation import evaluate_model, result_folder_of
        from rltrain.tools.evaluate.page import write_page
        from rltrain.tools.evaluate.paired import differences
        from rltrain.tools.evaluate.report import show
        from rltrain.tools.evaluate.request import read_request
        from rltrain.tools.evaluate.results import PAGE, RESULT, RESULTS

    stop.says("no response yet: the same command starts again")
    request = read_request(arguments.overrides, arguments.config, arguments.problems)
    several = len(request.models) > 1
    results = list[dict[str, Any]]()
    settings = [request.settings(model) for model in request.models]
    # All settings are checked before the first evaluation. Otherwise a problem of the last one would be reported after
    # hours.
    notes = [check_settings(loaded) for loaded in settings]
    for model, loaded in zip(request.models, settings, strict=True):
        result_folder_of(request, model, loaded)
    if used := request.run_settings_in_use(settings[0]):
        sys.stdout.write(f"settings of the run: {' '.join(used)} (type a key to set it otherwise)\n")
    if arguments.dry_run:
        return _dry_run(settings, notes)
    with ExitStack() as closing:
        if several:
            with logs.session():
                begin_ray(settings[0].config, stop, closing)
        for model in request.models:
            with logs.session():  # each evaluation has a separate train.log
                results.append(evaluate_model(request, model, stop))
    folder = request.root if several else request.folder(request.models[0])
    file = folder / (RESULTS if several else RESULT)
    answers = (request.folder(model) / one["answers"] for model, one in zip(request.models, results, strict=True))
    paired = differences(results, map(read_parquet, answers)) if several else []
    if several:
        write_json(file, {"evaluations": results, "differences": paired})
    write_page(folder / PAGE, results)
    show(results, paired)
    sys.stdout.write(f"{file}\nanswers: rltrain view {request.folder(request.models[0])} --val\n")
    return 0


def _dry_run(settings: Sequence[LoadedConfig], notes: Sequence[list[str]]) -> int:
    from rltrain.run.dry_run import dry_run

    refusals = []
    for loaded, its_notes in zip(settings, notes, strict=True):
        text, refused = dry_run(loaded, its_notes)
        sys.stdout.write(text)
        refusals.append(refused)
    return ConfigError.exit_code if any(refusals) else 0


if __name__ == "__main__":
    sys.exit(main())
