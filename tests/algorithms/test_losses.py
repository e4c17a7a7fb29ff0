import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rltrain.algorithms.actor_loss import actor_loss, clip_range

from rltrain.algorithms.aggregation import AGGREGATION_MODES, Denominators, token_weights
from rltrain.algorithms.kl import KL_ESTIMATORS, kl_per_token
from rltrain.algorithms.policy_losses import ClipRange, PolicyLossInputs, vanilla
from rltrain.config.schema import ActorConfig

CLIP = ClipRange(low=0.2, high=0.2, dual=3.0)


def ratio_inputs(ratio: float, advantage: float) -> PolicyLossInputs:
    new = torch.tensor([0.0], dtype=torch.float64).add(ratio).log()
    return PolicyLossInputs(new, torch.zeros(1, dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped", "dual_clipped"),
    [
        (1.0, 2.0, -2.0, 0, 0),
        (1.5, 1.0, -1.2, 1, 0),  # a good answer that got likelier is held at 1 + high
        (0.5, 1.0, -0.5, 0, 0),  # a good answer that got less likely is not
        (0.5, -1.0, 0.8, 1, 0),  # a bad answer that got less likely is held at 1 - low
        (2.0, -1.0, 2.0, 0, 0),
        (9.0, -1.0, 3.0, 0, 1),  # dual clip
    ],
)
def test_vanilla_by_hand(ratio, advantage, loss, clipped, dual_clipped):
    result = vanilla(ratio_inputs(ratio, advantage), CLIP)
    assert float(result.token_losses) == pytest.approx(loss)
    assert float(result.statistics["pg_clipfrac"]) == clipped
    assert float(result.statistics["pg_clipfrac_lower"]) == dual_clipped


def test_vanilla_gradient_by_finite_differences():
    torch.manual_seed(0)
    new = (torch.randn(20, dtype=torch.float64) * 0.3).requires_grad_()
    old, advantages = torch.randn(20, dtype=torch.float64) * 0.3, torch.randn(20, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: vanilla(PolicyLossInputs(x, old, advantages), CLIP).token_losses, (new,))


def test_clip_ratio_alone_works_and_the_pair_wins():
    assert clip_range(ActorConfig(clip_ratio=0.1)) == ClipRange(0.1, 0.1, 3.0)
    assert clip_range(ActorConfig(clip_ratio=0.1, clip_ratio_high=0.28)) == ClipRange(0.1, 0.28, 3.0)


@pytest.mark.parametrize(
    ("kind", "value"), [("kl", 0.5), ("abs", 0.5), ("mse", 0.125), ("low_var_kl", 2.718281828**-0.5 - 1 + 0.5)]
)
def test_kl_estimators_by_hand(kind, value):
    assert float(kl_per_token(torch.tensor([-1.0]), torch.tensor([-1.5]), kind)) == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_a_step_on_the_kl_loss_lowers_the_kl(kind):
    torch.manual_seed(0)
    logits, reference = torch.randn(8, dtype=torch.float64, requires_grad=True), torch.randn(8, dtype=torch.float64)

    def exact() -> torch.Tensor:
        log_pi = torch.log_softmax(logits, -1)
        return (log_pi.exp() * (log_pi - torch.log_softmax(reference, -1))).sum().detach()

    before = float(exact())
    log_pi, log_ref = torch.log_softmax(logits, -1), torch.log_softmax(reference, -1)
    # Expectation over pi of the per-token estimate, differentiated as in training: through the log-prob only.
    (log_pi.exp().detach() * KL_ESTIMATORS[kind](log_pi - log_ref)).sum().backward()
    with torch.no_grad():
        logits -= 0.05 * logits.grad
    assert float(exact()) < before


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=6).filter(sum),
    st.sampled_from(AGGREGATION_MODES),
    st.randoms(use_true_random=False),
)
def test_aggregation_is_the_same_for_any_cut(lengths, mode, random):
    denominators = Denominators(sum(lengths), sum(length > 0 for length in lengths), 8)
    losses = torch.tensor([random.uniform(-1, 1) for _ in range(sum(lengths))])
    whole = float((token_weights(mode, torch.tensor(lengths), denominators) * losses).sum())
    cut, start, total = random.randint(0, len(lengths)), 0, 0.0
    for part in (lengths[:cut], lengths[cut:]):
        weights = token_weights(mode, torch.tensor(part, dtype=torch.long), denominators)
        total += float((weights * losses[start : start + sum(part)]).sum())
        start += sum(part)
    assert total == pytest.approx(whole, abs=1e-6)


def test_aggregation_by_hand():
    lengths, losses = torch.tensor([1, 3]), torch.tensor([4.0, 1.0, 2.0, 3.0])
    denominators = Denominators(tokens=4, sequences=2, max_response_length=10)
    expected = {
        "token-mean": 2.5,
        "seq-mean-token-sum": 5.0,
        "seq-mean-token-mean": 3.0,
        "seq-mean-token-sum-norm": 0.5,
    }
    assert {
        mode: float((token_weights(mode, lengths, denominators) * losses).sum()) for mode in AGGREGATION_MODES
    } == pytest.approx(expected)


def test_entropy_bonus_and_kl_enter_with_their_signs():
    cfg = ActorConfig(entropy_coeff=0.1, kl_loss_coef=0.5, kl_loss_type="kl", use_kl_loss=True)
    inputs = PolicyLossInputs(torch.zeros(2), torch.zeros(2), torch.ones(2))
    result = actor_loss(
        inputs,
        torch.tensor([2]),
        Denominators(2, 1, 4),
        cfg,
        entropy=torch.full((2,), 3.0),
        ref_log_probs=torch.full((2,), -1.0),
    )
    assert float(result.shares["pg_loss"]) == pytest.approx(-1.0)
    assert float(result.loss) == pytest.approx(-1.0 - 0.1 * 3.0 + 0.5 * 1.0)
