"""A model behind the embedded server, asked by OpenAI's own client, and beside transformers."""

import base64
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from rltrain.data.chat import ChatEncoder
from rltrain.tools.serve import answers
from tests.serve.served import serving
from tests.tiny import save_tiny_model
from tests.tiny_vision import picture, png_of, save_tiny_vision_model

SUM = [{"role": "user", "content": "1+2=?"}]
KEY = "secret"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def address(model):
    with serving(model, KEY) as (address, _):
        yield address


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(base_url=address, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def plain(model):
    return AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)


def log_probs_of(model, tokens, **more):
    """[n - 1, vocabulary]: of each token but the first, given those before it."""
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([tokens]), **more).logits[0, :-1].float(), -1)


def chat(client, **more):
    return client.chat.completions.create(**{"model": "m", "messages": SUM, "max_tokens": 8, "temperature": 0, **more})


def complete(client, **more):
    return client.completions.create(**{"model": "m", "prompt": "1+2=", "max_tokens": 8, "temperature": 0, **more})


def refused(client, ask=chat, **more):
    with pytest.raises(openai.APIStatusError) as caught:
        ask(client, **more)
    return caught.value


def test_a_greedy_chat_is_what_transformers_generates(client, plain):
    model, tokenizer = plain
    prompt = tokenizer.apply_chat_template(SUM, add_generation_prompt=True, return_dict=False)
    ids = torch.tensor([prompt])
    whole = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)[0].tolist()
    reply = chat(client, logprobs=True, top_logprobs=3)
    choice = reply.choices[0]
    assert choice.message.content == tokenizer.decode(whole[len(prompt) :], skip_special_tokens=True)
    assert choice.finish_reason == "length"
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(prompt), 8)
    expected = log_probs_of(model, whole)[len(prompt) - 1 :]
    for token, entry, row in zip(whole[len(prompt) :], choice.logprobs.content, expected, strict=True):
        assert entry.token == tokenizer.decode([token])
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)


def test_the_log_probs_of_a_prompt_are_those_of_transformers(client, plain):
    model, tokenizer = plain
    prompts = [tokenizer("1+2=3")["input_ids"], tokenizer("7-4=")["input_ids"]]
    reply = complete(client, prompt=prompts, max_tokens=1, echo=True, logprobs=1)
    for choice, prompt in zip(reply.choices, prompts, strict=True):
        log_probs, expected = choice.logprobs, log_probs_of(model, prompt)
        assert log_probs.token_logprobs[0] is None
        # One more, of the token that was generated.
        assert len(log_probs.tokens) == len(log_probs.token_logprobs) == len(prompt) + 1
        own = expected.gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
        assert log_probs.token_logprobs[1:-1] == pytest.approx(own, abs=1e-4)
        best = [max(top.values()) for top in log_probs.top_logprobs[1:-1]]
        assert best == pytest.approx(expected.max(-1).values.tolist(), abs=1e-4)
        # Evaluations take a token for the likeliest where the two numbers are one.
        likeliest = [a == b for a, b in zip(best, log_probs.token_logprobs[1:-1], strict=True)]
        assert likeliest == (expected.argmax(-1) == torch.tensor(prompt[1:])).tolist()
        assert choice.text.startswith(tokenizer.decode(prompt))


def test_nothing_need_be_generated_for_the_log_probs_of_a_prompt(client):
    one, none = (complete(client, max_tokens=most, echo=True, logprobs=1).choices[0] for most in (1, 0))
    assert none.logprobs.token_logprobs[1:] == pytest.approx(one.logprobs.token_logprobs[1:-1])
    assert len(none.logprobs.tokens) == 4
    assert refused(client, complete, max_tokens=0).status_code == 400


def test_an_echo_repeats_the_text_as_it_was_written(client):
    assert complete(client, echo=True).choices[0].text.startswith("1+2=")
    only = complete(client, echo=True, max_tokens=0)
    assert (only.choices[0].text, only.usage.completion_tokens) == ("1+2=", 0)


def test_bytes_that_are_no_text_end_no_answer(client, monkeypatch):
    class Lost:
        def __init__(self, **options): ...

        def step(self, backend, token):
            raise Exception("Invalid prefix encountered while decoding stream")  # as tokenizers does

    text = complete(client).choices[0].text
    monkeypatch.setattr(answers, "DecodeStream", Lost)
    assert complete(client, stop=["never said"]).choices[0].text == text
    assert "".join(piece.choices[0].text for piece in complete(client, stream=True)) == text


def test_texts_and_token_ids_are_one_prompt(client, plain):
    texts = [choice.text for choice in complete(client, prompt=["1+2=", "3-1="]).choices]
    ids = [plain[1](text)["input_ids"] for text in ("1+2=", "3-1=")]
    assert [choice.text for choice in complete(client, prompt=ids).choices] == texts
    assert complete(client, prompt=ids[1]).choices[0].text == texts[1]
    assert refused(client, complete, prompt=[5, 99]).status_code == 400
    assert refused(client, complete, prompt="").status_code == 400


def test_a_seed_gives_the_same_answers_and_choices_differ(client):
    first, again = (chat(client, n=4, temperature=1, seed=3) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in again.choices]
    assert len(set(texts)) > 1
    assert [choice.index for choice in first.choices] == [0, 1, 2, 3]
    assert texts != [choice.message.content for choice in chat(client, n=4, temperature=1, seed=4).choices]


def test_top_k_and_top_p_leave_the_likeliest(client):
    greedy = chat(client).choices[0].message.content
    for narrow in ({"extra_body": {"top_k": 1}}, {"top_p": 1e-6}):
        assert chat(client, temperature=2, n=2, **narrow).choices[1].message.content == greedy


def test_an_answer_ends_before_a_stop(client):
    whole = chat(client).choices[0].message.content
    stop = whole[3:6]
    reply = chat(client, stop=[stop, "<never>"]).choices[0]
    assert (reply.message.content, reply.finish_reason) == (whole[: whole.index(stop)], "stop")
    chunks = list(chat(client, stop=stop, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == reply.message.content


def test_a_stream_says_what_the_whole_reply_does(client):
    whole = chat(client, n=2, temperature=1, seed=5, logprobs=True)
    chunks = list(
        chat(client, n=2, temperature=1, seed=5, logprobs=True, stream=True, stream_options={"include_usage": True})
    )
    texts, log_probs, finishes = ["", ""], [[], []], [None, None]
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] += choice.delta.content or ""
        log_probs[choice.index] += [entry.logprob for entry in (choice.logprobs.content if choice.logprobs else ())]
        finishes[choice.index] = choice.finish_reason or finishes[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert finishes == [choice.finish_reason for choice in whole.choices]
    for own, choice in zip(log_probs, whole.choices, strict=True):
        assert own == pytest.approx([entry.logprob for entry in choice.logprobs.content], abs=1e-5)
    assert chunks[-1].usage == whole.usage
    # Token by token, not at the end.
    assert len(chunks) > 8


def test_a_streamed_completion_echoes_its_prompt(client):
    whole = complete(client, echo=True, logprobs=0).choices[0]
    chunks = [chunk.choices[0] for chunk in complete(client, echo=True, logprobs=0, stream=True)]
    assert "".join(choice.text for choice in chunks) == whole.text
    told = [number for choice in chunks if choice.logprobs for number in choice.logprobs.token_logprobs]
    assert told[1:] == pytest.approx(whole.logprobs.token_logprobs[1:], abs=1e-5)


def test_many_ask_at_once_and_each_gets_its_own_answer(client):
    prompts = [f"{left}+{right}=" for left in range(6) for right in range(4)]
    limits = [1 + number % 7 for number in range(len(prompts))]

    def ask(prompt, most):
        return complete(client, prompt=prompt, max_tokens=most).choices[0].text

    alone = [ask(prompt, most) for prompt, most in zip(prompts, limits, strict=True)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(ask, prompts, limits)) == alone


def test_a_request_joins_those_that_are_running(client):
    """A short one does not wait for the end of a long one."""
    long = chat(client, max_tokens=110, temperature=1, n=8, stream=True, extra_body={"ignore_eos": True})
    next(iter(long))
    chat(client, max_tokens=1)
    rest = list(long)
    assert sum(chunk.choices[0].finish_reason is None for chunk in rest) > 8


def test_no_more_answers_than_have_room_run_at_once(model):
    with serving(model, max_num_seqs=3) as (address, engine), openai.OpenAI(base_url=address, api_key="-") as client:
        assert engine.most_rows == 3
        assert len(chat(client, n=8, temperature=1).choices) == 8


def test_what_has_no_room_is_refused(client):
    error = refused(client, messages=[{"role": "user", "content": "1+" * 70}])
    assert (error.status_code, error.code) == (400, "context_length_exceeded")
    assert "max_model_len=128" in error.body["message"]
    assert refused(client, max_tokens=125).status_code == 400
    assert chat(client, max_tokens=121).usage.completion_tokens <= 121


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"extra_body": {"temprature": 1}}, "temprature"),
        ({"presence_penalty": 0.5}, "presence_penalty=0.5"),
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": "hot"}, 'temperature="hot"'),
        ({"top_p": 0}, "top_p=0"),
        ({"n": 0}, "n=0"),
        ({"n": True}, "n=true"),
        ({"top_logprobs": 2}, "logprobs=true"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools="),
        ({"response_format": {"type": "json_object"}}, "response_format="),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "?"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "video_url"}]}]}, "video_url"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b"}}]}]},
            "data URI",
        ),
    ],
)
def test_what_would_be_done_otherwise_is_refused(client, more, word):
    error = refused(client, **more)
    assert error.status_code == 400
    assert word in error.body["message"]


def test_what_asks_for_nothing_is_taken(client):
    neutral = {
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "user": "u",
        "stop": [],
        "tools": None,
        "logit_bias": {},
    }
    assert chat(client, **neutral).choices[0].message.content == chat(client).choices[0].message.content


def test_the_model_and_the_key_are_those_of_the_server(client, address):
    assert [model.id for model in client.models.list()] == ["m"]
    assert refused(client, model="other").status_code == 404
    with openai.OpenAI(base_url=address, api_key="wrong", max_retries=0) as stranger:
        assert refused(stranger).status_code == 401
    root = address.removesuffix("/v1")
    assert httpx.get(f"{root}/health").json() == {"status": "ok"}
    assert httpx.get(f"{root}/v1/files", headers={"Authorization": f"Bearer {KEY}"}).status_code == 404


def test_whoever_hangs_up_on_a_stream_gives_its_answer_up(model):
    with serving(model) as (address, _), openai.OpenAI(base_url=address, api_key="-") as client:
        for _ in range(3):
            stream = chat(client, max_tokens=120, n=8, temperature=1, stream=True, extra_body={"ignore_eos": True})
            next(iter(stream))
            stream.close()
        assert chat(client).choices[0].finish_reason == "length"


def test_a_model_without_a_chat_template_completes(tmp_path):
    folder = save_tiny_model(tmp_path)
    (folder / "chat_template.jinja").unlink()
    with serving(folder) as (address, _), openai.OpenAI(base_url=address, api_key="-", max_retries=0) as client:
        assert complete(client).choices[0].finish_reason
        assert "no chat template" in refused(client).body["message"]


def test_an_image_is_seen_as_transformers_sees_it(tmp_path):
    folder = save_tiny_vision_model(tmp_path, "qwen2_5_vl", tied=False)
    image = picture(56, 56)
    url = f"data:image/png;base64,{base64.b64encode(png_of(image)).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "1+2=?"}]
    with serving(folder, max_model_len=256) as (address, _), openai.OpenAI(base_url=address, api_key="-") as client:
        reply = chat(
            client, messages=[{"role": "user", "content": parts}], logprobs=True, extra_body={"ignore_eos": True}
        )
        blind = chat(client, logprobs=True)
    encoded = ChatEncoder(str(folder)).encode_prompt([{"role": "user", "content": "<image>1+2=?"}], [image])
    assert reply.usage.prompt_tokens == len(encoded.tokens) > blind.usage.prompt_tokens
    plain = AutoModelForImageTextToText.from_pretrained(folder)
    pixels = {
        "pixel_values": torch.from_numpy(encoded.images.pixel_values),
        "image_grid_thw": torch.from_numpy(encoded.images.grids),
    }
    ids = torch.from_numpy(encoded.tokens)[None].long()
    kinds = (ids == plain.config.image_token_id).long()
    with torch.no_grad():
        row = torch.log_softmax(plain(ids, mm_token_type_ids=kinds, **pixels).logits[0, -1].float(), -1)
    first = reply.choices[0].logprobs.content[0]
    assert first.logprob == pytest.approx(float(row.max()), abs=1e-4)
