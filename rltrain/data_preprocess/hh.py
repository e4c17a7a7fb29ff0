"""Convert prompts of preference data for PPO with a reward model: full-hh-rlhf or UltraFeedback (binarized).

A reward model scores these rows. The prompt is one user message, even for a full-hh transcript. The preferred answer is
stored as ground truth but not compared with responses.
"""

import sys

from rltrain.data_preprocess.common import At, Row, converter, row, texts
from rltrain.data_preprocess.sources import Hub, Record

HUBS = {
    "full_hh": Hub("Dahoas/full-hh-rlhf"),
    "ultrafeedback": Hub(
        "HuggingFaceH4/ultrafeedback_binarized", splits={"train": "train_prefs", "test": "test_prefs"}
    ),
}


def _row(record: Record, at: At) -> Row:
    (prompt,) = texts(record, "prompt")
    chosen = record.get("chosen")
    answer = chosen[-1]["content"] if isinstance(chosen, list) and chosen else record.get("response") or chosen or ""
    source = HUBS[at.options.dataset].name
    return row(source, prompt, answer, ability="alignment", style="model", **at.place)


main = converter(__doc__, HUBS, _row, name="hh")


if __name__ == "__main__":
    sys.exit(main())
