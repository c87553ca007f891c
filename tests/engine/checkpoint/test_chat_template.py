"""Chat templates run in a sandbox: what they get is JSON, and their text is limited.

`tests/cli/hostile.py` has the table of hostile templates, and `test_tokenizer.py` compares texts with transformers.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pagedkv.engine.checkpoint.chat_template import ChatTemplate
from pagedkv.errors import InvalidRequest


def test_threads_get_their_own_texts() -> None:
    template = ChatTemplate("{{ n }}")
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda n: template.render({"n": n}), range(200))) == list(map(str, range(200)))


@pytest.mark.parametrize("value", [{1, 2}, b"a", 10**5000, object()], ids=["set", "bytes", "integer", "object"])
def test_variables_that_are_no_json_are_refused(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="are not JSON values"):
        ChatTemplate("{{ n }}").render({"n": value})


def test_a_template_cannot_change_the_messages() -> None:
    messages = [{"role": "user", "content": "a"}]
    for source in ("{{ messages.append(1) }}", "{{ messages[0].update(role='b') }}", "{{ messages.clear() }}"):
        with pytest.raises(InvalidRequest, match="refuses these messages: "):
            ChatTemplate(source).render({"messages": messages})
    assert messages == [{"role": "user", "content": "a"}]


def test_a_text_may_have_millions_of_characters() -> None:
    text = "là 🙂" * 10**6
    assert ChatTemplate("{{ text }}").render({"text": text}) == text
