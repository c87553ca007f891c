"""API keys of a file: a tenant for each, and no error that shows one."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagedkv.errors import InvalidRequest
from pagedkv.serve.keys import ApiKeys


def test_a_key_has_the_tenant_of_its_line(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(b"# of the year\n\nsesame acme\n  op\xc3\xa9n\tzebra  \r\n")
    keys = ApiKeys.read(path)
    assert len(keys) == 2
    assert keys.tenant_of(b"Bearer sesame") == b"acme"
    assert keys.tenant_of(b"bearer  op\xc3\xa9n ") == b"zebra"
    for wrong in (b"", b"Bearer", b"Bearer ", b"sesame", b"Basic sesame", b"Bearer Sesame", b"Bearer sesame acme"):
        assert keys.tenant_of(wrong) is None
    assert "sesame" not in repr(vars(keys))


def test_blanks_around_the_only_key_do_not_count_and_a_key_is_one_word() -> None:
    """A secret that was made by `echo` ends in a new line."""
    assert ApiKeys.of(" secret\n").tenant_of(b"Bearer secret") == b""
    for key in ("", "  ", "two words"):
        with pytest.raises(InvalidRequest, match="the API key is empty or has blanks inside"):
            ApiKeys.of(key)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "has no key; give a line of `key tenant` for each"),
        (b"# only\n", "has no key"),
        (b"a b\nsecret\n", "line 2 of .* has 1 words; give `key tenant`"),
        (b"secret b c\n", "line 1 of .* has 3 words"),
        (b"secret a\nsecret b\n", "the key in line 2 of .* stands in an earlier line, too; drop one"),
        (None, "cannot read the keys in .*: No such file or directory; give another file"),
    ],
)
def test_a_bad_file_is_named_by_its_line_and_shows_no_key(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidRequest, match=words) as refused:
        ApiKeys.read(path)
    assert "secret" not in str(refused.value)
