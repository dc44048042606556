# SPDX-License-Identifier: Apache-2.0
"""What is asked of the prompt over HTTP: echo, its log-probabilities, truncation, the template's
variables, and the routes of the tokenizer."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

IDS = [5, 9, 33, 270, 4, 11, 12, 13]
GREEDY = {"temperature": 0, "ignore_eos": True}


def post(http: httpx.Client, path: str, **fields: Any) -> dict[str, Any]:
    response = http.post(path, json=fields)
    assert response.status_code == 200, response.text
    return dict(response.json())


def complete(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    return post(http, "/v1/completions", **{**GREEDY, **fields})


def refused(http: httpx.Client, path: str, **fields: Any) -> dict[str, Any]:
    response = http.post(path, json=fields)
    assert response.status_code == 400, response.text
    return dict(response.json()["error"])


def spelt(http: httpx.Client, ids: list[int]) -> str:
    return str(post(http, "/detokenize", tokens=ids)["prompt"])


def test_echo_puts_the_prompt_before_the_answer(http: httpx.Client) -> None:
    plain = complete(http, prompt=["grüße €", "b"], max_tokens=5)["choices"]
    echoed = complete(http, prompt=["grüße €", "b"], max_tokens=5, echo=True)["choices"]
    assert echoed[0]["text"] == "grüße €" + plain[0]["text"]
    assert echoed[1]["text"] == "b" + plain[1]["text"]
    by_ids = complete(http, prompt=[0, *IDS], max_tokens=5, echo=True)["choices"][0]["text"]
    assert by_ids.startswith(spelt(http, IDS)), "special tokens are left out of texts"


def test_the_prompt_alone(http: httpx.Client) -> None:
    """As programs do that only want to know how likely a text is."""
    answer = complete(http, prompt="hello world", max_tokens=0, echo=True, logprobs=2)
    (choice,) = answer["choices"]
    assert choice["text"] == "hello world"
    assert choice["finish_reason"] == "length"
    form = choice["logprobs"]
    assert "".join(form["tokens"]) == "hello world"
    assert form["token_logprobs"][0] is form["top_logprobs"][0] is None
    assert all(value < 0 for value in form["token_logprobs"][1:])
    assert [choice["text"][i] for i in form["text_offset"]] == [t[0] for t in form["tokens"]]
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["prompt_tokens"] == len(form["tokens"])
    bare = complete(http, prompt="hello world", max_tokens=0, echo=True)["choices"][0]
    assert (bare["text"], bare["logprobs"]) == ("hello world", None)


def test_echoed_and_generated_tokens_share_one_list(http: httpx.Client) -> None:
    body = {"prompt": IDS, "max_tokens": 6, "echo": True, "logprobs": 0, "n": 2}
    alone = complete(http, prompt=IDS, max_tokens=6, logprobs=0)["choices"][0]["logprobs"]
    for choice in complete(http, **body)["choices"]:
        form = choice["logprobs"]
        assert len(form["tokens"]) == 14
        assert form["tokens"][8:] == alone["tokens"]
        assert form["token_logprobs"][8:] == pytest.approx(alone["token_logprobs"], abs=1e-4)
        assert form["text_offset"] == sorted(form["text_offset"])


def test_echo_in_a_stream(http: httpx.Client) -> None:
    body = {**GREEDY, "prompt": "wörld", "max_tokens": 6, "echo": True, "logprobs": 1, "n": 2}
    whole = http.post("/v1/completions", json=body).json()["choices"]
    texts: list[str] = ["", ""]
    forms: list[dict[str, list[Any]]] = [{}, {}]
    with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        for line in response.iter_lines():
            if not line or line == "data: [DONE]":
                continue
            (choice,) = httpx.Response(200, text=line.removeprefix("data: ")).json()["choices"]
            texts[choice["index"]] += choice["text"]
            for name, values in choice["logprobs"].items():
                forms[choice["index"]].setdefault(name, []).extend(values)
    assert texts == [choice["text"] for choice in whole]
    for form, choice in zip(forms, whole, strict=True):
        assert form["tokens"] == choice["logprobs"]["tokens"]
        assert form["text_offset"] == choice["logprobs"]["text_offset"]


def test_log_probabilities_of_the_prompt(http: httpx.Client) -> None:
    answer = complete(http, prompt=[IDS, IDS[:3]], max_tokens=2, n=2, prompt_logprobs=3)
    assert len(answer["choices"]) == 4
    for choice, prompt in zip(answer["choices"], [IDS, IDS, IDS[:3], IDS[:3]], strict=True):
        of_prompt = choice["prompt_logprobs"]
        assert len(of_prompt) == len(prompt)
        assert of_prompt[0] is None
        for token, entry in zip(prompt[1:], of_prompt[1:], strict=True):
            assert next(iter(entry)) == str(token)
            assert set(entry[str(token)]) == {"logprob", "rank", "decoded_token"}
            likeliest = [each["rank"] for each in entry.values()][-3:]
            assert likeliest == sorted(likeliest)
            assert {1, 2, 3} <= {each["rank"] for each in entry.values()}
    assert "prompt_logprobs" not in complete(http, prompt=IDS, max_tokens=1)["choices"][0]


def test_both_kinds_at_once(http: httpx.Client) -> None:
    choice = complete(
        http, prompt=IDS, max_tokens=1, echo=True, logprobs=1, prompt_logprobs=4
    )["choices"][0]  # fmt: skip
    assert all(len(entry) in (4, 5) for entry in choice["prompt_logprobs"][1:])
    assert all(len(top) in (1, 2) for top in choice["logprobs"]["top_logprobs"][1:])


def test_a_long_prompt_keeps_its_place_in_line(http: httpx.Client) -> None:
    """Long enough that its form is made in a thread."""
    prompt = [3 + i % 250 for i in range(1500)]
    choice = complete(http, prompt=prompt, max_tokens=1, prompt_logprobs=0)["choices"][0]
    assert [list(entry) for entry in choice["prompt_logprobs"][1:]] == [
        [str(i)] for i in prompt[1:]
    ]


def test_truncation_keeps_the_end(http: httpx.Client) -> None:
    long = [3 + i % 250 for i in range(5000)]
    fields = {"prompt": long, "max_tokens": 4, "return_token_ids": True}
    short = complete(http, **fields, truncate_prompt_tokens=20)["choices"][0]
    assert short["prompt_token_ids"] == long[-20:]
    most = complete(http, **{**fields, "max_tokens": 9}, truncate_prompt_tokens=-1)["choices"][0]
    assert most["prompt_token_ids"] == long[-4087:]
    words = complete(
        http, prompt=["the quick brown " * 2000, "fox"], max_tokens=2, echo=True,
        truncate_prompt_tokens=3, return_token_ids=True,
    )["choices"]  # fmt: skip
    assert len(words[0]["prompt_token_ids"]) == 3
    assert words[0]["text"].startswith(spelt(http, words[0]["prompt_token_ids"]))
    assert words[1]["text"].startswith("fox")
    chat = post(
        http, "/v1/chat/completions", messages=[{"role": "user", "content": "ab " * 9000}],
        truncate_prompt_tokens=-1, max_completion_tokens=5, temperature=0,
    )  # fmt: skip
    assert chat["usage"]["prompt_tokens"] == 4091


def test_a_message_that_goes_on(http: httpx.Client) -> None:
    """The template ends every message with a line break, which is not part of it."""
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the  quick "}]
    ids = post(http, "/tokenize", messages=turns, continue_final_message=True)["tokens"]
    assert spelt(http, ids) == "<s><user>hello\n<assistant>the  quick "
    chat = post(
        http, "/v1/chat/completions", messages=turns, continue_final_message=True,
        max_tokens=4, **GREEDY,
    )  # fmt: skip
    plain = complete(http, prompt=ids, max_tokens=4)
    assert chat["choices"][0]["message"]["content"] == plain["choices"][0]["text"]


def test_no_new_turn(http: httpx.Client) -> None:
    turns = [{"role": "user", "content": "hello"}]
    with_turn = post(http, "/tokenize", messages=turns)
    without = post(http, "/tokenize", messages=turns, add_generation_prompt=False)
    assert spelt(http, with_turn["tokens"]) == "<s><user>hello\n<assistant>"
    assert spelt(http, without["tokens"]) == "<s><user>hello\n"


def test_tokens_there_and_back(http: httpx.Client) -> None:
    answer = post(http, "/tokenize", prompt="grüße €", model="tiny")
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 4096
    assert answer["token_strs"] is None
    assert spelt(http, answer["tokens"]) == "grüße €"
    strings = post(http, "/tokenize", prompt="the quick", return_token_strs=True)["token_strs"]
    assert "".join(strings) == "theĠquick"
    empty = post(http, "/tokenize", prompt="", return_token_strs=True)
    assert (empty["count"], empty["tokens"], empty["token_strs"]) == (0, [], [])
    assert spelt(http, []) == ""
    long = "the quick brown fox " * 3000
    tokens = post(http, "/tokenize", prompt=long)["tokens"]
    assert len(tokens) > 4096, "a text may be longer than the context"
    assert spelt(http, tokens) == long


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        ("/tokenize", {}, "prompt", "neither came; send one"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt", "both came; send one"),
        ("/tokenize", {"messages": []}, "messages", "not 0"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt",
         "is for `messages`"),
        ("/tokenize", {"prompt": "a", "return_token_str": True}, "return_token_str",
         "did you mean return_token_strs?"),
        ("/tokenize", {"prompt": ["a"]}, "prompt", "$.prompt"),
        ("/detokenize", {}, "tokens", "add it"),
        ("/detokenize", {"tokens": [5, 320]}, "tokens", "`tokens[1]` is 320"),
        ("/detokenize", {"tokens": [-1]}, "tokens", "from 0 to 319"),
    ],
)  # fmt: skip
def test_bad_questions_to_the_tokenizer(
    http: httpx.Client, path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    error = refused(http, path, **fields)
    assert error["param"] == param
    assert words in error["message"]


def test_other_models_have_no_tokenizer_here(http: httpx.Client) -> None:
    for path, fields in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
        assert http.post(path, json={**fields, "model": "other"}).status_code == 404


def test_pings_of_both_methods(http: httpx.Client) -> None:
    assert http.get("/ping").status_code == http.post("/ping").status_code == 200
    assert http.get("/load").json() == {"server_load": 0}
