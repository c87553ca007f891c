"""The edges of HTTP over a socket: HEAD, slashes, methods, and heads that another server may read otherwise."""

from __future__ import annotations

import socket

import pytest

from .server import Server

GETS = ["/health", "/metrics", "/v1/models", "/v1/models/bundled"]
POSTS = ["/v1/completions", "/v1/chat/completions"]
BODY = b'{"prompt": "a", "max_tokens": 1}'


def sent(server: Server, head: str, body: bytes = b"") -> tuple[int, bytes]:
    """Return the status and all bytes behind the head of the answer."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(head.replace("\n", "\r\n").encode("latin-1") + b"\r\n\r\n" + body)
        data = b""
        while part := client.recv(65536):
            data += part
    told, _, rest = data.partition(b"\r\n\r\n")
    return int(told.split()[1]), rest


@pytest.mark.parametrize("path", GETS)
def test_head_has_the_status_and_the_headers_of_get_and_no_body(server: Server, path: str) -> None:
    whole = server.ask(path)
    close = "Host: localhost\nConnection: close"
    assert sent(server, f"HEAD {path} HTTP/1.1\n{close}") == (whole.status, b"")
    assert sent(server, f"HEAD {path}x HTTP/1.1\n{close}")[0] == server.ask(f"{path}x").status == 404
    assert sent(server, f"GET {path} HTTP/1.1\n{close}")[0] == 200


@pytest.mark.parametrize("path", [*GETS, *POSTS])
def test_a_slash_at_the_end_is_another_path_and_no_redirect(server: Server, path: str) -> None:
    """A redirect would lead to the name in the Host header."""
    for host in ("localhost", "127.0.0.1:80"):
        for method in ("GET", "HEAD", "POST"):
            length = f"Content-Length: {len(BODY)}\nContent-Type: application/json"
            head = f"{method} {path}/ HTTP/1.1\nHost: {host}\n{length}\nConnection: close"
            status, answer = sent(server, head, BODY)
            assert status in (404, 405), (method, status)
            assert b"ocation" not in answer


def test_another_method_is_status_405_and_says_which_there_are(server: Server) -> None:
    for path in (*GETS, *POSTS):
        answer = server.ask(path, {} if path in GETS else None)
        allowed = {"GET", "HEAD"} if path in GETS else {"POST"}
        assert (answer.status, set(answer.headers["Allow"].split(", "))) == (405, allowed)


@pytest.mark.parametrize(
    "head",
    [
        "Host: localhost\nContent-Length: 32\nTransfer-Encoding: chunked",
        "Host: localhost\nTransfer-Encoding: chunked\nContent-Length: 0",
        "Host: localhost\nContent-Length: 32\nContent-Length: 5",
        "Host: localhost\nTransfer-Encoding: gzip, chunked",
        "Host: localhost\nTransfer-Encoding: chunked\nTransfer-Encoding: chunked",
        "Host: localhost\nContent-Length: +32",
        "Host: localhost\nContent-Length : 32",
        "Host: localhost\nHost: evil.example\nContent-Length: 32",
        "Host: localhost\nHost: localhost\nContent-Length: 32",
        "Content-Length: 32",
    ],
)
def test_a_head_that_can_be_read_in_two_ways_is_refused_and_nothing_behind_it_read(server: Server, head: str) -> None:
    before = server.count(200)
    second = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    second += b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
    kind = "Content-Type: application/json"
    status, rest = sent(server, f"POST /v1/completions HTTP/1.1\n{kind}\n{head}", b"0\r\n\r\n" + second)
    assert status in (400, 501)
    assert b"HTTP/1.1" not in rest, "one answer"
    assert server.count(200) == before
    assert sent(server, "GET /health HTTP/1.1\nHost: localhost\nConnection: close")[0] == 200
