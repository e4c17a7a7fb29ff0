"""The judge in a worker: its own tokenizer, replies that depend only on message and seed, and memory that it frees."""

import pytest
import torch

from rltrain.common.columns import names as c
from rltrain.common.columns.batch import Batch
from rltrain.common.device import get_device
from rltrain.config.load import load_config
from rltrain.config.passes import JUDGE_PHASE
from rltrain.config.step_passes import make_step_passes
from rltrain.models.weights.spec import specs_of
from rltrain.workers.judge import JudgeWorker
from rltrain.workers.state.offload_manager import OffloadManager
from tests.tiny import save_scripted_judge, small_run

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    return save_scripted_judge(tmp_path_factory.mktemp("judge"))


@pytest.fixture
def judge(tiny_model, arithmetic_files, tmp_path):
    def make(path, **rollout):
        keys = {f"reward_model__rollout__{name}": value for name, value in rollout.items()}
        keys |= {"reward_model__enable": True, "reward_model__model__type": "generative"}
        keys |= {"reward_model__model__path": path}
        cfg = load_config(small_run(tiny_model, arithmetic_files, tmp_path, **keys)).config
        passes = make_step_passes(cfg)
        assert {"judge"} <= passes.roles
        assert "reward_model" not in passes.roles
        return JudgeWorker(cfg, specs_of(cfg, get_device("cpu"), passes), passes, OffloadManager(get_device("cpu")))

    return make


def replies(worker, *messages, seed=1, reading=0):
    said, numbers = worker.replies(Batch({c.JUDGE_MESSAGE: list(messages)}) if messages else Batch(), seed, reading)
    assert len(said) == len(messages)
    return said, numbers


def test_every_message_gets_its_reply_or_the_reason_why_it_has_none(judge, scripted):
    worker = judge(scripted, prompt_length=10, response_length=8, max_num_seqs=2)
    messages = ["1+1=7", "2", "a text in letters that ends with 9", "1+1=3", "?!8"]
    said, numbers = replies(worker, *messages)
    assert [reply.text for reply in said] == ["yes", "no", "", "no", "yes"]
    assert [bool(reply.no_prompt) for reply in said] == [False, False, True, False, False]
    assert said[2].no_prompt == (
        "the message to the judge has 34 tokens, and reward_model.rollout.prompt_length allows 10"
    )
    assert not any(reply.is_cut for reply in said)
    assert numbers.num_tokens == (5 + 4) + (1 + 3) + (5 + 3) + (3 + 4)  # with the tokens that end the replies
    assert replies(worker)[0] == []  # a rank without messages takes part all the same


def test_a_sampled_reply_follows_from_message_seed_and_reading_alone(judge, tiny_model):
    worker = judge(tiny_model, prompt_length=16, response_length=12, temperature=1.0)
    first, _ = replies(worker, "1+1=", "2+3=", "3+3=")
    again, _ = replies(worker, "3+3=", "1+1=")
    assert [reply.text for reply in again] == [first[2].text, first[0].text]
    for other in ({"seed": 2}, {"reading": 1}):
        assert [reply.text for reply in replies(worker, "1+1=", "2+3=", **other)[0]] != [
            reply.text for reply in first[:2]
        ]


def test_its_engine_has_weights_in_its_own_phase_alone(judge, scripted):
    worker = judge(scripted, prompt_length=10, response_length=8)
    replies(worker, "7")
    engine = worker.engine.model
    assert not any(weight.is_meta for weight in engine.parameters())
    worker.offloader.enter_phase("update_actor")
    assert all(weight.is_meta for weight in engine.parameters())
    assert worker.offloader.models["judge"] is worker.model
    assert not any(weight.requires_grad for weight in worker.model.parameters())
    assert replies(worker, "7")[0][0].text == "yes"
    assert worker.offloader.phase == JUDGE_PHASE


def test_weights_that_do_not_arrive_end_the_run(judge, scripted):
    from rltrain.common.errors import SyncError

    worker = judge(scripted, prompt_length=10, response_length=8)
    load = worker.engine.load_weights

    def damaged(weights):
        load(weight._replace(values=torch.randn_like(weight.values)) for weight in weights)

    worker.engine.load_weights = damaged
    with pytest.raises(SyncError, match="after the sync of update 0 the judge's engine differs from the trainer"):
        replies(worker, "7")
