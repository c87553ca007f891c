"""`--trace`: a file that viewers of traces can read, with slices that lie within one another."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from pagedkv.cli.trace import trace_events, traced
from pagedkv.model.loop.events import Event

OTTO = "Otto lives in Ghent. Where does Otto live?"


@pytest.fixture
def entries(command, tmp_path):
    """Return a function that runs `pagedkv generate --trace` and returns the entries of the file."""

    def run(*argv):
        path = tmp_path / "trace.json"
        assert command("generate", "--trace", path, *argv).status == 0
        return json.loads(path.read_text())["traceEvents"]

    return run


def slices(entries, thread=1, process=2):
    """The slices of a track, as (name, begin, end) in nanoseconds."""
    return [
        (entry["name"], round(entry["ts"] * 1000), round((entry["ts"] + entry["dur"]) * 1000))
        for entry in entries
        if (entry["ph"], entry["pid"], entry["tid"]) == ("X", process, thread)
    ]


def assert_nested(found):
    """Two slices of a track lie apart, or one lies within the other."""
    stack = []
    for _, begin, end in sorted(found, key=lambda each: (each[1], -each[2])):
        while stack and stack[-1] <= begin:
            stack.pop()
        assert not stack or end <= stack[-1]
        stack.append(end)


def test_each_request_is_a_track_of_nested_slices(entries, tmp_path):
    path = tmp_path / "many.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": OTTO, "ignore_eos": True, "max_tokens": n}) for n in (40, 50, 60)))
    found = entries("--prompt-file", path, "--num-frames", 8, "--num-samples", 2)
    assert {entry["ph"] for entry in found} == {"M", "X", "i"}
    assert min(entry["ts"] for entry in found if "ts" in entry) == 0
    names = {(entry["pid"], entry["tid"]): entry["args"]["name"] for entry in found if entry["name"] == "thread_name"}
    expected = [f"request {n}{sample}" for n in range(3) for sample in ("", ", sample 1")]
    assert [names[2, thread] for thread in range(1, 7)] == expected
    for thread in range(1, 7):
        assert_nested(slices(found, thread))
    assert_nested(slices(found, 1, process=1))
    first = [name for name, *_ in slices(found)]
    assert first[:3] == ["queued", "prefill", "decode"]
    assert first.count("token") == 39
    ids = [entry["args"]["token_ids"] for entry in found if entry["name"] in ("chunk", "token") and entry["tid"] == 1]
    assert sum(map(len, ids)) == 40
    assert any(entry["name"] == "preempted" for entry in found)
    assert [entry["name"] for entry in found if entry["ph"] == "i"] == ["finished: length"] * 6


FIELDS = {
    "M": {"ph", "pid", "tid", "name", "args"},
    "X": {"ph", "pid", "tid", "name", "ts", "dur", "args"},
    "i": {"ph", "pid", "tid", "name", "ts", "s", "args"},
}


def test_each_entry_is_as_the_trace_event_format_has_it(entries):
    """Numbers of processes and threads, microseconds from 0 on, a scope for instants, and names for all tracks."""
    found = entries("--prompt", OTTO, "--logprobs", 0, "--json", "--speculate", "prompt-lookup", "--num-samples", 2)
    assert {entry["ph"] for entry in found} == set(FIELDS)  # whole slices: no begin without an end, no open flow
    assert {entry["name"] for entry in found if entry["ph"] == "M"} == {"process_name", "thread_name"}
    tracks = [(entry["pid"], entry["tid"]) for entry in found if entry["name"] == "thread_name"]
    assert len(set(tracks)) == len(tracks)
    assert {(entry["pid"], entry["tid"]) for entry in found if entry["ph"] == "X"} == set(tracks)
    named = {(entry["pid"], entry["tid"]) for entry in found if entry["name"] == "thread_name"}
    processes = {entry["pid"] for entry in found if entry["name"] == "process_name"}
    for entry in found:
        assert set(entry) == FIELDS[entry["ph"]]
        assert type(entry["pid"]) is type(entry["tid"]) is int
        assert isinstance(entry["name"], str)
        assert isinstance(entry["args"], dict)
        if entry["ph"] != "M":
            assert entry["ts"] >= 0
            assert entry.get("dur", 0) >= 0
            assert entry.get("s", "t") == "t"
            assert (entry["pid"], entry["tid"]) in named
            assert entry["pid"] in processes


def test_tokens_have_the_log_probs_that_were_asked_for(entries):
    for options, has in ((("--logprobs", 0, "--json"), True), ((), False)):
        found = entries("--prompt", OTTO, *options)
        made = [entry["args"] for entry in found if entry["args"].get("token_ids")]
        assert made
        for arguments in made:
            assert ("logprobs" in arguments) is has
            if has:
                assert len(arguments["logprobs"]) == len(arguments["token_ids"])
                assert all(logprob <= 0 for logprob in arguments["logprobs"])


def test_a_beam_search_is_a_phase_with_one_slice_a_step(entries):
    found = entries("--prompt", OTTO, "--num-beams", 3, "--num-samples", 2)
    names = [name for name, *_ in slices(found)]
    assert names[:3] == ["queued", "prefill", "beam search"]
    assert len(set(slices(found))) == len(names)
    assert_nested(slices(found))
    assert [entry["args"]["tokens"] for entry in found if entry["name"] == "chunk"][:2] == [11, 3]


def test_times_are_exact_to_a_nanosecond():
    found = trace_events([Event("queued", 5.0, 5.0, 0, 0, 3), Event("admitted", 5.0 + 1e-9, 5.0 + 1e-9, 0, 0, 2)])
    assert slices(found) == [("queued", 0, 1), ("prefill", 1, 1)]
    assert trace_events([]) == []


def test_a_life_without_an_end_is_drawn_to_the_last_event():
    events = [
        Event("queued", 0.0, 0.0, 0, 0, 3),
        Event("admitted", 1.0, 1.0, 0, 0, 0),
        Event("chunk", 1.0, 2.0, 0, 0, 3),
        Event("token", 2.0, 2.0, 0, 0, 7),
        Event("preempted", 3.0, 3.0, 0, 0, 1),
        Event("step", 4.0, 5.0, value=1),
    ]
    seconds = [(name, begin // 10**9, end // 10**9) for name, begin, end in slices(trace_events(events))]
    assert seconds == [("queued", 0, 1), ("prefill", 1, 2), ("preempted", 3, 5), ("decode", 2, 5), ("chunk", 1, 2)]


def test_a_life_that_ends_while_it_is_preempted_is_drawn_to_its_end():
    life = [Event("queued", 0.0, 0.0, 0), Event("admitted", 1.0, 1.0, 0), Event("chunk", 1.0, 2.0, 0)]
    life += [Event("preempted", 3.0, 3.0, 0), Event("finished", 5.0, 5.0, 0, 0, 0, "cancelled")]
    found = trace_events([*life, Event("step", 8.0, 9.0)])
    assert_nested(slices(found))
    assert [(name, end / 1e9) for name, _, end in slices(found)] == [
        ("queued", 1.0), ("preempted", 5.0), ("prefill", 5.0), ("chunk", 2.0),
    ]  # fmt: skip


@pytest.mark.parametrize("path", ["no/such/folder/t.json", ".", "/dev/full"])
def test_a_file_that_cannot_be_written_is_one_line(command, path):
    status, _, err = command("generate", "--prompt", OTTO, "--json", "--trace", path)
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith(f"pagedkv: error: cannot write the trace to {path}: ")


def test_a_trace_is_for_its_user_alone_and_one_that_is_there_keeps_its_mode(tmp_path):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.touch(0o644)
    for path in (old, new):
        with traced(SimpleNamespace(events=None), path):
            pass
        assert json.loads(path.read_text())["traceEvents"] == []
    assert [path.stat().st_mode & 0o777 for path in (old, new)] == [0o644, 0o600]


def test_a_fault_of_the_engine_is_not_told_as_one_of_the_file(tmp_path):
    engine, path = SimpleNamespace(events=None), tmp_path / "t.json"
    with pytest.raises(OSError, match="of the disk under the weights"), traced(engine, path):
        raise OSError(5, "of the disk under the weights")
    assert json.loads(path.read_text())["traceEvents"] == []
    assert engine.events is None


def test_a_bad_path_is_refused_before_any_step(command, monkeypatch):
    from pagedkv.model.engine import Engine

    monkeypatch.setattr(Engine, "step", lambda engine: pytest.fail("the engine stepped"))
    assert command("generate", "--prompt", OTTO, "--trace", "no/such/t.json").out == ""
