"""Bad input gives one line on stderr, status 2, and nothing else; options are checked before torch is imported."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pagedkv.engine.step.engine import Engine
from pagedkv.kernels import registry

NUMBERS = "fit --layers 1 --kv-heads 1 --head-dim"

BEFORE_TORCH = {
    "generate --max-tokens=-5": "--max-tokens is -5; it must be an integer of at least 1",
    "generate --min-tokens=200": "--min-tokens is 200; it must be an integer from 0 to --max-tokens, 128",
    "generate --kv-dtype=fp4": "--kv-dtype is 'fp4'; it must be, with dtype bfloat16, one of bfloat16, fp8_e4m3",
    "generate --kv-dtype=auto:x": "--kv-dtype is 'auto:x'; give auto, or auto:BOUND with a number above 0 (auto:0.02)",
    "generate --kv-text=FILE": "--kv-text is given, and --kv-dtype is None; only --kv-dtype auto reads a text",
    "generate --block-size=0": "--block-size is 0; give at least 1",
    "generate --memory=lots": "--memory: 'lots' is not an amount of memory",
    "generate --memory=10KiB": "holds no frame: one takes 65536 bytes. Give at least that, or lower --block-size",
    "generate --device=toaster": "--device is 'toaster'; give cpu",
    "generate --sinks=4": "--sinks is 4 without --window; give --window, too",
    "generate --context=8193": "--context is 8193; give an int from 1 to 8192, the positions of the model",
    "generate --model=no/such/folder": "no folder no/such/folder",
    "generate --prompt=": "the prompt is empty",
    "serve --max-body=much": "--max-body: 'much' is not an amount of memory",
    "fit --context 8193": "--context is 8,193; the model ends at 8,192 tokens",
}
"""Tried in a process each: their imports are looked at."""

REFUSED = BEFORE_TORCH | {
    "compress": "compress",
    # generate: the prompt
    "generate --prompt=\udcff": "not Unicode text",
    "generate --prompt=a --prompt-file=b": "--prompt and --prompt-file",
    "generate --prompt=a -": "--prompt and -",
    "generate --prompt-file=no/such/file": "cannot read no/such/file: No such file",
    "generate --prompt-file=.": "cannot read .: Is a directory",
    "generate --prompt-file=/dev/zero": "/dev/zero has more than 268,435,456 bytes; give the prompts in several",
    "generate hello": "unexpected argument 'hello'",
    "generate --no-such-option": "--no-such-option",
    "generate --seed": "--seed",
    "generate --system=a": "--system is for the chat template; give --chat, or messages in a .jsonl",
    "generate --template-var=a=1": "--template-var is for the chat template",
    "generate --chat --template-var=a": "--template-var is 'a'; give NAME=VALUE",
    "generate --chat --template-var=9=1": "--template-var is '9=1'",
    "generate --chat --template-var=messages=[]": "and another name than messages or self",
    # generate: sampling
    "generate --max-tokens=many": "--max-tokens is 'many'; give an integer",
    "generate --temperature=hot": "--temperature is 'hot'; give a number",
    "generate --temperature=nan": "--temperature is nan; give a number",
    "generate --repetition-penalty=0": "--repetition-penalty is 0",
    "generate --seed=-1": "--seed is -1; it must be an integer from 0",
    "generate --stop=": "--stop is ''; give a text of at least one character",
    "generate --choice=": "--choice is ''; give a text",
    "generate --num-beams=2 --stop=a": "--stop cannot go with --num-beams; leave one of them out",
    "generate --num-beams=2 --num-samples=3": "--num-samples is 3, --num-beams 2",
    "generate --logprobs=2": "--logprobs are keys of the JSON; give --json too",
    "generate --num-samples=0": "--num-samples is 0; give at least 1",
    "generate --num-samples=9 --max-sequences=4": "--num-samples is 9",
    "generate --regex a --choice b": "--regex and --choice are given; the text can follow only one of them",
    "generate --json-schema missing.json": "cannot read the schema missing.json: No such file or directory; give an",
    "generate --json-schema FOLDER": "cannot read the schema FOLDER: it is a folder, not a regular file",
    "generate --json-schema []": "--json-schema is not an object; give an object such as",
    "generate --json-schema FOLDER/prompts": "the schema FOLDER/prompts is not JSON: Extra data",
    # generate: the model and its pool
    "generate --num-frames=-4": "--num-frames is -4; give at least 1",
    "generate --num-frames=4": "the pool has 4; raise --num-frames or --memory, or lower --max-tokens",
    "generate --memory=1MiB": "27 frames of 16 tokens, the pool has 16",
    "generate --memory=9999TiB": "--num-frames is",
    "generate --num-frames=64 --memory=1GiB": "--num-frames and --memory",
    "generate --state-memory=5%": "--state-memory is given, and this model has no recurrent states; leave it out",
    "generate --kernels=warp": "no kernel 'warp'",
    "generate --dtype=int3": "--dtype is 'int3'; give one of float32, bfloat16, float16",
    "generate --weights=int3": "--weights is 'int3'; give one of int8, int4",
    "generate --device=cuda:999": "--device is 'cuda:999'; torch finds",
    "generate --speculate=no-owner/no-draft": "fetch it with: hf download no-owner/no-draft",
    "generate --speculate=./draft": "no folder draft",
    "generate --model=\udcff": "no folder \\udcff",
    "generate --model=\x1b[2J": "no folder \\x1b[2J",
    "generate --kv-dtype auto --kv-text /no/file": "cannot read /no/file: No such file or directory; give a file",
    "generate --kv-dtype auto": "a text of 64 different tokens or more, and this one has 58",
    "kv-quality --text TRACE": "a text of 64 different tokens or more, and this one has",
    "kv-quality --plot kinds.png": "charts are SVG",
    "kv-quality": "the bundled checkpoint reads nothing but its records; give --model DIR, or --text FILE",
    "kv-quality --device toaster": "--device is 'toaster'; give cpu",
    # tiers
    "generate --tier host": "a tier is 'host'",
    "generate --tier host:lots": "'lots' is not an amount of memory",
    "generate --tier disk:1024TiB:FOLDER": "pages, and a tier holds fewer than 2147483648",
    "generate --tier disk:64MiB:FOLDER/file/in": "cannot be used: FOLDER/file/in: Not a directory",
    "generate --tier disk:64MiB:/proc/pagedkv": "cannot be used: /proc/pagedkv: No such file or directory",
    # serve
    "serve --speculate no-owner/no-draft --port 0": "fetch it with: hf download no-owner/no-draft",
    "serve --tier host:lots --port 0": "'lots' is not an amount of memory",
    "serve --host no.such.host.invalid": "cannot listen on no.such.host.invalid:8000",
    "serve --api-key=": "--api-key is empty; give a key",
    "serve --allowed-host a.*": "--allowed-host is 'a.*'; give a name, or *.example.com",
    "serve --api-keys /no/file": "cannot read the keys in /no/file: No such file or directory",
    "serve --api-keys /no/file --api-key a": "--api-keys and --api-key or PAGEDKV_API_KEY name keys",
    "serve --kv-events-replay tcp://*:0": "need --kv-events; give it an address",
    "serve --port 99999": "--port is 99999; give ",
    # fit
    "fit --layers 80": "--kv-heads, --head-dim are missing; give a config with --model, or the numbers",
    f"{NUMBERS} 8 --model x": "both give a geometry",
    f"{NUMBERS} 8 --weights int8": "--weights int8 needs a config",
    f"{NUMBERS} 7 --kv-dtype k8v4": "must be multiples of 8",
    "fit --kv-dtype auto": "--kv-dtype is 'auto'; it must be",
    f"fit --layers {10**400} --kv-heads 1 --head-dim 8": "--layers is 1000",
    f"fit --block-size {10**400}": "--block-size is 1000",
    "fit --weights int3": "--weights is 'int3'; give int8, int4, or a number of bytes such as 8GiB",
    "fit --memory 1GB --bandwidth 0": "--bandwidth is '0'",
    "fit --memory 1GB --bandwidth fast": "--bandwidth: 'fast' is not an amount",
    "fit --model no/such/folder": "there is no file or folder 'no/such/folder'; give a config with --model",
    "fit --model /dev/null": "it is a device",
    # replay
    "replay TRACE --policy fifo": "policy is 'fifo'",
    "replay TRACE --num-frames 0": "--num-frames is 0; give at least 1",
    "replay TRACE --num-frames 4 --memory 1GiB": "give one of them",
    "replay TRACE --memory 1KiB": "--memory is 1KiB; give the bytes of a block at least, 67108864",
    "replay TRACE --tier 1.5x": "--tier is '1.5x'; give frames, such as 65536, or a multiple of the pool, such as 8x",
    "replay TRACE --tier 8x --policy belady": "knows no tier",
    f"replay TRACE --num-frames {2**51}": "--num-frames is 2251799813685248; give at most 1,125,899,906,842,624",
    "replay FOLDER/none": "FOLDER/none cannot be read: No such file or directory; give a trace",
    "replay FOLDER/file": "line 1",
}


@pytest.fixture
def refused(command):
    """Return a function that runs `pagedkv` with bad arguments and returns the error message."""

    def run(*argv):
        status, out, err = command(*argv)
        assert (status, out) == (2, ""), err
        assert err.startswith("pagedkv: error: ")
        assert (err.count("\n"), err[-1]) == (1, "\n")
        return err.removeprefix("pagedkv: error: ")

    return run


@pytest.mark.parametrize("line", REFUSED)
def test_bad_input_is_refused_in_one_line_that_names_the_option(refused, tmp_path, line):
    if line.startswith("serve"):
        pytest.importorskip("fastapi", reason="fastapi is not installed: pip install 'pagedkv[serve]'")
    (tmp_path / "file").write_text("{}")
    (tmp_path / "prompts").write_text("{}\n{}")
    (tmp_path / "trace.jsonl").write_text('{"hash_ids": [0, 1]}')
    places = {"FOLDER": str(tmp_path), "TRACE": str(tmp_path / "trace.jsonl")}
    words = REFUSED[line]
    for name, place in places.items():
        line, words = line.replace(name, place), words.replace(name, place)
    assert words in refused(*line.split(" "))


def test_values_are_checked_before_torch_is_imported():
    script = """
import json, sys
from pagedkv.cli.app import main
statuses = []
for line in json.loads(sys.argv[1]):
    try: main(line.split(" "))
    except SystemExit as end: statuses.append(end.code)
print(set(statuses), {"torch", "numba", "numpy"} & set(sys.modules))
"""
    lines = [line for line in BEFORE_TORCH if not line.startswith("serve")]
    run = subprocess.run([sys.executable, "-c", script, json.dumps(lines)], capture_output=True, text=True, timeout=60)
    assert (run.stdout, run.stderr.count("\n")) == ("{2} set()\n", len(lines)), run.stderr


def test_a_port_in_use_is_refused(refused):
    import socket

    pytest.importorskip("fastapi", reason="fastapi is not installed: pip install 'pagedkv[serve]'")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = refused("serve", "--port", taken.getsockname()[1])
    assert "Address already in use; give another --host or --port" in said


def test_a_kernel_that_objects_gives_its_reasons_in_the_line(refused, monkeypatch):
    objections = ["needs another CPU", "needs float16"]
    picky = registry.Kernel("picky", None, "pagedkv.kernels.reference", lambda case: objections)
    monkeypatch.setattr(registry, "KERNELS", (picky, *registry.KERNELS))
    why = "cannot serve on cpu: needs another CPU; give --kernels auto (`pagedkv doctor` has all reasons)"
    assert refused("generate", "--kernels", "picky") == f"--kernels picky {why}\n"
    monkeypatch.setenv("PAGEDKV_KERNELS", "picky")
    assert refused("generate") == f"PAGEDKV_KERNELS=picky {why}\n"


def test_files_that_hold_no_prompt_are_refused(refused, tmp_path):
    for name, data, words in (
        ("none.jsonl", b"\n \n", "none.jsonl holds no prompt"),
        ("latin.txt", "Zoë".encode("latin-1"), "latin.txt is not UTF-8 text"),
        ("empty.txt", b"\n", "empty.txt is empty"),
    ):
        (tmp_path / name).write_bytes(data)
        assert words in refused("generate", "--prompt-file", tmp_path / name)


def test_a_bad_environment_variable_is_refused(refused, monkeypatch, tmp_path):
    """numba raises when it is imported, in any command that computes."""
    monkeypatch.setenv("PAGEDKV_KERNELS", "warp")
    assert "no kernel 'warp'" in refused("generate")
    for number in ("0", " -3 ", "-99999999999999999999"):
        monkeypatch.setenv("NUMBA_NUM_THREADS", number)
        assert f"NUMBA_NUM_THREADS is {int(number)}; set it to a number of threads from 1 on" in refused("generate")
    monkeypatch.setenv("PAGEDKV_NUM_THREADS", "x")
    assert "PAGEDKV_NUM_THREADS is 'x'" in refused("doctor")
    monkeypatch.setenv("PAGEDKV_DEBUG", "9")
    assert "PAGEDKV_DEBUG is '9'" in refused("generate")


def test_a_short_key_of_a_tier_is_refused(refused, tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEDKV_TIER_KEY", "short")
    assert "PAGEDKV_TIER_KEY has 5 bytes; set it to 16 to 64" in refused("generate", "--tier", f"disk:64MiB:{tmp_path}")


LINES = {
    "{": "is not JSON",
    "[" * 100_000: "is not JSON",
    "7": 'a text under "prompt"',
    '{"text": "a"}': 'a text under "prompt"',
    '{"prompt": ["a"]}': 'a text under "prompt"',
    '{"prompt": "a", "messages": []}': 'either a text under "prompt" or a list under "messages"',
    '{"messages": {}}': 'a list under "messages"',
    '{"messages": []}': "give at least one",
    '{"messages": ["a"]}': 'objects with a "role" and a "content"',
    '{"messages": [{"content": "a"}]}': 'objects with a "role" and a "content"',
    '{"messages": [{"role": "user", "contents": "a"}]}': 'objects with a "role" and a "content" (a text, or',
    '{"messages": [{"role": "user", "content": null}]}': 'objects with a "role" and a "content" (a text, or',
    '{"messages": [{"role": "user", "content": ["a"]}]}': 'objects with a "role" and a "content" (a text, or',
    '{"messages": [{"role": "user", "content": "\\ud800"}]}': "half of a surrogate pair",
    '{"messages": [{"role": "user", "content": "a"}], "top_k": -1}': "top_k is -1",
    '{"prompt": ""}': "line 2 has an empty prompt; give at least one character",
    '{"question": "a"}': '"messages"; it has question',
    '{"prompt": "a", "max_token": 1}': "it has max_token (did you mean max_tokens?); besides",
    '{"prompt": "\\ud800"}': "not Unicode text",
    '{"prompt": "a", "colour": "red"}': "has colour",
    '{"prompt": "a", "max_tokens": 0}': "max_tokens is 0",
    '{"prompt": "a", "max_tokens": "9"}': "max_tokens is '9'",
    '{"prompt": "a", "stop": 5}': "stop is 5; it must be one or more strings",
    json.dumps({"prompt": "lamp " * 40_000}): "40001 tokens",
}


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[:60])
def test_a_bad_line_is_reported_and_costs_no_other(command, tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n' + line + '\n{"prompt": "b", "id": "last"}\n')
    status, out, err = command("generate", "--prompt-file", path, "--json")
    assert status == 1
    (complaint,) = [each for each in err.splitlines() if each.startswith("pagedkv: error: ")]
    assert complaint.startswith(f"pagedkv: error: {path}, line 2")
    assert LINES[line] in complaint
    found = [json.loads(each) for each in out.splitlines()[:-1]]
    assert [each["line"] for each in found] == [1, 2, 3]
    assert (found[2]["id"], found[2]["finish_reason"]) == ("last", "stop")
    assert LINES[line] in found[1]["error"]
    assert "text" not in found[1]


def test_a_file_without_a_usable_line_is_refused_before_weights_are_loaded(refused, monkeypatch, tmp_path):
    monkeypatch.setattr(Engine, "load", lambda *args, **options: pytest.fail("weights were loaded"))
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"text": "a"}\n{"prompt": "a", "top_k": -1}\n')
    assert refused("generate", "--prompt-file", path).startswith(f"{path}, line 1")
    assert refused("generate", "--prompt-file", path, "--top-k", -1).startswith("--top-k is -1"), "no fault of a line"


def test_a_line_whose_request_fails_costs_no_other(command, monkeypatch, tmp_path):
    from pagedkv.engine.step.delivery import Delivery

    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b b"}\n')
    take = Delivery.take

    def failing(delivery, sequence, token, now):
        if len(sequence.completion.request.prompt_ids) == 2:
            sequence.completion.end("error", "the logits hold NaN")
        else:
            take(delivery, sequence, token, now)

    monkeypatch.setattr(Delivery, "take", failing)
    status, out, err = command("generate", "--prompt-file", path, "--json")
    first, second, _ = map(json.loads, out.splitlines())
    assert (status, err) == (1, f"pagedkv: error: {path}, line 1: the logits hold NaN\n")
    assert (first["finish_reason"], first["error"]) == ("error", "the logits hold NaN")
    assert (second["text"], "error" in second) == ("I do not know.", False)
    status, out, err = command("generate", "--prompt-file", path)
    assert (status, out) == (1, f"==> {path}, line 2 <==\nI do not know.\n\n")
    assert "3 tokens" in err


def test_a_bug_of_pagedkv_is_a_traceback(command, monkeypatch):
    monkeypatch.setattr(Engine, "step", lambda engine: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        command("generate")
