"""URLs of stores in texts for people: user, password and query are ***.

    redis://user:password@10.0.0.2/0?protocol=3   is shown as   redis://***@10.0.0.2/0?***

A password may hold any character, also those that end a part of a URL. So all that may belong to it is hidden: the text
before the last @, and all of a URL in which a query may begin there or that names no host.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple
from urllib.parse import unquote

_SCHEME: Final = re.compile(r"(?:(?:[\w+.-]*:)?//)?")
_AUTHORITY: Final = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(:\d{0,5})?")
"""A host and a port. Another text with a colon is a user and a password."""


class _Parts(NamedTuple):
    scheme: str
    secret: str  # user and password, with the @ if a place follows
    place: str
    query: str


def shown(url: str) -> str:
    """Return `url` as errors and logs show it."""
    scheme, secret, place, query = _parts(url)
    user = "***" * (secret not in ("", "@")) + "@" * (len(secret) > 1 and secret[-1] == "@")
    return scheme + user + place + "?***" * bool(query)


def _parts(url: str) -> _Parts:
    scheme = _SCHEME.match(url)[0]  # type: ignore[index]  # it matches the empty text, too
    rest = url[len(scheme) :]
    user, at, place = rest.rpartition("@")
    place, query = place[: (end := _end(place))], place[end:]
    if _end(user) < len(user) or not (at or _AUTHORITY.fullmatch(place.split("/")[0])):
        return _Parts(scheme, rest.rstrip("@"), "", "")
    return _Parts(scheme, user + at, place, query)


def _end(text: str) -> int:
    """Return where a query or a fragment begins."""
    found = re.search("[?#]", text)
    return found.start() if found else len(text)


def reason(error: object, url: str, *others: str) -> str:
    """Return the first line of an exception of a client library, or its class if the line may show a secret.

    An answer over HTTP is told by its status alone: servers send back what they were sent, with its credentials.
    others: texts of which some may be secrets, besides those in `url`
    """
    parts, line = _parts(url), re.sub(r"(status code: \d+[^:]*):.*", r"\1", str(error).partition("\n")[0])
    words = {*_words(parts.secret), *others, *(word for word in _words(parts.query) if len(word) > 2)}
    words |= {parts.secret.rstrip("@")} - {""}
    is_safe = url.isascii() and not any(word.casefold() in line.casefold() for word in words)
    return line if line and is_safe else type(error).__name__


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", f"{text} {unquote(text)}")
