#!/usr/bin/env python3
"""What OpenAI's own client makes of a Millpond router: completions and chat, whole and streamed, models, errors.

    openai_client.py http://127.0.0.1:8000
"""

import sys

import openai


def raises(kind, code, ask):
    """Asserts that `ask` is refused with this exception and code."""
    try:
        ask()
    except kind as error:
        assert error.code == code, f"code {error.code!r} instead of {code!r}: {error}"
        return
    raise AssertionError(f"{kind.__name__} was expected")


def main(address):
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0, timeout=60)

    models = [model.id for model in client.models.list()]
    assert models, "no model is on offer"
    model = models[0]
    assert client.models.retrieve(model).id == model

    wish = {"model": model, "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**wish)
    assert whole.usage.completion_tokens <= 12 and whole.choices[0].finish_reason in ("length", "stop"), whole
    streamed = list(client.completions.create(**wish, stream=True, stream_options={"include_usage": True}))
    text = "".join(event.choices[0].text for event in streamed if event.choices)
    assert text == whole.choices[0].text, (text, whole)
    assert streamed[-1].usage.total_tokens == whole.usage.total_tokens, streamed[-1]

    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello, who are you?"}]
    wish = {"model": model, "messages": messages, "max_completion_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**wish)
    assert whole.choices[0].message.role == "assistant", whole
    streamed = list(client.chat.completions.create(**wish, stream=True))
    assert streamed[0].choices[0].delta.role == "assistant", streamed[0]
    text = "".join(event.choices[0].delta.content or "" for event in streamed)
    assert text == whole.choices[0].message.content, (text, whole)
    assert streamed[-1].choices[0].finish_reason == whole.choices[0].finish_reason, streamed[-1]
    same = [client.chat.completions.create(**{**wish, "temperature": 1, "seed": 7}) for _ in range(2)]
    assert same[0].choices[0].message.content == same[1].choices[0].message.content, same

    ask = client.completions.create
    raises(openai.NotFoundError, "model_not_found", lambda: ask(model="gpt-9", prompt="hi"))
    raises(openai.BadRequestError, "empty_prompt", lambda: ask(model=model, prompt=""))
    raises(openai.BadRequestError, "unsupported_parameter", lambda: ask(model=model, prompt="hi", n=2))
    long = [1] * 10_000
    raises(openai.BadRequestError, "context_length_exceeded", lambda: ask(model=model, prompt=long))
    raises(openai.BadRequestError, "empty_prompt", lambda: client.chat.completions.create(model=model, messages=[]))

    # Leaving in the middle of a stream.
    with client.completions.create(model=model, prompt="hi", max_tokens=400, stream=True) as events:
        next(iter(events))
    assert client.completions.create(model=model, prompt="hi", max_tokens=2).usage.completion_tokens <= 2
    print(f"openai {openai.__version__} is content with {model} at {address}")


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"))
