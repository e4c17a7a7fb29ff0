"""Convert DAPO-Math-17k (BytedTsinghua-SIA/DAPO-Math-17k): already in verl's schema, each prompt about 100 times.

Every prompt is kept once, with its instruction. Deduplicated copies, whose prompt is in ``source_prompt``, are
supported too.
"""

import sys
from typing import Any

from rltrain.common.errors import DataError
from rltrain.data_preprocess.common import At, Row, converter, row
from rltrain.data_preprocess.sources import Hub, Record

HUB = Hub("BytedTsinghua-SIA/DAPO-Math-17k", splits={"train": "train"})


def verl_row(record: Record, at: At, data_source: str) -> Row:
    """Return the row of a record in verl's schema, with its messages and ground truth."""
    messages, reward = record.get("source_prompt") or record.get("prompt"), record.get("reward_model")
    if not isinstance(messages, list) or not isinstance(reward, dict) or reward.get("ground_truth") is None:
        raise DataError("it must hold 'prompt' (messages) and 'reward_model.ground_truth'.")
    index: Any = (record.get("extra_info") or {}).get("index")
    extra = {} if index is None else {"id": str(index)}
    truth = str(reward["ground_truth"])
    return row(data_source, messages, truth, ability="math", extra=extra, **at.place)


main = converter(__doc__, HUB, lambda record, at: verl_row(record, at, "math_dapo"), name="dapo_math_17k", unique=True)


if __name__ == "__main__":
    sys.exit(main())
