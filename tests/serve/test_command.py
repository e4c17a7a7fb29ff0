"""``rltrain serve`` as it is typed: what is refused, how it ends, and vLLM in the place of the embedded engine."""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import openai
import pytest

from rltrain.base.env import installed
from rltrain.base.errors import ConfigError
from rltrain.tools.serve.__main__ import main
from tests.ranks import preload
from tests.serve.served import serving
from tests.serve.test_server import KEY, chat, complete, refused
from tests.tiny import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("served"))


def run(words, out):
    """The command, in a process of its own. out: where its output goes."""
    with open(out, "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        os._exit(main(words))


def test_ctrl_c_ends_the_program_in_order(model, tmp_path):
    preload()
    out = tmp_path / "out"
    words = [f"model={model}", "port=0", "device=cpu", "served_model_name=m", "--engine", "hf"]
    process = multiprocessing.get_context("forkserver").Process(target=run, args=(words, out))
    process.start()
    while "serving m at " not in (said := out.read_text() if out.exists() else ""):
        assert process.is_alive(), said
        time.sleep(0.05)
    address = said.split(" at ")[1].split(",")[0]
    with openai.OpenAI(base_url=address, api_key="-", max_retries=0) as client:
        stream = chat(client, max_tokens=120, n=8, temperature=1, stream=True, extra_body={"ignore_eos": True})
        next(iter(stream))
        os.kill(process.pid, signal.SIGINT)
        with pytest.raises((openai.APIError, httpx.HTTPError)):
            list(stream)
    process.join(60)
    said = out.read_text()
    assert process.exitcode == 0, said
    assert said.endswith("ended\n")
    assert "Traceback" not in said


def told(capsys, *words):
    """The one sentence of a command that is refused."""
    assert main(list(words)) == 2
    return capsys.readouterr().err


def test_what_cannot_be_served_is_one_sentence(tmp_path, model, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert f"model={empty} has no config.json" in told(capsys, f"model={empty}")
    assert "there is no such folder" in told(capsys, f"model={tmp_path}/none")
    assert "model= is not given" in told(capsys)
    assert "Did you mean port=?" in told(capsys, f"model={model}", "prot=1")
    assert "expected a whole number" in told(capsys, f"model={model}", "port=x")
    assert "between 0 and 65535" in told(capsys, f"model={model}", "port=70000")
    assert "use one of auto, cpu" in told(capsys, f"model={model}", "device=tpu")
    assert "words behind -- are for vllm serve" in told(
        capsys, f"model={model}", "--engine", "hf", "--", "--tensor-parallel-size", "2"
    )
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    assert "is an adapter" in told(capsys, f"model={tmp_path}/adapter")


@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_a_port_in_use_is_said_before_anything_is_loaded(model, capsys, monkeypatch, engine):
    monkeypatch.setattr("rltrain.tools.serve.__main__.installed", lambda _: True)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        error = told(capsys, f"model={model}", f"port={port}", "--engine", engine)
    assert error.startswith(f"error: host=127.0.0.1 port={port} cannot be listened on: ")
    assert "port=0 for a free one" in error


def test_a_damaged_checkpoint_is_not_served(tmp_path, model, capsys):
    step = tmp_path / "run/global_step_1"
    (step / "huggingface").mkdir(parents=True)
    (step / "progress.json").write_text("{}")
    files = {"progress.json": {"bytes": 2}, "huggingface/config.json": {"bytes": 7}}
    (step / "manifest.json").write_text(json.dumps({"files": files}))
    assert "is damaged: " in told(capsys, f"model={step}", "--engine", "hf")


def test_a_model_without_room_for_an_answer_is_refused(model):
    with (
        pytest.raises(ConfigError, match=r"no memory .* max_model_len=128"),
        serving(model, gpu_memory_utilization=1e-12),
    ):
        pass


def test_the_error_of_the_engine_ends_the_server_and_is_told(model, monkeypatch):
    def fail(*_):
        raise ValueError("broken")

    serves = serving(model)
    address, engine = serves.__enter__()
    monkeypatch.setattr(engine, "generate", fail)
    with openai.OpenAI(base_url=address, api_key="-", max_retries=0) as client:
        assert refused(client).status_code == 503
    with pytest.raises(ValueError, match="broken"):
        serves.__exit__(None, None, None)


def test_vllm_gets_what_was_set(model, monkeypatch):
    ran = []
    monkeypatch.setattr("os.execve", lambda _, words, environment: ran.append((words, environment)))
    monkeypatch.setattr("rltrain.tools.serve.__main__.installed", lambda _: True)
    monkeypatch.setenv("RLTRAIN_API_KEY", KEY)
    words = ["served_model_name=m", "port=0", "max_model_len=64", "max_pixels=50176", "--engine", "vllm"]
    with pytest.raises(AssertionError, match="another one"):
        main([f"model={model}", *words, "--", "--tensor-parallel-size", "2"])
    ((command, environment),) = ran
    said = " ".join(command)
    assert command[:2] == [sys.executable, "-m"]
    assert str(model) in command
    assert KEY not in said
    assert environment["VLLM_API_KEY"] == KEY
    for part in ("--served-model-name m", "--max-model-len 64", '--mm-processor-kwargs {"max_pixels": 50176}'):
        assert part in said
    assert said.endswith("--tensor-parallel-size 2")


@pytest.mark.long
@pytest.mark.skipif(not installed("vllm"), reason="vllm is not installed")
def test_vllm_in_the_place_of_the_embedded_engine_says_the_same(model):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [f"model={model}", "served_model_name=m", f"port={port}", "dtype=float32", "max_num_seqs=8"]
    command = [sys.executable, "-m", "rltrain.serve", *words, "gpu_memory_utilization=0.3"]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "RLTRAIN_API_KEY": KEY}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as program:
        try:
            with (
                serving(model) as (own, _),
                openai.OpenAI(base_url=own, api_key="-", max_retries=0) as client,
                openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0) as of_vllm,
            ):
                await_start(program, of_vllm)
                assert refused(of_vllm, max_tokens=500).status_code == 400
                ours, theirs = (chat(each, logprobs=True).choices[0] for each in (client, of_vllm))
                # vLLM decodes behind the prompt, where a tokenizer of single characters puts a space.
                assert theirs.message.content.strip() == ours.message.content
                pairs = zip(theirs.logprobs.content, ours.logprobs.content, strict=True)
                assert all(abs(their.logprob - our.logprob) < 1e-4 for their, our in pairs)
                ours, theirs = (
                    complete(each, echo=True, logprobs=1, max_tokens=1).choices[0].logprobs.token_logprobs[1:]
                    for each in (client, of_vllm)
                )
                assert theirs == pytest.approx(ours, abs=1e-4)
        finally:
            program.send_signal(signal.SIGINT)
            try:
                assert program.wait(60) == 0
            finally:
                program.kill()


def await_start(program, client, most_s=600):
    begun = time.monotonic()
    while time.monotonic() - begun < most_s and program.poll() is None:
        try:
            return client.models.list()
        except openai.APIConnectionError:
            time.sleep(1)
    raise AssertionError("the server did not start")
