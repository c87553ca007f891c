"""User, password and query of the URL of a store are in no error, log line, repr or traceback."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from typing import Any
from unittest.mock import Mock
from urllib.parse import quote

import numpy as np
import pytest

from pagedkv import PagedKVCache
from pagedkv.errors import InvalidRequest
from pagedkv.tiers import ObjectTier, RedisTier, client_of
from pagedkv.tiers.from_text import tiers_of
from pagedkv.tiers.shared.objects import ObjectClient
from pagedkv.tiers.shared.records import Records
from pagedkv.tiers.urls import reason, shown
from tests.tiers.stores import reachable
from tests.tiers.world import IDS, SPEC, World

FIRST, SECOND = "Zq7first3Xv", "Yk5second9Wp"
"""Two halves of a secret: a part of it is a secret, too."""

PASSWORDS = [
    f"{FIRST}{SECOND}",
    *(
        f"{FIRST}{between}{SECOND}"
        for between in ("@", "/", "?", "#", ":", "%40", "://", " ", "\\", "'", "é", "[", "&")
    ),
]

PLACES = {
    "redis": [
        "redis://user:{}@127.0.0.1:9/0", "redis://{}@127.0.0.1:9", "redis://:{}@127.0.0.1:9/x", "redis://{}:@h:port",
        "redis://user:{}", "redis://user:{}@", "redis://:{}@/0", "redis://127.0.0.1:9/0?password={}",
        "redis://127.0.0.1:9?protocol=3&password={}", "rediss://u:{}@127.0.0.1:9", "unix://u:{}@/tmp/none", "user:{}@h",
        "user:{}", "nodis://user:{}@h/0", "redis://127.0.0.1:9/0?socket_timeout={}",
    ],
    "objects": [
        "https://user:{}@127.0.0.1:9/b", "https://{}@127.0.0.1:9/b", "http://127.0.0.1:9/b?token={}",
        "http://127.0.0.1:9/b#{}", "s3x://KEY:{}@bucket", "s3://KEY:{}@bucket/p", "az://a:{}@c/x", "gs://a:{}@b",
        "file://user:{}@host/none", "memory://u:{}@x", "https://acc.blob.core.windows.net/c?sig={}", "https://u:{}@[h",
        "https://u:{}", "user:{}@bucket", "s3://b?X-Amz-Signature={}&x=y", "nothing:{}@b",
    ],
    "mooncake": ["user:{}@127.0.0.1:9", "etcd://user:{}@h:1"],
}  # fmt: skip


def without_secret(text: str) -> None:
    for half in (FIRST, SECOND):
        assert half.casefold() not in text.casefold(), text


def told(call: Callable[[], Any]) -> str:
    """Return all that a person may see of a call: the repr of its result, or its exception."""
    try:
        result = call()
    except Exception as error:
        return "".join((repr(error), str(error), *traceback.format_exception(error)[1:], *chained(error)))
    for each in result if isinstance(result, list) else []:
        each.close()
    return repr(result)


def chained(error: BaseException | None) -> list[str]:
    """Return the texts of the exceptions behind one, also of those that a traceback leaves out."""
    found = []
    while error is not None:
        error = error.__cause__ or error.__context__
        found.append(repr(error))
    return found


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 7))])
@pytest.mark.parametrize("kind", PLACES)
def test_no_error_shows_a_secret_of_a_tier_in_words(kind: str, part: int, capfd: pytest.CaptureFixture[str]) -> None:
    """A part has each seventh pair of a place and a password."""
    codes = [*((one, str) for one in PASSWORDS), *((one, quote) for one in PASSWORDS[1::4])]
    for place, (password, code) in list(product(PLACES[kind], codes))[part::7]:
        if "@" in code(password) and not set("@?#") & set(place):
            continue  # the text behind the @ is a host
        url = place.format(code(password))
        for text in (f"{kind}:1MiB:{url}", f"{kind}:{url}", f"{kind}:{url}:1MiB", url, f"host:{url}", f"{kind}::{url}"):
            without_secret(told(lambda text=text: tiers_of([text])))  # type: ignore[misc]
            without_secret(told(lambda text=text: client_of(text)))  # type: ignore[misc]
    without_secret("".join(capfd.readouterr()))


@pytest.mark.parametrize(
    "store",
    [
        {"secret_access_key": f"{FIRST}{SECOND}", "no_such_option": "x"},
        {"client_options": {"timeout": f"{FIRST}-{SECOND}"}},
        {"retry_config": {"max_retries": f"{FIRST}-{SECOND}"}},
        {"no_such_option": f"{FIRST}{SECOND}"},
        {"aws_secret_access_key": [f"{FIRST}{SECOND}"]},
        f"{FIRST}{SECOND}",
    ],
)
def test_no_error_shows_a_secret_among_the_options_of_a_store(store: Any) -> None:
    pytest.importorskip("obstore")
    for url in ("s3://bucket", "az://bucket", "s3x://bucket", "https://h/x"):
        without_secret(told(lambda url=url: ObjectTier(url, "1MiB", key=None, store=store)))  # type: ignore[misc]


def redis(url: str) -> RedisTier:
    pytest.importorskip("redis")
    return RedisTier(url, "1MiB", key=None, timeout=0.2, patience=0.5)


def objects(url: str) -> ObjectTier:
    pytest.importorskip("obstore")
    return ObjectTier(url, "1MiB", key=None, timeout=0.2, linger=0.0, patience=0.5, store={"client_options": {
        "allow_http": True}} if url.startswith("http") else {})  # fmt: skip


@pytest.mark.parametrize("password", [PASSWORDS[0], quote(PASSWORDS[2])])
@pytest.mark.parametrize(
    ("make", "place"),
    [
        (redis, "redis://user:{}@127.0.0.1:9/0"),
        (redis, "redis://127.0.0.1:9/0?password={}"),
        (objects, "http://user:{}@127.0.0.1:9/bucket"),
        (objects, "http://127.0.0.1:9/bucket?token={}"),
    ],
)
def test_a_store_that_fails_shows_no_secret_in_logs_results_and_reprs(
    make: Callable[[str], Any], place: str, password: str,
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert not reachable(9)
    caplog.set_level(logging.DEBUG)
    try:
        tier = make(place.format(password))
    except InvalidRequest as error:
        without_secret(str(error))
        return
    poll, whys = tier.poll, list[str]()

    def heard() -> Any:
        results = poll()
        whys.extend(repr(result) for result in results)
        return results

    tier.poll = heard
    world = World(PagedKVCache(SPEC, model="m", num_frames=16, tiers=[tier]))
    for first in (0, 100):  # 20 failures, of which 16 are told
        world.run([first, *IDS])
        world.cache.tiers.flush(300)
    world.cache.evict(16)
    world.cache.fetch(IDS).wait(300)
    world.cache.tiers.close()
    assert any("failed" in why for why in whys)
    assert "it is skipped" in caplog.text
    for text in (caplog.text, *whys, repr(tier), repr(world.cache), *capfd.readouterr()):
        without_secret(text)
    without_secret(str(world.cache.tiers.stats()))


def telling() -> Mock:
    """Return a client whose every call raises an error that shows its URL."""
    url = f"redis://user:{FIRST}@127.0.0.1:9/0?password={SECOND}"
    errors = {
        "find": ConnectionError(f"cannot reach {url}"), "get": TimeoutError(f"no answer\nof {url}"),
        "put": ValueError(url.upper()), "delete": ValueError(f"user is {SECOND}"), "close": ValueError(repr(url)),
    }  # fmt: skip
    return Mock(url=url, **{f"{call}.side_effect": error for call, error in errors.items()})


def test_an_exception_of_a_client_is_told_without_the_secrets_of_its_url() -> None:
    records = Records(telling(), None)
    calls = [
        lambda: records.find([b"p"]),
        lambda: records.get([b"p"], 9),
        lambda: records.delete([b"p"]),
        records.close,
    ]
    calls.append(lambda: records.put([b"p"], [np.zeros(1, np.uint8)]))  # type: ignore[arg-type, return-value]
    for call in calls:
        without_secret(told(call))
        with pytest.raises(OSError, match="Error|no answer"):
            call()


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("s3://bucket/a/prefix", "s3://bucket/a/prefix"),
        ("127.0.0.1:50051", "127.0.0.1:50051"),
        ("redis://user:password@h:1/0", "redis://***@h:1/0"),
        ("https://h/x?sig=abc&se=1", "https://h/x?***"),
        ("https://h/x#token", "https://h/x?***"),
        ("redis://h?password=p@ss", "redis://***"),
    ],
)
def test_a_url_is_shown_as_far_as_it_holds_no_secret(url: str, text: str) -> None:
    assert shown(url) == text


def test_an_exception_that_shows_no_secret_is_told_in_its_own_words() -> None:
    refused = ConnectionError("Error 111 connecting to 127.0.0.1:9. Connection refused.\n\nDebug source: ...")
    for url in ("", "redis://127.0.0.1:9/0", "redis://someone:password@127.0.0.1:9/0"):
        assert reason(refused, url) == "Error 111 connecting to 127.0.0.1:9. Connection refused."
    assert reason(refused, "redis://refused:x@h") == "ConnectionError"
    assert reason(TimeoutError(), "") == "TimeoutError"


class Echo(BaseHTTPRequestHandler):
    """A server that refuses each request, and sends back what it got."""

    def do_GET(self) -> None:
        said = f"{self.requestline} {dict(self.headers)}".encode()
        self.send_response(400)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    do_PUT = do_PROPFIND = do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Write nothing to stderr."""


@pytest.fixture
def echo() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("url", "options"),
    [
        (f"http://user:{FIRST}@HOST/b", {}),
        (f"http://HOST/b?token={FIRST}", {}),
        ("s3://b", {"region": "x", "aws_access_key_id": FIRST, "secret_access_key": "x", "session_token": SECOND}),
        ("az://b/p", {"account_name": "name", "sas_key": f"sv=1&sig={FIRST}"}),
        ("az://b/p", {"account_name": "name", "bearer_token": FIRST}),
    ],
)
def test_a_server_that_sends_back_what_it_got_is_told_by_its_status(url: str, options: Any, echo: str) -> None:
    pytest.importorskip("obstore")
    where = {} if "HOST" in url else {"endpoint": f"http://{echo}"}
    options = {**options, **where, "client_options": {"allow_http": True}}
    records = Records(ObjectClient(url.replace("HOST", echo), 2.0, options), None)
    for call in (lambda: records.put([b"p"], [np.zeros(1, np.uint8)]), lambda: records.find([b"p"])):
        without_secret(text := told(call))
        assert "GenericError" in text or "400" in text
