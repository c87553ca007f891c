"""Bad input gives one line on stderr, exit status 2, and nothing else; an interruption ends quietly."""

from __future__ import annotations

import json
import shutil

import pytest

from pagedkv.checkpoint import BUNDLED
from pagedkv.kernels import registry
from pagedkv.model.engine import Engine


@pytest.fixture
def refused(command):
    """Return a function that runs `pagedkv generate` with bad arguments and returns the error message."""

    def run(*argv, subcommand="generate"):
        status, out, err = command(subcommand, *argv)
        assert (status, out) == (2, "")
        assert err.startswith("pagedkv: error: ")
        assert (err.count("\n"), err[-1]) == (1, "\n")
        return err.removeprefix("pagedkv: error: ")

    return run


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--prompt=", "the prompt is empty"),
        ("--prompt=\udcff", "not Unicode text"),
        ("--max-tokens=-1", "max_tokens is -1"),
        ("--max-tokens=many", "'--max-tokens'"),
        ("--temperature=-0.5", "temperature is -0.5"),
        ("--temperature=nan", "temperature is nan"),
        ("--top-k=-2", "top_k is -2"),
        ("--top-p=-0.1", "top_p is -0.1"),
        ("--min-p=1.5", "min_p is 1.5"),
        ("--repetition-penalty=0", "repetition_penalty is 0"),
        ("--frequency-penalty=3", "frequency_penalty is 3.0; it must be between -2 and 2"),
        ("--presence-penalty=nan", "presence_penalty is nan"),
        ("--min-tokens=200", "min_tokens is 200; it must be an integer from 0 to max_tokens, 128"),
        ("--seed=-1", "seed is -1"),
        ("--stop=", "none empty"),
        ("--num-samples=0", "num_samples is 0"),
        ("--block-size=0", "block_size is 0"),
        ("--num-frames=-4", "num_frames is -4"),
        ("--num-frames=4", "4"),
        ("--memory=lots", "'lots' is not an amount of memory"),
        ("--memory=-1GiB", "not an amount of memory"),
        ("--memory=10KiB", "holds no frame"),
        ("--memory=1MiB", "27 frames of 16 tokens, the pool has 16"),
        ("--memory=9999TiB", "num_frames is"),
        ("--num-frames=64 --memory=1GiB", "--num-frames and --memory"),
        ("--kernels=warp", "no kernel 'warp'"),
        ("--dtype=int3", "dtype is 'int3'"),
        ("--weights=int3", "weights is 'int3'; it must be None or one of int8, int4"),
        ("--system=a", "--system is for the chat template; give --chat, or messages in a .jsonl"),
        ("--template-var=a=1", "--template-var is for the chat template"),
        ("--chat --template-var=a", "--template-var is 'a'; give NAME=VALUE"),
        ("--chat --template-var=9=1", "--template-var is '9=1'"),
        ("--chat --template-var=messages=[]", "with another name than messages or self"),
        ("--chat --template-var=self=1", "with another name than messages or self"),
        ("--device=toaster", "--device is 'toaster'; give cpu"),
        ("--device=cuda:999", "--device is 'cuda:999'"),
        ("--device=", "--device is ''"),
        ("--kv-dtype=fp4", "kv_dtype is 'fp4'"),
        ("--speculate=no-owner/no-draft", "fetch it with: hf download no-owner/no-draft"),
        ("--speculate=./draft", "no folder draft"),
        ("--logprobs=2", "--logprobs are keys of the JSON; give --json too"),
        ("--logprobs=21 --json", "logprobs is 21"),
        ("--max-sequences=0", "max_sequences is 0"),
        ("--num-samples=9 --max-sequences=4", "num_samples is 9"),
        ("--prefill-chunk=0", "prefill_chunk is 0"),
        ("--prompt=- --prompt-file=b", "--prompt-file and - both"),
        ("--model=no/such/folder", "no folder no/such/folder"),
        ("--model=\udcff", "no folder \\udcff"),
        ("--model=\x1b[2J", "no folder \\x1b[2J"),
        ("--model=/dev/null", "no folder /dev/null"),
        ("--prompt=a --prompt-file=b", "--prompt and --prompt-file"),
        ("--prompt=a -", "--prompt and -"),
        ("--prompt-file=no/such/file", "cannot read no/such/file: No such file"),
        ("--prompt-file=.", "cannot read .: Is a directory"),
        ("hello", "unexpected argument 'hello'"),
        ("--no-such-option", "--no-such-option"),
        ("--seed", "--seed"),
    ],
)
def test_bad_options_are_refused_in_one_line(refused, options, complaint):
    assert complaint in refused(*options.split(" "))


def test_an_unknown_command_is_refused_in_one_line(refused):
    assert "compress" in refused(subcommand="compress")


def test_a_prompt_longer_than_the_pool_is_refused(refused):
    assert "the pool has 10; raise num_frames or memory" in refused("--prompt", "lamp " * 200, "--num-frames", 10)


def test_the_server_refuses_a_draft_model_in_the_same_words(refused):
    pytest.importorskip("fastapi", reason="fastapi is not installed: pip install 'pagedkv[serve]'")
    complaint = "fetch it with: hf download no-owner/no-draft"
    assert complaint in refused("--speculate", "no-owner/no-draft", "--port", 0, subcommand="serve")


@pytest.fixture
def checkpoint(tmp_path):
    return shutil.copytree(BUNDLED, tmp_path / "checkpoint")


def test_a_checkpoint_without_weights_is_refused(refused, checkpoint):
    (checkpoint / "model.safetensors").unlink()
    assert "model.safetensors" in refused("--model", checkpoint)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_truncated_checkpoint_is_refused(refused, checkpoint, name):
    data = (checkpoint / name).read_bytes()
    for part in (data[:0], data[: len(data) // 2], data[:-2]):
        (checkpoint / name).write_bytes(part)
        assert str(checkpoint) in refused("--model", checkpoint)


def test_an_unknown_architecture_is_refused(refused, checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    assert "model_type is 'mamba'" in refused("--model", checkpoint)


def test_a_kernel_that_objects_gives_its_reasons_in_the_line(refused, monkeypatch):
    picky = registry.Kernel(
        "picky", None, "pagedkv.kernels.reference", lambda case: ["needs another CPU", "needs float16"]
    )
    monkeypatch.setattr(registry, "KERNELS", (picky, *registry.KERNELS))
    assert "picky: needs another CPU; needs float16; " in refused("--kernels", "picky")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("7", 'a text under "prompt"'),
        ('{"text": "a"}', 'a text under "prompt"'),
        ('{"prompt": ["a"]}', 'a text under "prompt"'),
        ('{"prompt": "a", "messages": []}', 'either a text under "prompt" or a list under "messages"'),
        ('{"messages": {}}', 'a list under "messages"'),
        ('{"messages": []}', "give at least one"),
        ('{"messages": ["a"]}', 'objects with a "role" and a "content"'),
        ('{"messages": [{"content": "a"}]}', 'objects with a "role" and a "content"'),
        ('{"messages": [{"role": "user", "contents": "a"}]}', 'objects with a "role" and a "content" (a text, or'),
        ('{"messages": [{"role": "user", "content": null}]}', 'objects with a "role" and a "content" (a text, or'),
        ('{"messages": [{"role": "user", "content": ["a"]}]}', 'objects with a "role" and a "content" (a text, or'),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "half of a surrogate pair"),
        ('{"messages": [{"role": "user", "content": "a"}], "top_k": -1}', "top_k is -1"),
        ('{"prompt": ""}', "line 2 has an empty prompt; give at least one character"),
        ('{"question": "a"}', '"messages"; it has question'),
        ('{"prompt": "a", "max_token": 1}', "it has max_token (did you mean max_tokens?); beside"),
        ('{"prompt": "\\ud800"}', "not Unicode text"),
        ('{"prompt": "a", "colour": "red"}', "has colour"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens is 0"),
        ('{"prompt": "a", "max_tokens": "9"}', "max_tokens is '9'"),
        ('{"prompt": "a", "stop": 5}', "stop is 5; it must be a list"),
        (json.dumps({"prompt": "lamp " * 40_000}), "40001 tokens"),
    ],
)
def test_a_bad_line_is_reported_and_costs_no_other(command, tmp_path, line, complaint):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n' + line + '\n{"prompt": "b", "id": "last"}\n')
    for options in ((), ("--json",)):
        status, out, err = command("generate", "--prompt-file", path, *options)
        assert status == 1
        complaints = [each for each in err.splitlines() if each.startswith("pagedkv: error: ")]
        assert len(complaints) == 1
        assert complaints[0].startswith(f"pagedkv: error: {path}, line 2")
        assert complaint in complaints[0]
        assert options or out.count("I do not know.") == 2
    found = [json.loads(each) for each in out.splitlines()]
    assert [each["line"] for each in found] == [1, 2, 3]
    assert (found[2]["id"], found[2]["finish_reason"]) == ("last", "stop")
    assert complaint in found[1]["error"]
    assert "text" not in found[1]


def test_a_file_without_a_usable_line_is_refused_before_weights_are_loaded(refused, monkeypatch, tmp_path):
    monkeypatch.setattr(Engine, "load", lambda *args, **options: pytest.fail("weights were loaded"))
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"text": "a"}\n{"prompt": "a", "top_k": -1}\n')
    assert refused("--prompt-file", path).startswith(f"{path}, line 1")


def test_a_bad_option_of_the_command_is_not_the_fault_of_a_line(refused, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n')
    assert refused("--prompt-file", path, "--top-k", -1).startswith("top_k is -1")


def test_a_line_whose_request_fails_costs_no_other(command, monkeypatch, tmp_path):
    from pagedkv.model.loop.delivery import Delivery

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
    first, second = map(json.loads, out.splitlines())
    assert (status, err) == (1, f"pagedkv: error: {path}, line 1: the logits hold NaN\n")
    assert (first["finish_reason"], first["error"]) == ("error", "the logits hold NaN")
    assert (second["text"], "error" in second) == ("I do not know.", False)
    status, out, err = command("generate", "--prompt-file", path)
    assert (status, out) == (1, f"==> {path}, line 2 <==\nI do not know.\n\n")
    assert "3 tokens" in err


def test_files_that_hold_no_prompt_are_refused(refused, tmp_path):
    (tmp_path / "none.jsonl").write_text("\n \n")
    assert "none.jsonl holds no prompt" in refused("--prompt-file", tmp_path / "none.jsonl")
    (tmp_path / "latin.txt").write_bytes("Zoë".encode("latin-1"))
    assert "latin.txt is not UTF-8 text" in refused("--prompt-file", tmp_path / "latin.txt")
    (tmp_path / "empty.txt").write_text("\n")
    assert "empty.txt is empty" in refused("--prompt-file", tmp_path / "empty.txt")


def test_a_bad_environment_variable_is_refused(refused, monkeypatch):
    monkeypatch.setenv("PAGEDKV_KERNELS", "warp")
    assert "no kernel 'warp'" in refused()
    monkeypatch.setenv("PAGEDKV_DEBUG", "9")
    assert "PAGEDKV_DEBUG is '9'" in refused()


@pytest.mark.parametrize("number", ["0", "-1", " -3 ", "-99999999999999999999"])
def test_a_number_of_threads_that_numba_cannot_start_is_refused_in_one_sentence(refused, monkeypatch, number):
    """numba raises when it is imported, in any command that computes."""
    monkeypatch.setenv("NUMBA_NUM_THREADS", number)
    assert f"NUMBA_NUM_THREADS is {int(number)}; set it to a number of threads from 1 on" in refused()


def test_an_interruption_ends_quietly(command, monkeypatch):
    def interrupted(engine):
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "step", interrupted)
    for options in ((), ("--json",)):
        status, out, err = command("generate", "--prompt", "a", *options)
        assert (status, out, err.strip()) == (130, "", "")  # older versions of typer end the line of the ^C


def test_a_bug_of_pagedkv_gives_a_traceback(monkeypatch, command):
    monkeypatch.setattr(Engine, "step", lambda engine: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        command("generate")
