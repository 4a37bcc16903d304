"""The official OpenAI client and Prometheus' own parsers, against a running server.

Usage: clients.py http://ADDRESS KEY; the server has the test model under the name `tiny`.
"""
import json
import sys
import threading
import urllib.request

import openai
from prometheus_client.parser import text_string_to_metric_families

address, key = sys.argv[1], sys.argv[2]
client = openai.OpenAI(base_url=address + "/v1", api_key=key, max_retries=0, timeout=300)
QUESTION = [{"role": "user", "content": "Tell me about the sea."}]
FIXED = dict(model="tiny", messages=QUESTION, temperature=0, max_tokens=12)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def models():
    [model] = client.models.list().data
    assert model.id == "tiny", model
    assert client.models.retrieve("tiny").id == "tiny"


def chat_whole_and_streamed():
    whole = client.chat.completions.create(**FIXED)
    [choice] = whole.choices
    assert choice.finish_reason in ("stop", "length"), whole
    assert whole.usage.completion_tokens <= 12, whole
    stream = client.chat.completions.create(
        **FIXED, stream=True, stream_options={"include_usage": True}, extra_body={"cache_prompt": False}
    )
    text, usage, reason = "", None, None
    for chunk in stream:
        usage = chunk.usage or usage
        for part in chunk.choices:
            text += part.delta.content or ""
            reason = part.finish_reason or reason
    assert text == choice.message.content, (text, choice)
    assert reason == choice.finish_reason, reason
    assert usage.total_tokens == whole.usage.total_tokens, usage


def helper_streams():
    with client.chat.completions.stream(**dict(FIXED, max_tokens=200, stop=["."])) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.delta" in events and "content.done" in events, events
    assert final.choices[0].message.content, final


def logprobs():
    whole = client.chat.completions.create(**FIXED, logprobs=True, top_logprobs=3)
    content = whole.choices[0].logprobs.content
    assert len(content) == whole.usage.completion_tokens, whole
    assert "".join(token.token for token in content) == whole.choices[0].message.content
    for token in content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == max(top.logprob for top in token.top_logprobs), "greedy takes the likeliest"


def text_completion():
    whole = client.completions.create(model="tiny", prompt="The sea is", max_tokens=8, temperature=0)
    parts = client.completions.create(
        model="tiny", prompt="The sea is", max_tokens=8, temperature=0, stream=True, extra_body={"cache_prompt": False}
    )
    assert whole.choices[0].text == "".join(part.choices[0].text for part in parts)


def tool_calls():
    asked = dict(
        FIXED, max_tokens=96, tools=[WEATHER], tool_choice="required", extra_body={"cache_prompt": False}
    )
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].finish_reason == "tool_calls", whole
    [call] = whole.choices[0].message.tool_calls
    assert call.function.name == "get_weather" and "city" in json.loads(call.function.arguments), call
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion()
    [streamed] = final.choices[0].message.tool_calls
    assert streamed.function.arguments == call.function.arguments, streamed
    # The answer of the tool goes back in.
    turns = QUESTION + [
        {"role": "assistant", "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    again = client.chat.completions.create(**dict(FIXED, messages=turns))
    assert again.usage.prompt_tokens > 0, again


def structured_output():
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}},
        "required": ["n", "ok"],
        "additionalProperties": False,
    }
    whole = client.chat.completions.create(
        **dict(FIXED, max_tokens=96),
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
    )
    answer = json.loads(whole.choices[0].message.content)
    assert isinstance(answer["n"], int) and isinstance(answer["ok"], bool), answer


def errors():
    def refused(kind, **wrong):
        try:
            client.chat.completions.create(**{**FIXED, **wrong})
        except kind as error:
            return error.body
        raise AssertionError(f"{wrong} was not refused")

    assert refused(openai.BadRequestError, n=2)["param"] == "n"
    assert refused(openai.BadRequestError, temperature=3)["param"] == "temperature"
    assert refused(openai.NotFoundError, model="other")["code"] == "model_not_found"
    assert refused(openai.BadRequestError, max_tokens=100_000)["code"] == "context_length_exceeded"
    stranger = openai.OpenAI(base_url=address + "/v1", api_key="wrong", max_retries=0)
    try:
        stranger.models.list()
    except openai.AuthenticationError:
        pass
    else:
        raise AssertionError("a wrong key was let in")


def many_at_once():
    texts = {}

    def ask(number):
        whole = client.chat.completions.create(**FIXED, seed=number)
        texts[number] = whole.choices[0].message.content

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 8 and all(texts.values()), texts


def stream_left_early():
    stream = client.chat.completions.create(**dict(FIXED, max_tokens=300), stream=True)
    next(iter(stream))
    stream.close()


def metrics():
    request = urllib.request.Request(address + "/metrics", headers={"Authorization": "Bearer " + key})
    with urllib.request.urlopen(request) as response:
        text = response.read().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["hotpin_pinned_bytes"].type == "gauge"
    assert families["hotpin_expert_hits"].type == "counter"
    histogram = families["hotpin_decode_token_seconds"]
    assert histogram.type == "histogram"
    values = {sample.name: sample.value for sample in histogram.samples if not sample.labels}
    assert values["hotpin_decode_token_seconds_count"] > 0, values


for check in [
    models, chat_whole_and_streamed, helper_streams, logprobs, text_completion, tool_calls,
    structured_output, errors, many_at_once, stream_left_early, metrics,
]:
    check()
    print("openai client:", check.__name__, "ok", flush=True)
