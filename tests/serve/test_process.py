"""The server as a process: it drains at SIGTERM, ends at Ctrl-C, and refuses in one line what it cannot do."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from pagedkv.cli import serve as command
from pagedkv.cli.app import main

from .server import ASKED, LONG, serving


def ended(stream: socket.socket) -> str:
    """Return all that comes on a connection until the server closes it."""
    data = b""
    while part := stream.recv(65536):
        data += part
    return data.decode()


def test_sigterm_lets_running_requests_end_and_takes_no_new_ones(extra: None) -> None:
    with serving() as server:
        streams = [server.begun({**LONG, "max_tokens": 200}) for _ in range(3)]
        texts: list[str] = [""] * 3
        readers = [
            threading.Thread(target=lambda n=n: texts.__setitem__(n, ended(streams[n]))) for n in range(len(streams))
        ]
        for reader in readers:
            reader.start()
        server.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", server.port), timeout=5).close()
            except ConnectionRefusedError:
                break
            time.sleep(0.01)
        else:
            pytest.fail("it still accepts connections")
        for reader in readers:
            reader.join()
        _, said = server.process.communicate(timeout=60)
        assert (server.process.returncode, said) == (0, "")
        assert all('"finish_reason":"length"' in text and "data: [DONE]" in text for text in texts)


@pytest.mark.slow
def test_a_drain_has_an_end(extra: None) -> None:
    with serving("--drain", 1) as server, server.begun(LONG) as stream:
        server.process.send_signal(signal.SIGTERM)
        assert "[DONE]" not in ended(stream)
        assert server.process.wait(30) == 0


def test_a_port_in_use_and_a_bad_host_are_one_line_and_status_2(
    extra: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for options, words in (
            (("--port", str(taken.getsockname()[1])), "Address already in use; give another --host or --port"),
            (("--host", "no.such.host.invalid"), "cannot listen on no.such.host.invalid:8000"),
            (("--host", "a..b"), "cannot listen on a..b:8000: this is no name of a host"),
            (("--api-key", ""), "--api-key is empty; give a key"),
        ):
            with pytest.raises(SystemExit) as end:
                main(["serve", *options])
            said = capsys.readouterr().err
            assert (end.value.code, said.count("\n")) == (2, 1)
            assert words in said


def test_a_missing_extra_is_one_sentence_that_names_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "uvicorn" else object())
    with pytest.raises(SystemExit) as end:
        main(["serve"])
    assert end.value.code == 2
    wanted = "pagedkv: error: `pagedkv serve` needs uvicorn; install it with: pip install 'pagedkv[serve]'\n"
    assert capsys.readouterr().err == wanted


def test_ctrl_c_is_status_130_and_an_open_address_without_a_key_is_named(extra: None) -> None:
    with serving("--host", "0.0.0.0", "--name", "mine") as server, server.begun(LONG):
        assert "mine is served at http://0.0.0.0:" in server.said
        assert server.ask("/v1/models").json["data"][0]["id"] == "mine"
        assert "pagedkv: without an API key, all who reach this address can use it\n" in server.said
        assert server.end(signal.SIGINT) == (130, "")


def test_an_engine_that_stops_ends_the_server_with_its_reason(
    extra: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor starts the process again; /health and all others are 503 until then."""
    from pagedkv.model import Engine
    from pagedkv.serve import process

    engine = Engine.load(num_frames=64)

    def failing(*_: Any) -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(engine, "forward", failing)
    sock = command.bound("127.0.0.1", 0)
    listening = process.Listening("127.0.0.1", 0, "bundled", None, 8, None, 2**20, 5)
    told = SimpleNamespace(answer=b"")

    def ask() -> None:
        data = json.dumps({"prompt": ASKED}).encode()
        head = f"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        while True:
            try:
                with socket.create_connection(sock.getsockname(), timeout=20) as client:
                    client.sendall(head.encode() + data)
                    told.answer = ended(client)
                    return
            except ConnectionRefusedError:
                time.sleep(0.02)

    asker = threading.Thread(target=ask)
    asker.start()
    assert asyncio.run(process._serve(sock, engine, listening)) == 1
    asker.join()
    assert "503" in told.answer
    assert "failed 3 times in a row: RuntimeError: out of luck; restart it" in told.answer
    assert "pagedkv: error: the engine failed 3 times in a row" in capsys.readouterr().err
