"""Help texts of keys of losses: a text that begins with the name of a loss belongs to a key that this loss reads."""

import inspect
import re
from itertools import pairwise

import pytest

from rltrain.algorithms import policy_losses
from rltrain.config.schema.policy_loss import PolicyLossConfig

PARTS = re.split(r"(?m)^(?=@built_in)", inspect.getsource(policy_losses))
# A loss with the functions before it, which select its tokens.
CODE = {re.search(r"(?m)^def (\w+)", part)[1]: before + part for before, part in pairwise(PARTS)}
TEXTS = dict(re.findall(r'(?m)^    (\w+): .*\n    """(\w+): ', inspect.getsource(PolicyLossConfig)))


@pytest.mark.parametrize("key", TEXTS)
def test_the_help_of_a_key_names_the_loss_that_reads_it(key):
    assert key in CODE[TEXTS[key]]


def test_most_keys_name_their_loss():
    assert len(TEXTS) > 10
