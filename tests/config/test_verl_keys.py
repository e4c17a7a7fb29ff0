"""The keys that most published verl scripts set, most frequent first, each with a value they give it."""

from pathlib import Path

import pytest

from rltrain.base.errors import ConfigError
from rltrain.config.load import load_config

RANKED = [line for line in (Path(__file__).parent / "verl_keys.txt").read_text().splitlines() if line]


@pytest.mark.parametrize("override", RANKED, ids=lambda override: override.partition("=")[0])
def test_a_common_key_is_accepted_or_answered_with_what_to_use(override):
    answered = ("megatron.", "data_parallel_size=")
    here_too = override.endswith(("parallel_size=1", "=False", "=null"))  # as it is without the backend
    if here_too or not any(part in override for part in answered):
        load_config([override])
        load_config([f"+{override}"])
    else:
        with pytest.raises(ConfigError, match=r"[Uu]se|leave|single-turn") as caught:
            load_config([override])
        assert "unknown key" not in str(caught.value)
