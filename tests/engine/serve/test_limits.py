"""Bodies that cannot be answered get words; clients that read slowly or vanish cost no frame and no other client.

A server under attack goes on: it answers others meanwhile, gives all frames back, says nothing, and drains.
"""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest

from tests.engine.serve.server import ANSWER, ASKED, LONG, RUNNING, Server

STEPS = 'pagedkv_steps_total{pool="default"}'
DEEP = b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


def text(**fields: Any) -> dict[str, Any]:
    return {"prompt": "a", **fields}


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a"}], **fields}


LONG_SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"title": "a" * 2**16}}}
REFUSED = {
    "no JSON": (TEXT, b"{", "the body is not JSON", None),
    "no UTF-8": (TEXT, b'{"prompt": "\xff"}', "the body is not JSON", None),
    "half a pair": (TEXT, rb'{"prompt": "\ud800"}', "the body is not JSON", None),
    "no object": (TEXT, b"[1]", "the body is JSON, but no object", None),
    "deep": (TEXT, DEEP, "the body is not JSON: recursion limit exceeded", None),
    "no prompt": (TEXT, {}, "prompt is missing; give a text, a list of texts", "prompt"),
    "prompt of a wrong type": (TEXT, text(prompt={"a": 1}), "prompt must be a text, a list of texts", "prompt"),
    "mixed list": (TEXT, text(prompt=["a", 1]), "prompt must be a text", "prompt"),
    "strange id": (TEXT, text(prompt=[70_000]), "token id 70000 is outside the vocabulary of 660 tokens", None),
    "huge id": (TEXT, b'{"prompt": [' + b"9" * 3000 + b"]}", "prompt must be", "prompt"),
    "max_tokens as text": (TEXT, text(max_tokens="9"), "max_tokens is '9'; it must be an integer", "max_tokens"),
    "no completion tokens": (
        CHAT,
        chat(max_completion_tokens=0),
        "max_completion_tokens is 0; it must be at least 1",
        "max_completion_tokens",
    ),
    "too many tokens": (TEXT, text(max_tokens=10**9), "raise num_frames or memory, or lower max", None),
    "NaN": (TEXT, text(temperature=float("nan")), "temperature is nan; it must be", "temperature"),
    "true as a number": (TEXT, text(n=True), "n is True; it must be an integer", "n"),
    "n": (TEXT, text(n=129), "n is 129; it must be at most 128", "n"),
    "outputs": (TEXT, text(prompt=["a", "b", "c"], n=128), "the body asks for 384 outputs, this server", None),
    "long key": (TEXT, text(logit_bias={"9" * 5000: 1}), "it must be", "logit_bias"),
    "many stops": (TEXT, text(stop=["b"] * 17), "stop must be a text of at most 256", "stop"),
    "empty stop": (TEXT, text(stop=["b", ""]), "stop is ('b', ''); it must be one or more", "stop"),
    "log-probs": (
        CHAT,
        chat(logprobs=True, top_logprobs=20, n=128, max_tokens=2000),
        "the body asks for up to 5,376,000 log-probabilities, the limit is 4,194,304; lower max_tokens",
        None,
    ),
    "bias": (TEXT, text(logit_bias={"b": 1}), "logit_bias is {'b': 1.0}; it must be", "logit_bias"),
    "tools": (CHAT, chat(tools=[{}]), "'tools' is not supported", "tools"),
    "no messages": (CHAT, {"messages": []}, "messages is []; it must have at least 1 item", "messages"),
    "no role": (CHAT, {"messages": [{"content": "a"}]}, "messages.0.role is missing; give it", "messages.0.role"),
    "taken variable": (
        CHAT,
        chat(chat_template_kwargs={"messages": ["a"]}),
        "chat_template_kwargs has messages, a name that is taken",
        "chat_template_kwargs",
    ),
    "schema without one": (
        CHAT,
        chat(response_format={"type": "json_schema"}),
        "response_format has the type json_schema and no json_schema",
        "response_format",
    ),
    "long schema": (
        CHAT,
        chat(response_format=LONG_SCHEMA),
        "the schema has 65,548 bytes, the limit is 65,536",
        "response_format.json_schema.schema",
    ),
    "alternatives alone": (CHAT, chat(top_logprobs=1), "logprobs is not true", "top_logprobs"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_body_is_status_400_with_words_and_the_field(server: Server, case: str) -> None:
    path, body, words, param = REFUSED[case]
    answer = server.ask(path, body)
    assert answer.status == 400, answer.body
    assert words in answer.error["message"]
    assert (answer.error["param"], answer.error["type"]) == (param, "invalid_request_error")
    assert len(answer.body) < 2000


def test_another_name_of_this_machine_is_refused_and_every_answer_is_counted(server: Server) -> None:
    """A page may give its own name to this machine (DNS rebinding)."""
    before = {status: server.count(status) for status in (200, 404, 413, 415)}
    for host in ("evil.example", "127.0.0.1.evil.example", "[::1].evil.example", "localhost:80@evil.example", "", "["):
        for path in ("/v1/models", "/health", "/metrics"):
            assert server.ask(path, Host=host).status == 400, host
    assert server.ask("/v1/models", Host="LOCALHOST:1").status == 200
    for host in ("[::1]:1", "127.0.0.1", "10.1.2.3:80", "[fd00::1]"):  # probes ask by address, and no DNS leads there
        assert server.ask("/health", Host=host).status == 200
    assert server.ask("/v1/nothing").status == 404
    assert server.ask(TEXT, b"{}", **{"Content-Type": "text/plain"}).status == 415
    assert server.ask(TEXT, b" " * 2**23).status == 413
    assert {status: server.count(status) - before[status] for status in before} == dict.fromkeys(before, 1)


@pytest.mark.parametrize("how", ["closes", "resets", "closes while it waits for all"])
def test_a_client_that_vanishes_gives_its_frames_back(server: Server, how: str) -> None:
    stream = how != "closes while it waits for all"
    clients = [server.begun({**LONG, "stream": stream}) for _ in range(5)]
    server.wait_until(RUNNING, 5)
    assert server.mapped() > 0
    before = server.metric(STEPS)
    for client in clients:
        if how == "resets":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
    server.wait_for_no_frame()
    assert server.metric(STEPS) - before < 3500, "4,000 tokens were not made"
    assert server.ask(TEXT, {"prompt": ASKED, "temperature": 0}).json["choices"][0]["text"] == ANSWER


def test_a_client_that_does_not_read_stalls_no_step_and_loses_no_text(server: Server) -> None:
    asked = {**LONG, "max_tokens": 250, "temperature": 0, "logprobs": 5}
    whole = server.ask(TEXT, {**asked, "stream": False}).json["choices"][0]
    with server.begun(asked) as slow:
        answer = server.ask(TEXT, {"prompt": ASKED, "temperature": 0})
        assert answer.json["choices"][0]["text"] == ANSWER
        server.wait_for_no_frame()  # the text was made although it was not read
        data = b""
        while b"[DONE]" not in data:
            part = slow.recv(1000)
            assert part
            data += part
    lines = [line.removeprefix(b"data: ") for line in data.split(b"\n") if line.startswith(b"data: {")]
    choices = [json.loads(line)["choices"][0] for line in lines]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
    assert offsets == whole["logprobs"]["text_offset"]
    assert json.loads(lines[-1])["choices"][0]["finish_reason"] == "length"


HEADERS = ["Host", "Content-Length", "Transfer-Encoding", "Authorization", "Expect", "Upgrade", "\x00a", ""]
VALUES = ["localhost", "-1", "9" * 30, "chunked", "gzip, chunked", "100-continue", "websocket", "\xff", "a\rb"]
FIELDS = "model prompt max_tokens n stream stop temperature top_p logit_bias seed logprobs response_format self".split()
JSON = [
    "0", "-1", "1e999", "NaN", "9" * 400, str(2**31), str(-(2**63) - 1), "true", "null", '""', r'"\ud800"', r'"\u0000"',
    '"' + "a" * 100_000 + '"', '"\xff"', "[]", "{}", "[[]]", "[" * 300 + "]" * 300, '{"a":' * 150 + "1" + "}" * 150,
]  # fmt: skip


def head(dice: random.Random) -> bytes:
    """Return a request line and headers at the edges of HTTP, sometimes without an end, or many requests."""
    pick = dice.choice
    text = f"{pick(('GET', 'POST', 'HEAD', 'A' * 300))} {pick(('/v1/completions', '/metrics', '*'))} HTTP/1.1\r\n"
    text += "".join(f"{pick(HEADERS)}: {pick(VALUES)}\r\n" for _ in range(dice.randrange(6)))
    text += pick(("\r\n", "\r\nabc", "\r\n0\r\n\r\n", "A: " + "a" * 300_000, "A: a\r\n" * 30_000))
    return text.encode("latin-1") * pick((1, 1, 20))


def post(dice: random.Random) -> bytes:
    """Return a request whose body has values at the edges, and is damaged or cut off sometimes."""
    fields = {'"prompt"': '"a b"', '"max_tokens"': "9"}
    fields |= {json.dumps(dice.choice(FIELDS)): dice.choice(JSON) for _ in range(dice.choice((0, 1, 1, 2, 5)))}
    data = ("{" + ", ".join(f"{name}: {value}" for name, value in fields.items()) + "}").encode("utf-8", "replace")
    begin = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    whole = f"{begin}Content-Length: {len(data)}\r\n\r\n".encode() + data
    return whole if dice.random() < 0.8 else whole[: dice.randrange(1, len(whole))]


def attack(port: int, count: int, seed: int, told: Counter[str]) -> None:
    """Send requests and noise, and go away in several ways. Modifies: told, how many answers had which status"""
    dice = random.Random(seed)
    for _ in range(count):
        data = dice.choice((head, post, post, lambda dice: dice.randbytes(5000)))(dice)
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2) as client:
            client.sendall(data)
            told[client.recv(4096)[9:12].decode("latin-1")] += 1
            if dice.random() < 0.2:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize("count", [15, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_server_under_attack_serves_others_and_keeps_nothing(server: Server, count: int) -> None:
    told = Counter[str]()
    threads = [threading.Thread(target=attack, args=(server.port, count, seed, told)) for seed in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        answer = server.ask("/v1/completions", {"prompt": ASKED, "temperature": 0, "priority": -1})
        assert answer.json["choices"][0]["text"] == ANSWER
    assert told["400"] > 0
    assert "500" not in told
