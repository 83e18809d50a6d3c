#!/usr/bin/env python3
"""Calls a running server through the clients that people use, and prints what passed.

    refrain serve stories chat=chat embed=./all-MiniLM-L6-v2
    python3 tools/serve/clients.py http://127.0.0.1:8080 [--embeds embed]

Needs the PyPI packages openai, anthropic, langchain-openai and llm. Exit code 1 if something failed.
"""

import argparse
import asyncio
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import traceback

import anthropic
import openai
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

parser = argparse.ArgumentParser()
parser.add_argument("url")
parser.add_argument("--model", default="chat")
parser.add_argument("--embeds", help="name of a served model that embeds")
parser.add_argument("--key", default="none")
args = parser.parse_args()

HELLO = [{"role": "user", "content": "Hello"}]
client = openai.OpenAI(base_url=f"{args.url}/v1", api_key=args.key, max_retries=0)
claude = anthropic.Anthropic(base_url=args.url, api_key=args.key, max_retries=0)
CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


@check
def openai_lists_models():
    assert args.model in [model.id for model in client.models.list()]
    assert client.models.retrieve(args.model).id == args.model


@check
def openai_chat():
    reply = client.chat.completions.create(model=args.model, messages=HELLO, max_tokens=12, temperature=0)
    assert reply.choices[0].message.content and reply.usage.completion_tokens <= 12
    same = client.chat.completions.create(model=args.model, messages=HELLO, max_tokens=12, temperature=0)
    assert same.choices[0].message.content == reply.choices[0].message.content


@check
def openai_chat_streams_with_usage():
    stream = client.chat.completions.create(
        model=args.model, messages=HELLO, max_tokens=12, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert any(chunk.choices and chunk.choices[0].delta.content for chunk in chunks)
    assert chunks[-1].usage.completion_tokens > 0


@check
def openai_chat_has_logprobs_and_choices():
    reply = client.chat.completions.create(
        model=args.model, messages=HELLO, max_tokens=5, n=3, logprobs=True, top_logprobs=2
    )
    assert len(reply.choices) == 3 and len(reply.choices[0].logprobs.content[0].top_logprobs) == 2


@check
def openai_streaming_helper():
    with client.chat.completions.stream(model=args.model, messages=HELLO, max_tokens=8) as stream:
        kinds = {event.type for event in stream}
    assert "content.delta" in kinds and "content.done" in kinds, kinds


@check
def openai_completions():
    reply = client.completions.create(model=args.model, prompt=["One", "Two"], max_tokens=5, echo=True)
    assert len(reply.choices) == 2 and reply.choices[0].text.startswith("One")
    assert list(client.completions.create(model=args.model, prompt="One", max_tokens=5, stream=True))


@check
def openai_responses():
    reply = client.responses.create(model=args.model, input="Hello", max_output_tokens=12)
    assert reply.output_text and reply.usage.output_tokens > 0
    kinds = [event.type for event in client.responses.create(model=args.model, input="Hello", max_output_tokens=12, stream=True)]
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete"), kinds


@check
def openai_async_many():
    async def many():
        async with openai.AsyncOpenAI(base_url=f"{args.url}/v1", api_key=args.key) as many_client:
            ask = lambda n: many_client.chat.completions.create(model=args.model, messages=HELLO, max_tokens=n + 1)
            return await asyncio.gather(*(ask(n) for n in range(16)))

    assert len(asyncio.run(many())) == 16


@check
def openai_cancels_a_stream():
    stream = client.completions.create(model=args.model, prompt="One", max_tokens=400, stream=True)
    next(iter(stream))
    stream.close()


@check
def openai_errors_are_typed():
    try:
        client.chat.completions.create(model="nothing", messages=HELLO)
        raise AssertionError("a model that does not exist")
    except openai.NotFoundError as error:
        assert error.code == "model_not_found"
    try:
        client.chat.completions.create(model=args.model, messages=HELLO, temperature=-1)
        raise AssertionError("a negative temperature")
    except openai.BadRequestError as error:
        assert error.param == "temperature"


@check
def openai_embeddings():
    if not args.embeds:
        return "skipped: no --embeds"
    # The client asks for base64 by itself.
    reply = client.embeddings.create(model=args.embeds, input=["A cat sleeps.", "A kitten naps.", "Stocks fell."])
    vectors = [item.embedding for item in reply.data]
    cosine = lambda a, b: sum(x * y for x, y in zip(a, b))
    assert all(math.isclose(cosine(v, v), 1, abs_tol=1e-4) for v in vectors)
    assert cosine(vectors[0], vectors[1]) > cosine(vectors[0], vectors[2])
    plain = client.embeddings.create(model=args.embeds, input="A cat sleeps.", encoding_format="float")
    assert max(abs(a - b) for a, b in zip(plain.data[0].embedding, vectors[0])) < 1e-5
    assert reply.usage.prompt_tokens > 6


@check
def anthropic_messages():
    reply = claude.messages.create(model=args.model, messages=HELLO, max_tokens=12, system="Be kind.")
    assert reply.content[0].text and reply.usage.output_tokens <= 12
    assert reply.stop_reason in ("end_turn", "max_tokens")


@check
def anthropic_stream():
    with claude.messages.stream(model=args.model, messages=HELLO, max_tokens=12) as stream:
        text = "".join(stream.text_stream)
        assert text == stream.get_final_message().content[0].text


@check
def anthropic_counts_and_errors():
    assert claude.messages.count_tokens(model=args.model, messages=HELLO).input_tokens > 3
    try:
        claude.messages.create(model="nothing", messages=HELLO, max_tokens=5)
        raise AssertionError("a model that does not exist")
    except anthropic.NotFoundError:
        pass


@check
def langchain_chat():
    chat = ChatOpenAI(base_url=f"{args.url}/v1", api_key=args.key, model=args.model, max_tokens=12)
    assert chat.invoke("Hello").content
    assert "".join(chunk.content for chunk in chat.stream("Hello"))
    assert len(chat.batch(["Hello", "Hi", "Good day"])) == 3


@check
def langchain_embeddings():
    if not args.embeds:
        return "skipped: no --embeds"
    embeddings = OpenAIEmbeddings(
        base_url=f"{args.url}/v1", api_key=args.key, model=args.embeds, check_embedding_ctx_length=False
    )
    vectors = embeddings.embed_documents(["A cat sleeps.", "Stocks fell."])
    assert len(vectors) == 2 and len(embeddings.embed_query("A cat")) == len(vectors[0])


@check
def llm_prompts():
    with tempfile.TemporaryDirectory() as folder:
        model = f"- model_id: local\n  model_name: {args.model}\n  api_base: {args.url}/v1\n"
        (pathlib.Path(folder) / "extra-openai-models.yaml").write_text(model)
        env = {**os.environ, "LLM_USER_PATH": folder, "OPENAI_API_KEY": args.key}
        program = pathlib.Path(sys.executable).parent / "llm"
        for flags in [[], ["--no-stream"]]:
            command = [program, "-m", "local", "-o", "max_tokens", "12", *flags, "Hello"]
            ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
            assert ran.returncode == 0 and ran.stdout.strip(), ran.stderr


n_failed = n_skipped = 0
for function in CHECKS:
    try:
        result = function() or "ok"
        n_skipped += result != "ok"
    except Exception:
        result = "FAILED\n" + traceback.format_exc(limit=-2)
        n_failed += 1
    print(f"{function.__name__}: {result}", flush=True)
print(f"{len(CHECKS) - n_failed - n_skipped} passed, {n_skipped} skipped, {n_failed} failed")
sys.exit(1 if n_failed else 0)
