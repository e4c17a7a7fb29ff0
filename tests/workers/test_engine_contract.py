"""The contract of all rollout engines, tested on each of them."""

import copy
import importlib.util
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rltrain.config.schema import engines
from rltrain.data.images import EncodedPrompt
from rltrain.models.weights.names import Weight
from rltrain.workers.rollout.contract import Sampling
from tests.distance import distance
from tests.workers.engines import (
    EOS,
    Talk,
    engine_of,
    generate,
    jobs_of,
    queue_of,
    rollout_of,
    running_engine,
    serve,
    settings_of,
    text_of,
)
from tests.workers.sglang_double import sglang_engine

LONGEST = 64
PROMPTS = [np.array(ids, dtype=np.int32) for ids in ([2, 5, 6, 3], [2, 7, 3], [2, 8, 9, 10, 11, 3], [4])]
# SGLang's real engine takes a minute to start; its double takes the arguments of the real one and computes with
# transformers. "vllm drafts" decodes speculatively, and has so few tokens in a step that prompts come in pieces. vLLM
# as on a CPU: test_moe_engines.py and test_replicas.py.
ENGINES = [
    "hf",
    "vllm as on accelerators",
    pytest.param("vllm", marks=pytest.mark.long),
    pytest.param("vllm drafts", marks=pytest.mark.long),
    "sglang double",
    *(["sglang"] if importlib.util.find_spec("sglang") else []),
]
# vLLM and what it imports warn of their own affairs.
pytestmark = pytest.mark.filterwarnings("ignore")


def weights_of(model):
    """Return every weight and buffer, with the buffers that a checkpoint reader does not have."""
    for name, weight in model.named_parameters():
        yield Weight(name, weight.detach())
    for name, buffer in model.named_buffers():
        yield Weight(name, buffer, in_checkpoint=False)


def load(engine, weights) -> None:
    engine.wake_weights()
    engine.load_weights(weights)
    engine.wake_cache()


@pytest.fixture(scope="module")
def plain(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model).eval()


@pytest.fixture(scope="module")
def other(plain):
    """Return other weights for the same model."""
    changed = copy.deepcopy(plain)
    with torch.no_grad():
        for number, parameter in enumerate(changed.parameters()):
            torch.manual_seed(number)
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return changed


@pytest.fixture(scope="module", params=ENGINES)
def engine(request, tiny_model):
    name, _, how = request.param.partition(" ")
    # Blocks of the cache that short prompts fill; drafts come beside prompts in pieces.
    keys = {"max_num_seqs": 8, "engine_kwargs": {"vllm": {"block_size": 32}}}
    rollout = rollout_of(
        name=name, **keys, **({"tail": "exact", "max_num_batched_tokens": 16} if how == "drafts" else {})
    )
    if name == "sglang":
        running = sglang_engine(str(tiny_model), rollout, double=how == "double")
    else:
        running = running_engine(settings_of(str(tiny_model), rollout), accelerated="accelerators" in how)
    with running as found:
        yield found


@pytest.fixture
def ready(engine, plain):
    """The engine with the weights of ``plain``."""
    load(engine, weights_of(plain))
    yield engine
    engine.sleep()


@pytest.fixture
def seeded(request):
    if engine_name(request) == "sglang":
        pytest.skip("SGLang's seeded sampling does not run on the CPU")


def log_probs_of(model, prompt, answer, temperature=1.0):
    """Return the trainer's log-probs of a response."""
    ids = torch.tensor([*prompt.tolist(), *answer])
    with torch.no_grad():
        logits = model(ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1].float() / temperature
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(answer)[:, None])[:, 0]


def greedy(model, prompt, length=12, **keys):
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    generated = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False, pad_token_id=0, **keys
    )
    return generated[0, len(prompt) :].tolist()


def answers(generation) -> list[list[int]]:
    return [row.tolist() for row in generation.tokens.rows()]


@pytest.mark.smoke("vLLM and the embedded engine generate what transformers generates", cases=2)
@pytest.mark.few(2)
def test_greedy_answers_are_those_of_transformers(ready, plain):
    generated = generate(ready, Sampling(12, greedy=True), PROMPTS, 1)
    assert answers(generated) == [greedy(plain, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(12),
        Sampling(12, temperature=0.6),
        Sampling(12, temperature=1.7, top_k=4),
        Sampling(12, top_p=0.7),
        Sampling(12, temperature=1.3, min_p=0.1),
        Sampling(12, temperature=0.6, repetition_penalty=1.7),
        Sampling(12, greedy=True, repetition_penalty=1.7),
    ],
)
def test_log_probs_are_the_trainers_before_penalty_top_k_top_p_and_min_p(ready, plain, sampling, request):
    lacks(request, "penalises", sampling.repetition_penalty != 1)
    generated = generate(ready, sampling, PROMPTS, 3)
    rows = zip(answers(generated), generated.log_probs.rows(), itertools.count())
    for answer, log_probs, number in rows:
        expected = log_probs_of(plain, PROMPTS[number // 3], answer, sampling.temperature)
        assert distance(log_probs, expected) < 1e-5


def engine_name(request) -> str:
    return request.node.callspec.params["engine"]


def lacks(request, capability: str, needed: bool = True) -> None:
    """Drafts do not support a penalty (`tail=exact` refuses it)."""
    name = engine_name(request)
    if needed and (not getattr(engines.ENGINES[name.split()[0]], capability) or name == "vllm drafts"):
        pytest.skip(f"{name} is refused with it")


@pytest.mark.parametrize("penalty", [1.7, 0.6])
def test_a_penalty_counts_prompt_and_answer_as_transformers_does(ready, plain, penalty, request):
    lacks(request, "penalises")
    generated = generate(ready, Sampling(12, greedy=True, repetition_penalty=penalty), PROMPTS, 1)
    expected = [greedy(plain, prompt, repetition_penalty=penalty) for prompt in PROMPTS]
    assert answers(generated) == expected
    assert expected != [greedy(plain, prompt) for prompt in PROMPTS]


def test_a_stop_text_ends_an_answer_with_the_token_that_completes_it(ready, request):
    lacks(request, "stops")
    whole = answers(generate(ready, Sampling(12, ignore_eos=True), PROMPTS, 2))
    stops = tuple(text_of(answer[start : start + 2]) for answer, start in zip(whole, (3, 0, 10), strict=False))
    generated = generate(ready, Sampling(12, ignore_eos=True, stop=stops), PROMPTS, 2)
    ends = [
        min((text_of(answer).find(stop) + 2 for stop in stops if stop in text_of(answer)), default=12)
        for answer in whole
    ]
    assert answers(generated) == [answer[:end] for answer, end in zip(whole, ends, strict=True)]
    assert sum(end < 12 for end in ends) >= 2
    stopped = [any(stop in text_of(answer) for stop in stops) for answer in whole]
    assert generated.truncated.tolist() == [not there for there in stopped]
    assert [len(row) for row in generated.log_probs.rows()] == ends
    # The next call knows nothing of them.
    assert answers(generate(ready, Sampling(12, ignore_eos=True), PROMPTS, 2)) == whole


def distribution(engine, sampling, prompt, count=400):
    generated = generate(engine, sampling, [prompt] * (count // 8), 8)
    return np.bincount([answer[0] for answer in answers(generated)], minlength=20) / count


@pytest.mark.few(2)
def test_every_sampling_key_has_its_effect(ready, plain):
    prompt = PROMPTS[0]
    with torch.no_grad():
        probs = plain(torch.from_numpy(prompt.astype(np.int64))[None]).logits[0, -1].softmax(-1)
    order = probs.argsort(descending=True).tolist()
    assert np.abs(distribution(ready, Sampling(1), prompt) - probs.numpy()).max() < 0.1
    assert set(np.flatnonzero(distribution(ready, Sampling(1, top_k=2), prompt))) <= set(order[:2])
    kept = order[: int((probs[order].cumsum(0) < 0.6).sum()) + 1]
    assert set(np.flatnonzero(distribution(ready, Sampling(1, top_p=0.6), prompt))) <= set(kept)
    kept = [token for token in order if probs[token] >= 0.5 * probs.max()]
    assert set(np.flatnonzero(distribution(ready, Sampling(1, min_p=0.5), prompt))) <= set(kept)
    cold, hot = (distribution(ready, Sampling(1, temperature=t), prompt) for t in (0.3, 2.0))
    assert cold.max() > probs.max() > hot.max()
    assert generate(ready, Sampling(9, ignore_eos=True), PROMPTS, 2).tokens.lengths.tolist() == [9] * 8
    assert generate(ready, Sampling(1), PROMPTS, 2).tokens.lengths.tolist() == [1] * 8


def test_finish_reasons(ready):
    generated = generate(ready, Sampling(10), PROMPTS, 8)
    assert not generated.aborted.any()
    for answer, truncated in zip(answers(generated), generated.truncated.tolist(), strict=True):
        assert EOS not in answer[:-1]
        assert truncated == (answer[-1] != EOS)
        assert not truncated or len(answer) == 10
    assert 0 < int(generated.truncated.sum()) < len(generated.truncated)
    assert bool((generated.seconds > 0).all())


def test_samples_differ_and_repeat_however_they_are_spread(seeded, ready):
    together = answers(generate(ready, Sampling(16), PROMPTS, 4))
    assert len({tuple(answer) for answer in together[:4]}) > 2
    assert answers(generate(ready, Sampling(16), PROMPTS, 4)) == together
    assert answers(generate(ready, Sampling(16), PROMPTS, 4, step=2)) != together
    # As two replicas would be served: other neighbours, another order.
    jobs = jobs_of(PROMPTS, 4)
    for share in ([3, 1], [2, 0]):
        generated = answers(serve(ready, queue_of([jobs[prompt_index] for prompt_index in share]), Sampling(16)))
        assert generated == [together[4 * prompt_index + number] for prompt_index in share for number in range(4)]


def test_sampled_answers_are_those_of_the_embedded_engine(ready, plain, tiny_model, request):
    """Only the seed determines the sampled tokens, with or without prompts in pieces and speculative tokens."""
    if not engines.ENGINES[engine_name(request).split()[0]].counted_seeds:
        pytest.skip("this engine draws with its own random numbers")
    embedded = engine_of("hf", str(tiny_model), rollout_of(max_num_seqs=8))
    load(embedded, weights_of(plain))
    longest = np.array([2 + number % 5 for number in range(LONGEST - 40)], dtype=np.int32)
    for sampling in (Sampling(40, ignore_eos=True), Sampling(40, temperature=0.6, top_k=10), Sampling(40, greedy=True)):
        expected, found = (generate(one, sampling, [*PROMPTS, longest], 3) for one in (embedded, ready))
        assert answers(found) == answers(expected)
        assert distance(found.log_probs.values, expected.log_probs.values) < 2e-5


def test_a_job_is_handed_out_as_soon_as_it_has_ended(ready):
    jobs = jobs_of(PROMPTS, 4)
    told = []
    found = serve(ready, queue_of(jobs), Sampling(12), lambda job, texts: told.append((job.prompt_index, texts)))
    assert sorted(prompt_index for prompt_index, _ in told) == [0, 1, 2, 3]
    for prompt_index, texts in told:
        assert texts == answers(found)[4 * prompt_index : 4 * prompt_index + 4]


def test_no_prompts_and_the_longest_prompt(ready, plain):
    nothing = serve(ready, queue_of([]), Sampling(8))
    assert len(nothing.tokens.lengths) == len(nothing.truncated) == len(nothing.seconds) == 0
    longest = np.array([2 + number % 17 for number in range(LONGEST - 8)], dtype=np.int32)
    generated = generate(ready, Sampling(8, greedy=True), [longest], 1)
    assert answers(generated) == [greedy(plain, longest, 8)]


def test_what_is_not_wanted_any_more_is_given_up(seeded, ready):
    """One of four jobs is enough: the others are returned unfinished, and the engine continues afterwards."""
    jobs = jobs_of(PROMPTS, 2)
    queue = queue_of(jobs, target_complete=1)
    found = serve(ready, queue, Sampling(40))
    whole = answers(generate(ready, Sampling(40), PROMPTS, 2))
    assert bool(found.aborted.any())
    for answer, expected, aborted in zip(answers(found), whole, found.aborted.tolist(), strict=True):
        assert answer == (expected[: len(answer)] if aborted else expected)
    assert len(found.tokens.values) == len(found.log_probs.values)
    assert answers(generate(ready, Sampling(40), PROMPTS, 2)) == whole


@pytest.mark.parametrize("sampling", [Sampling(14, temperature=0.8), Sampling(14, greedy=True)])
def test_a_begun_answer_continues_as_if_never_stopped(ready, sampling):
    jobs = jobs_of(PROMPTS, 3)
    whole = serve(ready, queue_of(jobs), sampling)
    all_of_it, log_probs = whole.tokens.rows(), whole.log_probs.rows()
    begun = [max(0, min(number, len(answer) - 1)) for number, answer in enumerate(all_of_it)]
    begun[3] = 0  # a sample that has no token yet, beside others of its prompt that have some
    given = [answer[:count].numpy() for answer, count in zip(all_of_it, begun, strict=True)]
    told = {}
    parts = [tuple(given[3 * prompt_index : 3 * prompt_index + 3]) for prompt_index in range(3)]
    queue = queue_of([replace(job, given=part) for job, part in zip(jobs, parts, strict=False)] + jobs[3:])
    rest = serve(ready, queue, sampling, lambda job, found: told.update({job.prompt_index: found}))
    begun[9:] = [0, 0, 0]
    assert [row.tolist() for row in rest.tokens.rows()] == [
        answer[count:].tolist() for answer, count in zip(all_of_it, begun, strict=True)
    ]
    expected = [row[count:] for row, count in zip(log_probs, begun, strict=True)]
    assert distance(rest.log_probs.rows(), expected) < 2e-5
    assert rest.truncated.tolist() == whole.truncated.tolist()
    assert sampling.greedy or set(whole.truncated.tolist()) == {True, False}
    assert told[1] == [row.tolist() for row in rest.tokens.rows()[3:6]]


def test_a_later_turn_sees_the_whole_conversation(ready, plain):
    """The engine waits while nothing runs. A later turn equals the model's output after the whole text."""
    source = Talk(jobs_of(PROMPTS, 4), 30)
    ready.generate(source, Sampling(30))
    assert sum(len(turns) > 1 for turns in source.turns.values()) > 4
    for (prompt_index, sample), turns in source.turns.items():
        text = PROMPTS[prompt_index].tolist()
        for turn in turns:
            expected = log_probs_of(plain, np.array(text, dtype=np.int32), turn.tokens)
            assert distance(torch.tensor(turn.log_probs), expected) < 1e-5
            text += [*turn.tokens, *source.said((prompt_index, sample))]


def test_after_the_stop_no_further_job_is_begun(ready):
    queue = queue_of(jobs_of(PROMPTS, 8), target_complete=1)
    serve(ready, queue, Sampling(40))
    assert [job.prompt_index for job in queue.taken] == [0]


def test_a_text_is_scored_as_by_the_trainer(ready, plain):
    tokens = [2, 5, 6, 3, 8, 1]
    expected = log_probs_of(plain, np.array(tokens[:1], dtype=np.int32), tokens[1:])
    assert distance(ready.log_probs(EncodedPrompt(np.array(tokens, dtype=np.int32))), expected) < 1e-5


def test_new_weights_count_from_the_next_token_on(ready, other):
    """Nothing computed with the old weights is left: no weight, no packed copy of one, no cached prefix."""
    prompt = np.array([2 + number % 17 for number in range(40)], dtype=np.int32)
    before = answers(generate(ready, Sampling(8, greedy=True), [prompt], 1))
    ready.sleep()
    load(ready, weights_of(other))
    generated = generate(ready, Sampling(8, greedy=True), [prompt], 1)
    assert answers(generated) == [greedy(other, prompt, 8)] != before
    assert distance(generated.log_probs.values, log_probs_of(other, prompt, answers(generated)[0])) < 1e-5


def test_a_cached_prefix_never_outlives_its_weights(ready, plain, other, request):
    """Without the reset, responses are wrong and their log-probs show it, which is what the log-prob gap
    alarm detects."""
    if "vllm" not in engine_name(request):
        return  # hf keeps no cache between calls
    prompt = np.array([2 + number % 17 for number in range(40)], dtype=np.int32)
    generate(ready, Sampling(8, greedy=True), [prompt], 1)
    ready.load_weights(weights_of(other))  # without `wake_cache`
    generated = generate(ready, Sampling(8, greedy=True), [prompt], 1)
    expected = log_probs_of(other, prompt, answers(generated)[0])
    assert (generated.log_probs.values - expected).abs().mean() > 1e-3
