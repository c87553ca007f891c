"""`pagedkv generate`: the contents of stdout, their order and their time."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys

import pytest
from numba.core import event
from rich.console import Console

from pagedkv.cli import compiling, generate
from pagedkv.core.tables import steps
from pagedkv.engine.checkpoint import BUNDLED
from pagedkv.engine.checkpoint.demo import DEMO_PROMPT
from pagedkv.engine.requests.request import Completion
from pagedkv.engine.step.engine import Engine
from tests.records import DEMO_ANSWER

KEYS = {
    "text": str,
    "token_ids": list,
    "finish_reason": str,
    "usage": dict,
    "ttft_ms": float,
    "latency_ms": dict,
    "percentiles_ms": dict,
    "tokens_per_s": float,
    "frames_peak": int,
    "waste": float,
    "sharing": float,
    "kernels": str,
}
OF_A_LINE = {"line": int, "id": type(None), **KEYS}
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
    asked = "prompt output first token speed frames at peak bytes at peak prefix hits waste kernel"
    assert " ".join(re.findall(r"^(\w+(?: \w+)*)(?=  )", table, re.M)) == asked
    found = json.loads(command("generate", "--json").out)
    assert re.search(rf"frames at peak +{found['frames_peak']} of 2,048", table)
    assert f"{found['waste']:.1%} of allocated slots" in table
    assert re.search(rf"kernel +{found['kernels']}", table)
    assert f"{found['usage']['prompt_tokens']} tokens" in table


def test_json_is_one_object_and_nothing_else(command):
    status, out, err = command("generate", "--json")
    found = json.loads(out)
    assert (status, err, schema(found)) == (0, "", KEYS)
    assert found["text"] == DEMO_ANSWER
    assert (found["ttft_ms"] > 0, found["tokens_per_s"] > 0, 0 < found["waste"] < 1) == (True, True, True)
    block_size = 16
    counts = {"prompt_tokens": 290, "completion_tokens": len(found["token_ids"]), "cached_tokens": 0}
    assert (found["finish_reason"], found["usage"]) == ("stop", counts)
    most = 290 + len(found["token_ids"]) - 1  # the KV of the last token is never computed
    assert found["frames_peak"] == -(-most // block_size)


def test_json_lists_several_samples(command):
    options = ("--num-samples", 3, "--temperature", 3, "--seed", 1, "--max-tokens", 12)
    found = json.loads(command("generate", "--json", *options).out)
    assert list(found) == ["samples"]
    assert [schema(sample) for sample in found["samples"]] == [KEYS] * 3
    assert found["samples"][0]["sharing"] > 0.5  # all but one do without frames of their own for the prompt
    assert len({tuple(sample["token_ids"]) for sample in found["samples"]}) > 1


def test_text_is_written_as_it_is_made(command, monkeypatch):
    class Tape(io.StringIO):
        """A stdout that remembers its contents at the last flush."""

        flushed = ""

        def flush(self):
            self.flushed = self.getvalue()

    tape, after_step = Tape(), []
    step = Engine.step

    def watched(engine):
        finished = step(engine)
        after_step.append(tape.flushed)
        return finished

    monkeypatch.setattr(Engine, "step", watched)
    monkeypatch.setattr(sys, "stdout", tape)
    command("generate", "--prompt", LAMP)
    assert after_step[:3] == ["Mira", "Mira keeps", "Mira keeps a"]
    assert after_step[-1] == DEMO_ANSWER


def test_samples_follow_one_another_and_the_first_is_live(command, monkeypatch):
    ask = ("generate", "--prompt", LAMP, "--num-samples", 3, "--temperature", 3, "--seed", 1, "--max-tokens", 12)
    texts = [sample["text"] for sample in json.loads(command(*ask, "--json").out)["samples"]]
    assert len(set(texts)) > 1
    assert command(*ask).out == "\n".join(f"==> sample {n} of 3 <==\n{text}\n" for n, text in enumerate(texts, 1))


def test_the_same_seed_gives_the_same_text(command):
    ask = ("generate", "--prompt", LAMP, "--temperature", 5, "--max-tokens", 30)
    assert command(*ask, "--seed", 7).out == command(*ask, "--seed", 7).out
    assert len({command(*ask, "--seed", seed).out for seed in range(4)}) > 1


def test_options_reach_the_engine(command):
    def ask(*options):
        return json.loads(command("generate", "--json", *options).out)

    assert ask("--max-tokens", 3)["text"] == "Mira keeps a"
    assert ask("--stop", " red", "--stop", "lamp")["text"] == "Mira keeps a"
    assert ask("--block-size", 1)["frames_peak"] == sum(ask()["usage"].values()) - 1
    assert ask("--kernels", "reference", "--dtype", "float32", "--memory", "64MiB")["text"] == DEMO_ANSWER
    assert ask("--weights", "int8")["text"] == DEMO_ANSWER
    assert ask("--repetition-penalty", 1000)["text"] != DEMO_ANSWER
    assert ask("--min-tokens", 14)["text"].startswith(DEMO_ANSWER + " ")
    warm = ("--temperature", 5, "--seed", 3, "--max-tokens", 40)
    for penalty in ("--frequency-penalty", "--presence-penalty"):
        assert ask(*warm, penalty, -2)["text"] != ask(*warm)["text"]
    wild = ("--temperature", 100, "--seed", 3, "--max-tokens", 8)
    assert ask(*wild)["text"] != ask("--max-tokens", 8)["text"]
    for narrow in (("--top-k", 1), ("--top-p", 1e-9), ("--min-p", 1)):
        assert ask(*wild, *narrow)["text"] == ask("--max-tokens", 8)["text"]


@pytest.mark.parametrize("elsewhere", [True, False], ids=["by other processes", "here"])
@pytest.mark.parametrize("options", [[], ["--json"]], ids=["text", "json"])
def test_the_compiler_is_announced_once_and_never_beside_json(command, monkeypatch, options, elsewhere):
    load = Engine.load

    def compile_and_load(*args, **kwargs):
        for function in (steps.plan_step, steps.commit_step):
            with event.trigger_event("numba:compile", data={"dispatcher": function}):
                pass
        return load(*args, **kwargs)

    monkeypatch.setattr(Engine, "load", compile_and_load)
    monkeypatch.setattr(compiling, "begin_warm_up", lambda *, uncompiled: elsewhere)
    status, _, err = command("generate", "--prompt", LAMP, *options)
    assert status == 0
    assert err.count("pagedkv: compiling the memory manager for this machine") == (not options)
    assert ("compiled functions are kept in" in err) == (not options)


def test_a_run_that_compiles_nothing_says_nothing_of_it(command):
    command("generate", "--prompt", LAMP)
    assert "compiling" not in command("generate", "--prompt", LAMP).err


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
    found = [json.loads(line) for line in out.splitlines()]
    assert (status, err) == (0, "")
    assert [sample["text"] for sample in found] == [DEMO_ANSWER, "Otto lives", "Ghent has ten bridges."]
    assert [schema(sample) for sample in found] == [OF_A_LINE] * 3
    assert [sample["line"] for sample in found] == [1, 3, 5]
    assert [sample["finish_reason"] for sample in found] == ["stop", "length", "stop"]


def test_many_prompts_that_do_not_fit_at_once_give_what_each_gives_alone(command, tmp_path):
    questions = [
        f"{name} keeps a red lamp in the {place}. Where is the lamp of {name}?"
        for name in ("Mira", "Otto", "Ines", "Hugo")
        for place in ("cellar", "attic", "kitchen")
    ]
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in questions))
    small = ("--num-frames", 4, "--max-tokens", 16)
    lines = command("generate", "--prompt-file", path, "--json", *small).out.splitlines()
    found = [json.loads(line)["text"] for line in lines]
    assert found == [question.partition(". ")[0] + "." for question in questions]


def test_blocks_of_text_name_their_prompt_and_sample(command, three):
    answers = {1: DEMO_ANSWER, 3: "Otto lives", 5: "Ghent has ten bridges."}
    assert command("generate", "--prompt-file", three).out == "".join(
        f"==> {three}, line {line} <==\n{text}\n\n" for line, text in answers.items()
    )
    twice = command("generate", "--prompt-file", three, "--num-samples", 2).out
    assert twice.count("==>") == 6
    assert f"==> {three}, line 3, sample 2 of 2 <==\nOtto lives\n\n" in twice


def test_the_bar_and_the_results_do_not_mix(capsys):
    terminal = io.StringIO()
    with generate._progress_bar(Console(file=terminal, force_terminal=True, width=80), 4, shown=True) as bar:
        generate._advance(bar, [Completion(request=None, index=0, token_ids=[1, 2, 3])])
        generate._print_under(bar, "the result")
    assert capsys.readouterr().out == "the result\n"
    assert "1/4" in terminal.getvalue()
    assert "3 tokens" in terminal.getvalue()
    assert "result" not in terminal.getvalue()


def test_a_text_file_is_one_prompt_without_its_last_newline(command, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text(OTTO + "\n")
    assert command("generate", "--prompt-file", path).out == "Otto lives in Ghent.\n"
    assert command("generate", "--prompt", OTTO).out == "Otto lives in Ghent.\n"


def test_latencies_are_told_by_phases_and_by_percentiles(command, tmp_path):
    path = tmp_path / "many.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in (LAMP, OTTO)))
    first, last = map(json.loads, command("generate", "--prompt-file", path, "--json").out.splitlines())
    for found in (first, last):
        spent = found["latency_ms"]
        assert spent["queue"] + spent["prefill"] == pytest.approx(found["ttft_ms"], abs=0.01)
        assert list(spent) == ["queue", "prefill", "decode"]
        assert min(spent.values()) > 0
    for name in ("queue", "first_token", "between_tokens", "total"):
        told = last["percentiles_ms"][name]
        assert 0 < told["p50"] <= told["p90"] <= told["p99"]
    assert last["percentiles_ms"]["first_token"]["p99"] == pytest.approx(
        max(first["ttft_ms"], last["ttft_ms"]), rel=0.022
    )
    table = command("generate", "--prompt-file", path).err
    for name in ("queue", "first token", "next token", "whole output"):
        assert re.search(rf"^{name} +[\d.,]+ +[\d.,]+ +[\d.,]+ ms \(p50, p90, p99\)", table, re.M)


def test_chat_goes_through_the_template(command, tmp_path):
    for path in BUNDLED.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}Otto lives in Ghent. {{ messages[0].content }}")
    chat = ("generate", "--model", tmp_path, "--prompt", "Where does Otto live?", "--json")
    asked, plain = json.loads(command(*chat, "--chat").out), json.loads(command(*chat).out)
    assert asked["text"] == "Otto lives in Ghent."
    assert plain["text"] != asked["text"]
    assert asked["usage"] == json.loads(command("generate", "--prompt", OTTO, "--json").out)["usage"]


TEMPLATE = "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}{{ [thinking, name] }}"


@pytest.fixture
def rendered(command, tmp_path, monkeypatch):
    """Return a function that runs `pagedkv generate` and returns the texts that TEMPLATE made."""
    from pagedkv.engine.checkpoint.tokenizer import Tokenizer

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


def test_the_bundled_checkpoint_can_chat(command, tmp_path):
    talk = [{"role": "system", "content": "Otto lives in Ghent. Mira keeps a red lamp in the cellar."}]
    talk += [
        {"role": "user", "content": "Where does Otto live?"},
        {"role": "assistant", "content": "Otto lives in Ghent."},
    ]
    talk += [{"role": "user", "content": "Where is the lamp of Mira?"}]
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": talk}))
    assert (
        json.loads(command("generate", "--prompt-file", tmp_path / "talk.jsonl", "--json").out)["text"] == DEMO_ANSWER
    )
    assert command("generate", "--chat").out == DEMO_ANSWER + "\n"


def test_options_of_the_pool_reach_the_engine(command, monkeypatch):
    made, load = [], Engine.load
    monkeypatch.setattr(Engine, "load", lambda *args, **options: made.append(load(*args, **options)) or made[-1])
    tenants, submit = [], Engine.submit
    monkeypatch.setattr(
        Engine,
        "submit",
        lambda *args, tenant, **options: tenants.append(tenant) or submit(*args, tenant=tenant, **options),
    )
    asked = ("--kv-dtype", "int8", "--max-sequences", 3, "--tenant", "Zoë", "--device", "cpu")
    assert command("generate", *asked).out == DEMO_ANSWER + "\n"
    (engine,) = made
    assert (engine.cache.spec.stored_dtype, engine.scheduler.limits.max_sequences) == ("int8", 3)
    assert tenants == ["Zoë".encode()]
    longer = json.loads(command("generate", "--ignore-eos", "--max-tokens", 30, "--json").out)
    assert (longer["usage"]["completion_tokens"], longer["finish_reason"]) == (30, "length")


def test_a_draft_model_is_looked_up_in_the_cache_of_the_hub(command, tmp_path, monkeypatch):
    plain = command("generate", "--speculate", "draft", "--json").out
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--owner--draft"
    shutil.copytree(BUNDLED / "draft", folder / "snapshots/abc")
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text("abc")
    found = json.loads(command("generate", "--speculate", "owner/draft", "--json").out)
    assert (found["text"], found["acceptance"]) == (DEMO_ANSWER, json.loads(plain)["acceptance"])
    assert found["acceptance"] > 0


def test_json_has_log_probabilities_if_asked_for(command, tmp_path):
    found = json.loads(command("generate", "--prompt", LAMP, "--json", "--logprobs", 2).out)
    assert len(found["logprobs"]) == len(found["token_ids"])
    for token, each in zip(found["token_ids"], found["logprobs"], strict=True):
        assert each["top"][0] == [token, pytest.approx(each["logprob"], abs=1e-5)]
        assert len(each["top"]) == 2
        assert each["logprob"] > each["top"][1][1]
    (tmp_path / "one.jsonl").write_text(json.dumps({"prompt": LAMP, "logprobs": 2}))
    line = json.loads(command("generate", "--prompt-file", tmp_path / "one.jsonl", "--json").out)
    assert line["logprobs"] == found["logprobs"]


def test_a_prompt_is_computed_in_chunks_of_the_size_asked_for(command, monkeypatch):
    whole, steps = command("generate").out, []
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda engine: (steps.append(1), step(engine))[1])
    assert command("generate", "--prefill-chunk", 100).out == whole
    assert len(steps) == 3 + 9  # the prompt has 290 tokens, the answer 10


def test_prompts_that_begin_alike_report_the_tokens_found(command, tmp_path):
    path = tmp_path / "same.jsonl"
    path.write_text(f"{json.dumps({'prompt': DEMO_PROMPT})}\n" * 2)
    lines = command("generate", "--prompt-file", path, "--max-sequences", 1, "--json").out.splitlines()
    assert [json.loads(line)["usage"]["cached_tokens"] for line in lines] == [0, 288]
