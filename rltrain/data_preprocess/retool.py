"""Convert the sets of ReTool (Feng et al. 2025) for a run with an interpreter: DAPO-Math-17k for training, AIME 2024 or
2025 for validation.

The answer is the last box. It is scored by retool/*: +1 or -1, and wrong answers lose less if tools were called.
"""

import sys

from rltrain.data_preprocess import aime, dapo_math_17k
from rltrain.data_preprocess.common import At, Row, converter
from rltrain.data_preprocess.sources import Record

HUBS = {"dapo_math_17k": dapo_math_17k.HUB, **aime.HUBS}
INSTRUCTION = "Calculate with the tool python where that helps. Put the final answer in \\boxed{}."


def _row(record: Record, at: At) -> Row:
    if at.options.dataset == "dapo_math_17k":
        converted = dapo_math_17k.verl_row(record, at, "retool/math_dapo")
        *earlier, last = converted["prompt"]
        last = {**last, "content": f"{last['content']}\n\n{at.options.instruction}"}
        converted = converted | {"prompt": [*earlier, last]}
    else:
        converted = aime.to_row(record, at)
        converted = converted | {"data_source": f"retool/{at.options.dataset}"}
    source = converted.pop("data_source")
    return {"data_source": source, "agent_name": "tool_agent", **converted}


main = converter(__doc__, HUBS, _row, name="retool", instruction=INSTRUCTION, unique=True)


if __name__ == "__main__":
    sys.exit(main())
