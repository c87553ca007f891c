"""`pagedkv generate`: the contents of stdout, their order and their time; and texts that follow a grammar."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import sys
from types import SimpleNamespace

import pytest

from pagedkv.cli import compiling, generate, shaping
from pagedkv.core.compiled import MACHINE_CODE
from pagedkv.engine.checkpoint import BUNDLED
from pagedkv.engine.checkpoint.demo import DEMO_PROMPT
from pagedkv.engine.checkpoint.tokenizer import Tokenizer
from pagedkv.engine.sampling.params import SamplingParams
from tests.records import DEMO_ANSWER

from ..engine.sampling.test_grammar import byte_tokenizer

KEYS = {
    "text": str,
    "token_ids": list,
    "finish_reason": str,
    "usage": dict,
    "ttft_ms": float,
    "latency_ms": dict,
    "tokens_per_s": float,
}
OF_A_LINE = {"line": int, "id": type(None), **KEYS}
OF_A_RUN = {"percentiles_ms": dict, "frames_peak": int, "waste": float, "sharing": float, "kernels": str}
LAMP = "Mira keeps a red lamp in the cellar. Where is the lamp of Mira?"
OTTO = "Otto lives in Ghent. Where does Otto live?"


def schema(found):
    return {name: type(value) for name, value in found.items()}


def test_without_a_prompt_the_bundled_checkpoint_answers_its_question(command):
    status, out, err = command("generate")
    assert (status, out) == (0, DEMO_ANSWER + "\n")
    assert " ".join(err.split()).startswith(" ".join(DEMO_PROMPT.split()))


def test_the_table_reports_time_and_memory_of_the_run(command):
    table = command("generate").err.removeprefix(DEMO_PROMPT)
    asked = "prompt output first token frames at peak bytes at peak prefix hits waste kernel model"
    assert " ".join(re.findall(r"^(\w+(?: \w+)*)(?=  )", table, re.M)) == asked
    found = json.loads(command("generate", "--json").out)
    run = found["run"]
    assert re.search(rf"frames at peak +{run['frames_peak']} of 2,048", table)
    assert f"{run['waste']:.1%} of the slots in frames" in table
    assert re.search(rf"kernel +{run['kernels']}", table)
    assert f"{found['usage']['prompt_tokens']} tokens" in table


def test_the_table_leaves_out_what_is_noise_and_what_is_untrue_of_another_model(command):
    longer = command("generate", "--prompt", LAMP, "--ignore-eos", "--max-tokens", 33, "--model", BUNDLED).err
    assert re.search(r"speed +[\d,]+ tokens/s after the first", longer)
    for name in ("waste", "model"):
        assert not re.search(rf"^{name} ", longer, re.M)


def test_json_is_one_object_and_nothing_else(command):
    status, out, err = command("generate", "--json")
    found = json.loads(out)
    run = found.pop("run")
    assert (status, err, schema(found), schema(run)) == (0, "", KEYS, OF_A_RUN)
    assert found["text"] == DEMO_ANSWER
    assert (found["ttft_ms"] > 0, found["tokens_per_s"] > 0, 0 < run["waste"] < 1) == (True, True, True)
    block_size = 16
    counts = {"prompt_tokens": 290, "completion_tokens": len(found["token_ids"]), "cached_tokens": 0}
    assert (found["finish_reason"], found["usage"]) == ("stop", counts)
    most = 290 + len(found["token_ids"]) - 1  # the KV of the last token is never computed
    assert run["frames_peak"] == -(-most // block_size)


def test_json_lists_several_samples(command):
    options = ("--num-samples", 3, "--temperature", 3, "--seed", 1, "--max-tokens", 12)
    found = json.loads(command("generate", "--json", *options).out)
    assert list(found) == ["samples", "run"]
    assert [schema(sample) for sample in found["samples"]] == [KEYS] * 3
    assert found["run"]["sharing"] > 0.5  # all but one do without frames of their own for the prompt
    assert len({tuple(sample["token_ids"]) for sample in found["samples"]}) > 1


def test_text_is_written_as_it_is_made(command, monkeypatch):
    shown = []

    class Tape(io.StringIO):
        """A stdout that tells its contents at each flush."""

        def flush(self):
            shown.append(self.getvalue())

    monkeypatch.setattr(sys, "stdout", Tape())
    command("generate", "--prompt", LAMP)
    assert shown[:3] == ["Mira", "Mira keeps", "Mira keeps a"]
    assert DEMO_ANSWER in shown


def test_samples_follow_one_another_and_the_first_is_live(command):
    ask = ("generate", "--prompt", LAMP, "--num-samples", 3, "--temperature", 3, "--seed", 1, "--max-tokens", 12)
    texts = [sample["text"] for sample in json.loads(command(*ask, "--json").out)["samples"]]
    assert len(set(texts)) > 1
    assert command(*ask).out == "\n".join(f"==> sample {n} of 3 <==\n{text}\n" for n, text in enumerate(texts, 1))


def test_options_reach_the_engine(command):
    def ask(*options):
        return json.loads(command("generate", "--json", *options).out)

    assert ask("--max-tokens", 3)["text"] == "Mira keeps a"
    assert ask("--stop", " red", "--stop", "lamp")["text"] == "Mira keeps a"
    assert ask("--block-size", 1)["run"]["frames_peak"] == sum(ask()["usage"].values()) - 1
    assert ask("--kernels", "reference", "--dtype", "float32", "--memory", "64MiB")["text"] == DEMO_ANSWER
    for options in (("--weights", "int8"), ("--device", "cpu"), ("--prefill-chunk", 100)):
        assert ask(*options)["text"] == DEMO_ANSWER
    assert re.search(r"kernel +\w+, int8, cpu", command("generate", "--kv-dtype", "int8").err)
    longer = ask("--ignore-eos", "--max-tokens", 30)
    assert (longer["usage"]["completion_tokens"], longer["finish_reason"]) == (30, "length")
    assert ask("--repetition-penalty", 1000)["text"] != DEMO_ANSWER
    assert ask("--min-tokens", 14)["text"].startswith(DEMO_ANSWER + " ")
    warm = ("--temperature", 5, "--seed", 3, "--max-tokens", 40)
    for penalty in ("--frequency-penalty", "--presence-penalty"):
        assert ask(*warm, penalty, -2)["text"] != ask(*warm)["text"]
    wild = ("--temperature", 100, "--seed", 3, "--max-tokens", 8)
    assert ask(*wild)["text"] != ask("--max-tokens", 8)["text"]
    for narrow in (("--top-k", 1), ("--top-p", 1e-9), ("--min-p", 1)):
        assert ask(*wild, *narrow)["text"] == ask("--max-tokens", 8)["text"]


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["text", "json"])
def test_the_compiler_is_announced_once_and_never_beside_json(command, monkeypatch, caplog, options):
    monkeypatch.setattr(compiling, "begin_warm_up", lambda: [MACHINE_CODE.say(""), MACHINE_CODE.say("")])
    monkeypatch.setattr(MACHINE_CODE, "_what", "the memory manager")
    monkeypatch.setattr(MACHINE_CODE, "_said", set())
    assert command("generate", "--prompt", LAMP, *options).status == 0
    assert caplog.text.count("compiling the memory manager; ") == (not options)
    assert ("compiled functions are kept in" in caplog.text) == (not options)


def test_a_run_that_compiles_nothing_says_nothing_of_it(command, caplog):
    command("generate", "--prompt", LAMP)
    assert "compiling" not in command("generate", "--prompt", LAMP).err + caplog.text


@pytest.fixture
def three(tmp_path):
    """Return a file of three prompts. The first one has the longest answer, so it finishes last."""
    path = tmp_path / "three.jsonl"
    lines = [
        {"prompt": LAMP},
        {"prompt": OTTO, "max_tokens": 2},
        {"prompt": "Ghent has ten bridges. How many bridges does Ghent have?"},
    ]
    path.write_text("\n\n".join(map(json.dumps, lines)))
    return path


def test_results_come_in_input_order(command, three):
    status, out, err = command("generate", "--prompt-file", three, "--json")
    *found, run = [json.loads(line) for line in out.splitlines()]
    assert (status, err, list(run), schema(run["run"])) == (0, "", ["run"], OF_A_RUN)
    assert [sample["text"] for sample in found] == [DEMO_ANSWER, "Otto lives", "Ghent has ten bridges."]
    assert [schema(sample) for sample in found] == [OF_A_LINE] * 3
    assert [sample["line"] for sample in found] == [1, 3, 5]
    assert [sample["finish_reason"] for sample in found] == ["stop", "length", "stop"]


def test_blocks_of_text_name_their_prompt_and_sample(command, three):
    answers = {1: DEMO_ANSWER, 3: "Otto lives", 5: "Ghent has ten bridges."}
    assert command("generate", "--prompt-file", three).out == "".join(
        f"==> {three}, line {line} <==\n{text}\n\n" for line, text in answers.items()
    )
    twice = command("generate", "--prompt-file", three, "--num-samples", 2).out
    assert twice.count("==>") == 6
    assert f"==> {three}, line 3, sample 2 of 2 <==\nOtto lives\n\n" in twice


def test_a_text_file_is_one_prompt_without_its_last_newline(command, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text(OTTO + "\n")
    assert command("generate", "--prompt-file", path).out == "Otto lives in Ghent.\n"
    assert command("generate", "--prompt", OTTO).out == "Otto lives in Ghent.\n"


def test_latencies_are_told_by_phases_and_by_percentiles(command, tmp_path):
    path = tmp_path / "many.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in (LAMP, OTTO)))
    first, last, run = map(json.loads, command("generate", "--prompt-file", path, "--json").out.splitlines())
    for found in (first, last):
        spent = found["latency_ms"]
        assert spent["queue"] + spent["prefill"] == pytest.approx(found["ttft_ms"], abs=0.01)
        assert list(spent) == ["queue", "prefill", "decode"]
        assert min(spent.values()) > 0
    for name in ("queue", "first_token", "between_tokens", "total"):
        told = run["run"]["percentiles_ms"][name]
        assert 0 < told["p50"] <= told["p90"] <= told["p99"]
    slowest = run["run"]["percentiles_ms"]["first_token"]["p99"]
    assert slowest == pytest.approx(max(first["ttft_ms"], last["ttft_ms"]), rel=0.022)
    table = command("generate", "--prompt-file", path).err
    for name in ("queue", "first token", "next token", "whole output"):
        assert re.search(rf"^{name} +[\d.,]+ +[\d.,]+ +[\d.,]+ ms \(p50, p90, p99\)", table, re.M)


TEMPLATE = "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}{{ [thinking, name] }}"


@pytest.fixture
def rendered(command, tmp_path, monkeypatch):
    """Return a function that runs `pagedkv generate` and returns the texts that TEMPLATE made."""
    for path in BUNDLED.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    texts, encode = [], Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda t, text, **kw: texts.append(text) or encode(t, text, **kw))

    def run(*argv):
        texts.clear()
        assert command("generate", "--model", tmp_path, "--max-tokens", 1, *argv).status == 0
        return list(texts)

    return run


def test_the_template_gets_a_system_message_and_variables(rendered):
    asked = ("--prompt", "Hi", "--chat", "--template-var", "thinking=false", "--template-var", "name=Otto")
    assert rendered(*asked) == ["user=Hi;[False, 'Otto']"]
    assert rendered(*asked, "--system", "Be brief.") == ["system=Be brief.;user=Hi;[False, 'Otto']"]
    assert rendered(*asked, "--template-var", 'name={"a": [1]}') == ["user=Hi;[False, {'a': [1]}]"]
    assert rendered("--prompt", "Hi") == ["Hi"]


def test_messages_of_a_line_go_through_the_template(rendered, tmp_path):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    own = [{"role": "system", "content": "mine"}, *talk]
    path = tmp_path / "talks.jsonl"
    path.write_text(
        "\n".join(map(json.dumps, [{"messages": talk, "max_tokens": 2}, {"messages": own}, {"prompt": "d"}]))
    )
    extra = ("--template-var", "thinking=1", "--template-var", "name=2")
    ends = "user=a;assistant=b;user=c;[1, 2]"
    assert rendered("--prompt-file", path, *extra) == [ends, f"system=mine;{ends}", "d"]
    shared = rendered("--prompt-file", path, "--system", "ours", "--chat", *extra)
    assert shared == [f"system=ours;{ends}", f"system=mine;{ends}", "system=ours;user=d;[1, 2]"]


def test_json_has_log_probabilities_if_asked_for(command, tmp_path):
    found = json.loads(command("generate", "--prompt", LAMP, "--json", "--logprobs", 2).out)
    for token, each in zip(found["token_ids"], found["logprobs"], strict=True):
        assert each["top"][0] == [token, pytest.approx(each["logprob"], abs=1e-5)]
        assert each["logprob"] > each["top"][1][1]
    (tmp_path / "one.jsonl").write_text(json.dumps({"prompt": LAMP, "logprobs": 2}))
    line = json.loads(command("generate", "--prompt-file", tmp_path / "one.jsonl", "--json").out.splitlines()[0])
    assert line["logprobs"] == found["logprobs"]


def test_prompts_that_begin_alike_report_the_tokens_found(command, tmp_path):
    path = tmp_path / "same.jsonl"
    path.write_text(f"{json.dumps({'prompt': DEMO_PROMPT})}\n" * 2)
    lines = command("generate", "--prompt-file", path, "--max-sequences", 1, "--json").out.splitlines()[:-1]
    assert [json.loads(line)["usage"]["cached_tokens"] for line in lines] == [0, 288]


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},  # else random weights may write blanks without end
}
needs_library = pytest.mark.skipif(not importlib.util.find_spec("llguidance"), reason="llguidance is not installed")


@needs_library
@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        (("--regex", "[0-9]{4}-[0-9]{2}"), r"\d{4}-\d{2}"),
        (("--choice", "yes", "--choice", "no"), "yes|no"),
        (("--json-schema", json.dumps(SCHEMA)), r'\{\s*"n"\s*:\s*\d\s*\}'),
        (("--json-schema", "n.json"), r'\{\s*"n"\s*:\s*\d\s*\}'),
    ],
)
def test_the_text_follows_the_grammar_of_the_command_line(command, monkeypatch, tmp_path, options, pattern):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "n.json").write_text("\ufeff" + json.dumps(SCHEMA), encoding="utf-8")  # with a mark, as Windows has it
    monkeypatch.setattr(Tokenizer, "load", lambda _: byte_tokenizer())
    status, out, err = command("generate", "--prompt", "a", "--temperature", 1, "--seed", 3, *options)
    assert (status, bool(re.fullmatch(pattern, out.strip()))) == (0, True), out + err


def test_a_missing_library_is_named_before_a_model_is_loaded(command, monkeypatch):
    monkeypatch.setattr(shaping, "find_spec", lambda _: None)
    status, _, err = command("generate", "--model", BUNDLED, "--choice", "yes")
    words = "--choice needs the library llguidance; pip install 'pagedkv[grammar]'"
    assert (status, err) == (2, f"pagedkv: error: {words}\n")


@needs_library
def test_a_checkpoint_whose_tokens_have_no_bytes_is_refused_with_its_reason(command):
    status, _, err = command("generate", "--regex", "a")
    assert status == 2
    assert err.startswith("pagedkv: error: llguidance cannot use this tokenizer")
    assert "Unicode" not in err


def test_a_grammar_of_a_line_takes_the_place_of_that_of_the_command():
    of_command = SamplingParams(regex="[0-9]+", top_k=3)
    params = generate._params_of(SimpleNamespace(options={"choice": ("a", "b")}), of_command)
    assert (params.choice, params.regex, params.top_k) == (("a", "b"), None, 3)
    assert generate._params_of(SimpleNamespace(options={"top_k": 4}), of_command) == SamplingParams(
        regex="[0-9]+", top_k=4
    )
