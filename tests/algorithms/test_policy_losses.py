import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.algorithms.aggregation import Denominators
from rltrain.algorithms.losses import actor_loss
from rltrain.algorithms.policy_losses import POLICY_LOSSES, BatchMeans, PolicyLossInputs
from rltrain.common.columns.ragged import Ragged
from rltrain.config.schema import ActorConfig, declarations
from tests.algorithms import references as slow

settings.register_profile("quick", max_examples=60, deadline=None)
settings.load_profile("quick")
CFG = ActorConfig(clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=3.0)
LOSSES = {
    "vanilla": lambda n, o, a, m, s: slow.vanilla(n, o, a, 0.2, 0.3, 3.0),
    "gspo": lambda n, o, a, m, s: slow.gspo(n, o, a, 0.2, 0.3, m),
    "gpg": lambda n, o, a, m, s: slow.gpg_loss(n, o, a),
    "cispo": lambda n, o, a, m, s: slow.cispo(n, o, a, 0.2, 0.3),
    "sapo": lambda n, o, a, m, s: slow.sapo(n, o, a, 1.0, 1.05),
    "geo_mean": lambda n, o, a, m, s: slow.geo_mean(n, o, a, 0.2, 0.3, m),
    "clip_cov": lambda n, o, a, m, s: slow.clip_cov(n, o, a, 0.2, 0.3, s),
    "kl_cov": lambda n, o, a, m, s: slow.kl_cov(n, o, a, 0.1, s),
    "dppo_tv": lambda n, o, a, m, s: slow.dppo(n, o, a, 0.2, 0.3, 3.0, "tv"),
    "dppo_kl": lambda n, o, a, m, s: slow.dppo(n, o, a, 0.2, 0.3, 3.0, "kl"),
    "dro": lambda n, o, a, m, s: slow.dro(n, o, a, 0.1),
    "luspo": lambda n, o, a, m, s: slow.gspo(n, o, a, 0.2, 0.3, m),
    "vespo": lambda n, o, a, m, s: slow.vespo(n, o, a, m, (2.0, 3.0), (3.0, 2.0)),
    "topr": lambda n, o, a, m, s: slow.topr(n, o, a, m),
    "real": lambda n, o, a, m, s: slow.real_of(n, o, a, m, GROUP_WEIGHT),
    "m2po": lambda n, o, a, m, s: slow.m2po(n, o, a, s),
    "future_kl": lambda n, o, a, m, s: slow.future_kl(n, o, a, m, 0.2, 0.3, 3.0, *FIPO),
}
GROUP_WEIGHT = 0.4
FIPO = (32.0, 0.2, True, 4.0)
# Their gradient differs from that of their value, because a factor is held constant.
STOPPED = {"gspo", "cispo", "dppo_tv", "dppo_kl", "luspo", "vespo", "topr", "future_kl"}


@st.composite
def rows(draw):
    """Draw for each response: new and old log-probs, advantages, mask, selection."""
    lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(sum))
    log_prob = st.floats(-4, -0.01)
    columns = []
    for n in lengths:
        new, old = (draw(st.lists(log_prob, min_size=n, max_size=n)) for _ in range(2))
        advantages = draw(st.lists(st.sampled_from([-1.5, -0.5, 0.0, 0.7, 2.0]), min_size=n, max_size=n))
        mask = draw(st.lists(st.sampled_from([1.0, 1.0, 0.0]), min_size=n, max_size=n))
        columns.append((new, old, advantages, mask, draw(st.lists(st.booleans(), min_size=n, max_size=n))))
    return columns


def inputs_of(columns, requires_grad=False) -> PolicyLossInputs:
    new, old, advantages, mask, selected = ([x for row in column for x in row] for column in zip(*columns, strict=True))
    lengths = torch.tensor([len(row[0]) for row in columns])
    tensors = [torch.tensor(column, dtype=torch.float64) for column in (new, old, advantages)]
    return PolicyLossInputs(
        tensors[0].requires_grad_(requires_grad),
        *tensors[1:],
        Ragged(torch.tensor(mask, dtype=torch.float64), lengths),
        torch.tensor(selected, dtype=torch.bool),
        torch.full((len(mask),), GROUP_WEIGHT, dtype=torch.float64),
    )


def one(new, old, advantage, selected=False, mask=1.0):
    return inputs_of([([new], [old], [advantage], [mask], [selected])])


def test_every_loss_is_declared_and_has_a_formula():
    assert set(declarations.POLICY_LOSSES) == set(POLICY_LOSSES) == set(LOSSES)
    selecting = {name for name, traits in declarations.POLICY_LOSSES.items() if traits.selects}
    assert selecting == {name for name, entry in POLICY_LOSSES.items() if entry.selection}


@pytest.mark.parametrize("name", LOSSES)
@given(columns=rows())
def test_a_loss_equals_its_loop(name, columns):
    policy_loss = POLICY_LOSSES[name].function(inputs_of(columns), CFG)
    expected = [loss for row in columns for loss in LOSSES[name](*row)]
    assert policy_loss.token_losses.tolist() == pytest.approx(expected, abs=1e-9, rel=1e-9)
    assert all(statistic.shape == policy_loss.token_losses.shape for statistic in policy_loss.statistics.values())


@pytest.mark.parametrize("name", sorted(set(LOSSES) - STOPPED))
def test_the_gradient_is_that_of_finite_differences(name):
    torch.manual_seed(1)
    lengths = torch.tensor([4, 0, 6])
    new = (torch.randn(10, dtype=torch.float64) * 0.3 - 1).requires_grad_()
    old, advantages = torch.randn(10, dtype=torch.float64) * 0.3 - 1, torch.randn(10, dtype=torch.float64)
    mask, selected = Ragged(torch.ones(10, dtype=torch.float64), lengths), torch.arange(10) % 3 == 0

    def losses(x):
        inputs = PolicyLossInputs(x, old, advantages, mask, selected, torch.full((10,), GROUP_WEIGHT))
        return POLICY_LOSSES[name].function(inputs, CFG).token_losses

    assert torch.autograd.gradcheck(losses, (new,))


@pytest.mark.few(4)
@pytest.mark.parametrize("name", sorted(STOPPED))
@given(columns=rows())
def test_a_stopped_loss_has_its_weight_times_A_as_gradient(name, columns):
    """The gradient d loss / d log pi of each token. The loss of cispo, dppo, vespo and topr is weight x -A log pi; that
    of the others is ratio x -A, unless it is clipped."""
    inputs = inputs_of(columns, requires_grad=True)
    POLICY_LOSSES[name].function(inputs, CFG).token_losses.sum().backward()
    expected = []
    for new, old, advantages, mask, selected in columns:
        losses = LOSSES[name](new, old, advantages, mask, selected)
        if name == "future_kl":
            weights = slow.influences(new, old, advantages, mask, 3.0, *FIPO)
            unclipped = [-a * f * math.exp(n - o) for n, o, a, f in zip(new, old, advantages, weights, strict=True)]
            expected += [x if x == pytest.approx(loss) else 0.0 for x, loss in zip(unclipped, losses, strict=True)]
        elif name in ("gspo", "luspo"):
            ratio = math.exp(sum((n - o) * m for n, o, m in zip(new, old, mask, strict=True)) / max(sum(mask), 1))
            expected += [-a * ratio if -a * ratio == loss else 0.0 for a, loss in zip(advantages, losses, strict=True)]
        else:
            expected += [loss / n for loss, n in zip(losses, new, strict=True)]
    assert inputs.log_probs.grad.tolist() == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize(
    ("name", "ratio", "advantage", "loss"),
    [
        ("vanilla", 1.5, 1.0, -1.3),  # a good response that became likelier is clipped at 1 + high
        ("vanilla", 0.5, -1.0, 0.8),  # a bad response that became less likely is clipped at 1 - low
        ("vanilla", 9.0, -1.0, 3.0),  # dual clip
        ("gspo", 9.0, -1.0, 9.0),  # no dual clip
        ("sapo", 1.0, 1.0, -2.0),  # 4 sigmoid(0)
        ("dppo_tv", 2.0, 1.0, 0.0),  # moved by 0.4
        ("dppo_tv", 2.0, -1.0, 2.0 * math.log(0.8)),  # but not in the direction of the advantage
        ("dro", 1.5, 2.0, -2 * math.log(0.6) + 0.05 * math.log(1.5) ** 2),
        ("vespo", 2.0, -1.0, 8 * math.exp(-2) * math.log(0.8)),  # W^3 e^(2 (1 - W))
        ("topr", 2.0, 1.0, -math.log(0.8)),  # a good response has weight 1
        ("topr", 2.0, -1.0, math.log(0.8)),  # a bad response has at most weight 1
        # the influence is the ratio of the following tokens, here of the token itself
        ("future_kl", 1.1, 1.0, -1.1 * 1.1),
    ],
)
def test_losses_by_hand(name, ratio, advantage, loss):
    """The old probability is 0.4."""
    policy_loss = POLICY_LOSSES[name].function(one(math.log(0.4 * ratio), math.log(0.4), advantage), CFG)
    assert float(policy_loss.token_losses) == pytest.approx(loss)


# Scores, labels and groups of responses: ragged groups, a single response, a group with equal scores, only one label,
# extreme scores.
REAL_CASES = {
    "ragged groups": ([0.1, -0.2, 0.3, 0.0, 0.5], [1, -1, 1, 1, -1], [7, 7, 7, 3, 3]),
    "one answer": ([0.4], [-1], [0]),
    "a group that scores alike": ([0.4, 0.1, 0.2, -0.1], [0, 0, 1, -1], [0, 0, 1, 1]),
    "all of them right": ([0.4, 0.1], [1, 1], [0, 0]),
    "nothing has moved": ([0.0] * 4, [1, -1, -1, -1], [0, 0, 0, 0]),
    "far out": ([-19.0, 19.0, 18.0], [1, 1, -1], [2, 2, 2]),
}


@pytest.mark.parametrize("case", REAL_CASES)
def test_real_has_the_gradient_of_the_papers_loss(case):
    scores, labels, groups = REAL_CASES[case]
    tensor = torch.tensor(scores, dtype=torch.float64, requires_grad=True)
    slow.real(list(tensor), labels, groups, 0.5).backward()
    weights = POLICY_LOSSES["real"].group_weights(
        tensor.detach(), torch.tensor(labels, dtype=torch.float64), torch.tensor(groups), CFG
    )
    # Responses of three tokens and of one, by the function over tokens, with its mean over responses.
    lengths, own = torch.tensor([3, *[1] * (len(scores) - 1)]), tensor.detach().clone().requires_grad_()
    weights *= len(scores) / len(set(groups))  # as `selection.weigh`
    mask = Ragged(torch.ones(int(lengths.sum()), dtype=torch.float64), lengths)
    spread = [mask.broadcast(column).values for column in (own, torch.tensor(labels).double(), weights)]
    inputs = PolicyLossInputs(spread[0], torch.zeros_like(spread[0]), spread[1], mask, group_weights=spread[2])
    denominators = Denominators(int(lengths.sum()), len(scores), 8)
    real, aggregation = POLICY_LOSSES["real"].function, declarations.POLICY_LOSSES["real"].aggregation
    actor_loss(inputs, denominators, CFG, real, aggregation).loss.backward()
    assert own.grad.tolist() == pytest.approx(tensor.grad.tolist(), abs=1e-12)


@pytest.mark.few(8)
@pytest.mark.parametrize("name", LOSSES)
@given(columns=rows())
def test_a_silent_loss_has_no_gradient_without_advantage(name, columns):
    silent = [(new, old, [0.0] * len(new), mask, selected) for new, old, _, mask, selected in columns]
    inputs = inputs_of(silent, requires_grad=True)
    POLICY_LOSSES[name].function(inputs, CFG).token_losses.sum().backward()
    if declarations.POLICY_LOSSES[name].silent_at_zero:
        assert (inputs.log_probs.grad == 0).all()


def test_the_losses_that_select_tokens_promise_nothing():
    loud = {name for name, traits in declarations.POLICY_LOSSES.items() if not traits.silent_at_zero}
    assert loud == {"clip_cov", "kl_cov", "dro", "m2po"}
    inputs = one(math.log(0.6), math.log(0.4), 0.0, selected=True)
    inputs.log_probs.requires_grad_()
    POLICY_LOSSES["kl_cov"].function(inputs, CFG).token_losses.sum().backward()
    assert float(inputs.log_probs.grad) != 0


def test_an_infinite_loss_of_a_masked_token_counts_for_nothing():
    columns = [([-1.0, math.inf], [-1.0, -1.0], [1.0, 1.0], [1.0, 0.0], [False, False])]
    share = actor_loss(inputs_of(columns), Denominators(1, 1, 8), CFG, POLICY_LOSSES["gpg"].function, "token-mean")
    assert float(share.loss) == 1.0


# -- selections -------------------------------------------------------------------------------------------------------


def test_clip_cov_draws_within_the_bounds_among_unclipped_tokens():
    cfg = ActorConfig(clip_ratio=0.2)
    cfg.policy_loss.clip_cov_lb, cfg.policy_loss.clip_cov_ub = 0.5, 2.0
    # Covariance (A - 0)(log pi + 1); the third token's ratio is beyond the clip, the last is masked out.
    new, old = [0.0, 0.5, 0.0, 4.0, 0.0], [0.0, 0.5, -1.0, 4.0, 0.0]
    inputs = inputs_of([(new, old, [1.0, -1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0, 0.0], [False] * 5)])
    noise = torch.arange(5, dtype=torch.float64) / 10
    keys = POLICY_LOSSES["clip_cov"].selection.keys(inputs, noise, BatchMeans(0.0, -1.0), cfg)
    assert keys.tolist() == [0.0, math.inf, math.inf, math.inf, math.inf]


@pytest.mark.parametrize(
    ("name", "ratio", "advantage", "clipped"),
    [
        ("vanilla", 1.5, 1.0, 1),
        ("gspo", 0.5, -1.0, 1),
        ("cispo", 1.5, 1.0, 1),
        ("cispo", 0.5, 1.0, 1),  # the weight is raised as well as lowered
        ("geo_mean", 1.5, 1.0, 1),
        ("geo_mean", 1.5, -1.0, 0),  # pessimistic: not in this direction
        ("dppo_tv", 2.0, 1.0, 1),
        ("dppo_kl", 2.4, 1.0, 1),
    ],
)
def test_the_share_of_clipped_tokens_by_hand(name, ratio, advantage, clipped):
    """The old probability is 0.4."""
    inputs = one(math.log(0.4 * ratio), math.log(0.4), advantage)
    statistics = POLICY_LOSSES[name].function(inputs, CFG).statistics
    assert float(statistics["pg_clipfrac"]) == clipped
    assert float(statistics["ppo_kl"]) == pytest.approx(-math.log(ratio))


@pytest.mark.few(8)
@pytest.mark.parametrize("name", LOSSES)
@given(columns=rows(), cut=st.integers(0, 4), random=st.randoms(use_true_random=False))
def test_any_cut_and_order_give_the_same_loss(name, columns, cut, random):
    counted = [sum(mask) for _, _, _, mask, _ in columns]
    denominators = Denominators(int(sum(counted)), sum(count > 0 for count in counted), 8)

    def loss(rows):
        function = POLICY_LOSSES[name].function
        share = actor_loss(inputs_of(rows), denominators, CFG, function, "seq-mean-token-mean") if rows else None
        return float(share.loss) if share else 0.0

    whole = loss(columns)
    assert loss(columns[:cut]) + loss(columns[cut:]) == pytest.approx(whole, abs=1e-9)
    nothing, masked = ([], [], [], [], []), ([-1.0, -2.0], [-3.0, -1.0], [1.0, 1.0], [0.0, 0.0], [False, True])
    mixed = [*columns, nothing, masked]
    random.shuffle(mixed)
    assert loss(mixed) == pytest.approx(whole, abs=1e-9)
