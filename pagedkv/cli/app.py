"""The commands of `pagedkv`, their defaults and exit statuses. --help is quick: commands import their modules late.

    0    done
    1    a line of a .jsonl failed, the others are done
    2    bad input: one line on stderr, "pagedkv: error: ...", for any file or option
    130  Ctrl-C

A traceback means a bug in pagedkv. `pagedkv/__main__.py` has the statuses of a process whose stdout fails.
"""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper
from typing import Any, Final, cast

import typer

from pagedkv import __version__, debug
from pagedkv.checkpoint import hub
from pagedkv.cli import options
from pagedkv.cli.bench.commands import benchmarks
from pagedkv.cli.complaints import complain
from pagedkv.cli.inputs import prompts, shaping
from pagedkv.errors import InvalidRequest, PagedKVError

app: Final = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)

app.add_typer(benchmarks, name="bench")

BAD_INPUT: Final = 2

SAMPLING: Final = """max_tokens min_tokens temperature top_k top_p min_p seed ignore_eos num_beams logprobs
repetition_penalty frequency_penalty presence_penalty""".split()
LOADING: Final = (
    "dtype weights device kv_dtype block_size num_frames memory tiers kernels speculate window sinks".split()
)
LIMITS: Final = ("max_sequences", "prefill_chunk")
REST: Final = ("biases", "num_samples", "tenant", "as_json")
"""Options of `generate` by the same names: SamplingParams, Engine.load, Limits, and other fields of Arguments."""

ShellError: Final = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[2])
"""ClickException, the base class of the errors that typer raises for bad options. Newer versions of typer bundle click
without a public name for this class."""


@app.callback(invoke_without_command=True)
def pagedkv(context: typer.Context, version: options.Version = False) -> None:
    """Paged virtual memory for the KV cache of language models."""
    if version:
        print(f"pagedkv {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def generate(
    dash: options.Dash = None,
    prompt: options.PromptText = None,
    prompt_file: options.PromptFile = None,
    model: options.Model = None,
    weights: options.Weights = None,
    device: options.Device = "cpu",
    max_tokens: options.MaxTokens = 128,
    min_tokens: options.MinTokens = 0,
    num_samples: options.NumSamples = 1,
    as_json: options.JsonObject = False,
    chat: options.Chat = False,
    system: options.System = None,
    template_var: options.TemplateVar = None,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    presence_penalty: options.PresencePenalty = 0.0,
    num_beams: options.NumBeams = 1,
    seed: options.Seed = None,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    json_schema: options.JsonSchema = None,
    regex: options.Regex = None,
    choice: options.Choice = None,
    logit_bias: options.LogitBias = None,
    logprobs: options.Logprobs = None,
    block_size: options.BlockSize = 16,
    num_frames: options.NumFrames = None,
    memory: options.Memory = None,
    tier: options.Tiers = None,
    dtype: options.Dtype = None,
    kv_dtype: options.KvDtype = None,
    kernels: options.Kernels = "auto",
    window: options.SeenWindow = None,
    sinks: options.Sinks = 0,
    max_sequences: options.MaxSequences = 256,
    prefill_chunk: options.PrefillChunk = None,
    tenant: options.Tenant = "",
    speculate: options.Speculate = None,
) -> int:
    """Text from a prompt, streamed as it is made. Without a prompt, the bundled checkpoint answers a question."""
    given = _checked(locals())
    variables = prompts.variables(given["template_var"] or ())
    templating = prompts.Templating(given["chat"], given["system"], variables)
    source = prompts.read(given["prompt"], given["prompt_file"], given["dash"], templating)
    folder = None if given["model"] is None else hub.find(given["model"])
    grammar = shaping.grammar(given["json_schema"], given["regex"], given["choice"])
    sampling = {name: given[name] for name in SAMPLING} | {"stop": given["stop"] or ()} | grammar
    limits, rest = ({name: given[name] for name in names} for names in (LIMITS, REST))
    from pagedkv.cli.compiling import announced  # numba

    with announced(quiet=given["as_json"]) as screen:
        from pagedkv.cli import conversation  # torch, while other processes compile
        from pagedkv.cli.generate import Arguments, run

        args = Arguments(source, templating, folder, sampling, loading=given["loading"], limits=limits, **rest)
        return conversation.hold(args, screen) if source.talk else run(args, screen)


def _checked(given: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of all options of `generate`. Raises: InvalidRequest"""
    return given | {"loading": _loading(given), "biases": shaping.biases(given["logit_bias"] or ())}


def _loading(given: dict[str, Any]) -> dict[str, Any]:
    """Return the options of Engine.load.

    Raises: InvalidRequest if two of them set the size of the pool; CheckpointError for a draft model that is not there
    """
    if given["num_frames"] is not None and given["memory"] is not None:
        raise InvalidRequest("--num-frames and --memory both set the size of the pool; give one of them")
    loading = {name: given[name] for name in LOADING if name in given} | {"tiers": tuple(given["tier"] or ())}
    if "/" in (given.get("speculate") or ""):  # a draft model; a drafter's name has none
        loading["speculate"] = hub.find(given["speculate"])
    return loading


@app.command()
def serve(
    model: options.Model = None,
    host: options.ServeHost = "127.0.0.1",
    port: options.ServePort = 8000,
    name: options.ServeName = None,
    api_key: options.ServeKey = None,
    api_keys: options.ServeKeys = None,
    key_share: options.ServeShare = 0.5,
    shared_priorities: options.ServePriorities = False,
    allowed_host: options.ServeHosts = None,
    max_waiting: options.ServeWaiting = 256,
    max_prompt: options.ServePrompt = None,
    max_body: options.ServeBody = "4MiB",
    max_connections: options.ServeConnections = 1024,
    drain: options.ServeDrain = 60,
    step_timeout: options.ServeStep = 300,
    kv_events: options.ServeEvents = None,
    kv_events_replay: options.ServeReplay = None,
    kv_events_topic: options.ServeTopic = "",
    weights: options.Weights = None,
    device: options.Device = "cpu",
    dtype: options.Dtype = None,
    speculate: options.Speculate = None,
    block_size: options.BlockSize = 16,
    num_frames: options.NumFrames = None,
    memory: options.Memory = None,
    tier: options.Tiers = None,
    kv_dtype: options.KvDtype = None,
    kernels: options.Kernels = "auto",
    window: options.SeenWindow = None,
    sinks: options.Sinks = 0,
    max_sequences: options.MaxSequences = 256,
    prefill_chunk: options.PrefillChunk = None,
) -> int:
    """Serve a model over HTTP as OpenAI's API does: completions, chat, models; and /metrics, /health."""
    loading = _loading(locals())
    from pagedkv.cli.serve import Arguments, run

    limits = {"max_sequences": max_sequences, "prefill_chunk": prefill_chunk, "max_waiting": max_waiting}
    listening: dict[str, Any] = {"drain_s": drain, "step_s": step_timeout}
    listening |= {"hosts": tuple(map(str.lower, allowed_host or ())), "max_connections": max_connections}
    listening |= {"events": kv_events, "events_replay": kv_events_replay, "events_topic": kv_events_topic}
    listening |= {"max_prompt": max_prompt, "key_share": key_share, "shared_priorities": shared_priorities}
    return run(Arguments(model, host, port, name, api_key, api_keys, max_body, listening, limits, loading))


@app.command()
def fit(
    model: options.FitModel = None,
    layers: options.FitLayers = None,
    kv_heads: options.FitKvHeads = None,
    head_dim: options.FitHeadDim = None,
    head_dim_v: options.FitHeadDimV = None,
    value_in_key: options.FitValueInKey = False,
    window: options.FitWindow = None,
    dtype: options.FitDtype = None,
    kv_dtype: options.KvDtype = None,
    block_size: options.BlockSize = 16,
    weights: options.FitWeights = None,
    context: options.FitContext = None,
    memory: options.FitMemory = None,
    bandwidth: options.FitBandwidth = None,
    gpus: options.FitGpus = 1,
    prefill_chunk: options.FitChunk = None,
    as_json: options.FitJson = False,
) -> None:
    """Bytes of KV, contexts and sequences that fit into memory beside the weights, and the speed that memory allows."""
    from pagedkv.cli.fit import Arguments, run

    numbers = {"num_layers": layers, "num_kv_heads": kv_heads, "head_dim": head_dim, "head_dim_v": head_dim_v}
    given: dict[str, Any] = {name: value for name, value in (numbers | {"window": window}).items() if value is not None}
    given |= {"value_in_key": True} if value_in_key else {}
    stored = {"dtype": dtype, "kv_dtype": kv_dtype, "block_size": block_size}
    run(Arguments(model, given, stored, weights, context, memory, bandwidth, gpus, prefill_chunk, as_json))


@app.command()
def doctor() -> None:
    """Show which kernels can run here and why the others cannot, and what this machine has."""
    from pagedkv.cli.doctor import run  # torch

    run()


@app.command()
def warm() -> None:
    """Compile everything that is compiled at first use (about a minute, once), for an image or before a server."""
    from pagedkv.cli.warm import run  # torch

    run()


@app.command("replay")
def replay_trace(
    trace: options.ReplayTrace,
    num_frames: options.ReplayFrames = None,
    memory: options.ReplayMemory = None,
    bytes_per_token: options.ReplayBytesPerToken = 131072,
    policy: options.ReplayPolicy = None,
    tier: options.ReplayTier = None,
    as_json: options.JsonList = False,
    plot: options.ReplayPlot = None,
) -> None:
    """Prefix hit rates of eviction policies over a trace of requests; without a size, of an unbounded pool."""
    if num_frames and memory:
        raise InvalidRequest("--num-frames and --memory both set the sizes of the pools; give one of them")
    from pagedkv.cli.replay import frames_in, run  # numba

    sizes = num_frames or [frames_in(text, bytes_per_token) for text in memory or ()]
    run(trace, sizes, policy or ["lru"], tier=tier, as_json=as_json, plot=plot)


def main(argv: list[str] | None = None) -> None:
    """Run `pagedkv` with `argv` (None: this process's arguments) and exit with a status listed in the file head."""
    sys.exit(invoke(argv))


def invoke(argv: list[str] | None = None) -> int:
    """Run `pagedkv` with `argv` (None: this process's arguments) and return a status listed in the file head."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a locale without some character must not stop the run
    try:
        _check_environment()
        return app(argv, prog_name="pagedkv", standalone_mode=False) or 0
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except (ShellError, PagedKVError) as error:
        complain(error.format_message() if isinstance(error, ShellError) else str(error))
        return BAD_INPUT


def _check_environment() -> None:
    """Raise InvalidRequest if PAGEDKV_DEBUG has no valid value, or numba could not start with NUMBA_NUM_THREADS."""
    debug.level()
    try:
        threads = int(os.environ.get("NUMBA_NUM_THREADS", 1))
    except ValueError:  # then numba takes its default
        return
    if threads < 1:
        raise InvalidRequest(f"NUMBA_NUM_THREADS is {threads}; set it to a number of threads from 1 on, or unset it")
