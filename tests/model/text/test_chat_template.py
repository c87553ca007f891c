"""Chat templates run in a child process: what they take is limited, and what they do to the child has no effect here.

`tests/cli/hostile.py` has the table of hostile templates, and `test_tokenizer.py` compares texts with transformers.
"""

from __future__ import annotations

import ast
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pagedkv.checkpoint import chat_sandbox, chat_template
from pagedkv.checkpoint.chat_sandbox import CPU_SECONDS
from pagedkv.checkpoint.chat_template import ChatTemplate
from pagedkv.errors import CheckpointError, InvalidRequest

LOOPS = "{% if go %}{% for a in range(9**5) %}{% for b in range(9**5) %}{% endfor %}{% endfor %}{% endif %}done"


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def child_of(template: ChatTemplate) -> subprocess.Popen[bytes]:
    assert template._child is not None
    return template._child


def test_the_limit_of_time_is_that_of_one_rendering() -> None:
    """One child renders for more than the limit in all."""
    template = ChatTemplate("{% for a in range(50) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{{ n }}")
    assert template.render({"n": 0}) == "0"
    pid, renderings = child_of(template).pid, 1
    while processor_s(pid) < 1.05 * CPU_SECONDS:
        assert template.render({"n": renderings}) == str(renderings)
        renderings += 1
    assert renderings > 2
    assert child_of(template).pid == pid


def processor_s(pid: int) -> float:
    """Return the processor time of a process, from Linux."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_after_a_limit_the_next_rendering_has_a_new_child() -> None:
    template = ChatTemplate(LOOPS)
    assert template.render({"go": False}) == "done"
    first = child_of(template).pid
    with pytest.raises(CheckpointError, match=r"exceeds a limit \(it takes more than 2 s of processor time\)"):
        template.render({"go": True})
    assert not is_alive(first)
    assert template.render({"go": False}) == "done"


def test_a_child_that_waits_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of processor time does not end a process that gets none, as one that is stopped."""
    template = ChatTemplate("{{ 1 }}")
    template.render({})
    os.kill(child_of(template).pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(chat_template, "SECONDS", 0.5)
        with pytest.raises(CheckpointError, match=r"exceeds a limit \(it takes more than 0.5 s\)"):
            template.render({})
    assert template.render({}) == "1"


def test_an_interrupted_rendering_does_not_answer_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{{ n }}")
    assert template.render({"n": 1}) == "1"
    pipe: Any = child_of(template).stdout
    read = pipe.readline

    class Interrupted:
        def readline(self, most: int) -> bytes:
            read(most)
            raise KeyboardInterrupt

        close = pipe.close

    child_of(template).stdout = Interrupted()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        template.render({"n": 2})
    assert template.render({"n": 3}) == "3"


def test_threads_get_their_own_texts() -> None:
    template, wrong = ChatTemplate("{{ n }}"), []

    def render(first: int) -> None:
        for n in range(first, first + 50):
            if template.render({"n": n}) != str(n):
                wrong.append(n)

    threads = [threading.Thread(target=render, args=(1000 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_the_child_ends_with_its_template() -> None:
    template = ChatTemplate("{{ 1 }}")
    template.render({})
    child = child_of(template).pid
    del template
    gc.collect()
    assert not is_alive(child)


def test_the_child_ends_with_its_parent() -> None:
    program = (
        "import os\nfrom pagedkv.checkpoint.chat_template import ChatTemplate\n"
        "t = ChatTemplate('1')\nt.render({})\nprint(t._child.pid, flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    run = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, timeout=60)
    deadline = time.monotonic() + 10
    while is_alive(int(run.stdout)) and not is_zombie(int(run.stdout)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(int(run.stdout)) or is_zombie(int(run.stdout))


def is_zombie(pid: int) -> bool:
    """Return whether a process has ended and waits for a parent (in a container none may collect it)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return False


def test_a_python_that_cannot_render_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(InvalidRequest, match="'/no/such/python' cannot be started to render the chat template"):
        ChatTemplate("{{ 1 }}").render({})
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(CheckpointError, match="its process, /bin/false, ended with status 1"):
        ChatTemplate("{{ 1 }}").render({})


@pytest.mark.parametrize("value", [{1, 2}, b"a", 10**5000, object()], ids=["set", "bytes", "integer", "object"])
def test_variables_that_are_no_json_are_refused(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="are not JSON values"):
        ChatTemplate("{{ n }}").render({"n": value})


def test_a_text_may_have_millions_of_characters() -> None:
    text = "là 🙂" * 10**6
    assert ChatTemplate("{{ text }}").render({"text": text}) == text


def test_the_child_imports_the_standard_library_and_jinja_only() -> None:
    """It starts in a tenth of a second, and no import of pagedkv runs in it."""
    tree = ast.parse(Path(chat_sandbox.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {(getattr(node, "module", None) or node.names[0].name).split(".")[0] for node in imports}
    assert names - set(sys.stdlib_module_names) == {"jinja2"}
