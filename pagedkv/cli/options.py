"""The options of all commands but `bench`: a dataclass for each subject, a field for each option. No torch.

    Stored ◀── Loading      how keys and values are stored; what is loaded, and the pool      generate, serve (and fit)
    Measuring               the model and the text on which KV kinds are measured             kv-quality
    Prompting, Sampling                                                                       generate
    Serving                                                                                   serve
    Geometry, Fitting                                                                         fit
    Replaying                                                                                 replay

`command` makes of the dataclasses that a function takes the signature that typer reads. Values are checked here, and
in `SamplingParams`, before a command imports torch. Errors name options: `naming_options` turns the names of Python in
what the engine raises into those of the command line.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from pagedkv import debug
from pagedkv.cli import shaping
from pagedkv.cli.fetching import folder_of
from pagedkv.engine.checkpoint import BUNDLED, regular_files
from pagedkv.engine.checkpoint.config import ModelConfig
from pagedkv.engine.sampling.params import SamplingParams
from pagedkv.errors import InvalidRequest
from pagedkv.kv_gate import Gate
from pagedkv.spec import parse_bytes

MOST: Final = 2**31 - 1
"""The largest number of a geometry, as in a config.json."""


def option(metavar: str, words: str, *names: str, panel: str | None = None, **limits: float) -> Any:
    """Return an option. words: its help. names: those at a shell, if not that of the field. limits: min, max"""
    low, high = limits.get("min", -math.inf), limits.get("max", MOST)

    def check(param: typer.CallbackParam, value: Any) -> Any:  # --help would show limits that the framework knows
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, int | float) and not low <= each <= high:
                bound = f"at most {high:,}" if each > high else f"at least {low:,}"
                wanted = bound if each > high or each < low else "a number"  # nan is no number
                raise InvalidRequest(f"{max(param.opts, key=len)} is {each}; give {wanted}")
        return value

    return typer.Option(*names, metavar=metavar, help=words, rich_help_panel=panel, callback=check)


_kv = partial(option, panel="The KV cache")
_chat = partial(option, panel="The checkpoint's chat template")
_sampling = partial(option, panel="Sampling")
_client = partial(option, panel="Clients")
_number = partial(option, panel="Numbers, without a model")

Number = int | None
Numbers = list[int] | None
Text = str | None
Texts = list[str] | None
Floats = Literal["float32", "bfloat16", "float16"]
Stores = Literal["float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2", "int8", "k8v4", "k5v4"]

_MODEL: Final = (
    "A Hugging Face folder, or owner/name on the hub; else the bundled one, which knows only its page of records."
)


@dataclass(frozen=True)
class Stored:
    """The form of stored keys and values."""

    dtype: Annotated[Floats | None, _kv("NAME", "float32, bfloat16, float16.")] = None
    kv_dtype: Annotated[Text, _kv("NAME", "Of the stored KV: fp8_e4m3, fp8_e5m2, int8, k8v4, k5v4.")] = None
    block_size: Annotated[int, _kv("N", "Tokens in a frame.", min=1)] = 16
    prefill_chunk: Annotated[Number, _kv("N", "Tokens of one prompt in a step, so that others go on.", min=1)] = None


@dataclass(frozen=True)
class _Named:
    """A model on a disk or on the hub."""

    model: Annotated[Text, option("DIR", _MODEL)] = None
    fetch: Annotated[bool, option("", "Fetch owner/name from the hub without a question.", "--fetch")] = False

    def folder(self) -> Path | None:
        """Return the folder of the model; None for the bundled one. Raises: CheckpointError"""
        return None if self.model is None else folder_of(self.model, is_agreed=self.fetch)

    @staticmethod
    def text_of(path: Path | None) -> str | None:
        """Return the text of a file. Raises: InvalidRequest"""
        try:
            return None if path is None else regular_files.read(path, shaping.MOST_BYTES).decode("utf-8-sig")
        except (OSError, UnicodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise InvalidRequest(f"cannot read {path}: {why}; give a file with a text") from None


@dataclass(frozen=True, kw_only=True)
class Comparing(_Named):
    """Two prompts, and the tokenizer that reads them."""

    first: Annotated[Path, typer.Argument(metavar="FIRST", help="A prompt that was sent: text, or a request's JSON.")]
    second: Annotated[Path, typer.Argument(metavar="SECOND", help="The prompt that was not found.")]
    block_size: Annotated[int, option("N", "Tokens in a page of the server.", min=1)] = 16


@dataclass(frozen=True)
class _Loaded(_Named):
    """A model that is loaded."""

    weights: Annotated[Literal["int8", "int4"] | None, option("NAME", "int8 or int4, quantised while loading.")] = None
    device: Annotated[str, option("NAME", "cpu, cuda or cuda:N.")] = "cpu"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", self.device):
            raise InvalidRequest(f"--device is {self.device!r}; give cpu, cuda or cuda:N")


@dataclass(frozen=True)
class Measuring(_Loaded):
    """The model whose KV kinds are measured, and the text."""

    dtype: Annotated[Floats | None, option("NAME", "float32, bfloat16, float16.")] = None
    text: Annotated[Path | None, option("FILE", "A text like those that the model reads; else one in English.")] = None
    plot: Annotated[Path | None, option("FILE", "Draw size against KL as FILE.svg.")] = None


@dataclass(frozen=True)
class Loading(_Loaded, Stored):
    """The model that is loaded, and its pool."""

    kv_dtype: Annotated[Text, _kv("NAME", "fp8_e4m3, fp8_e5m2, int8, k8v4, k5v4; auto or auto:KL measures.")] = None
    kv_text: Annotated[Path | None, _kv("FILE", "With --kv-dtype auto: measure on this text.")] = None
    speculate: Annotated[Text, option("HOW", "Guess tokens: prompt-lookup, draft, or a smaller model.")] = None
    num_frames: Annotated[Number, _kv("N", "Frames in the pool.", min=1, max=2**50)] = None
    memory: Annotated[Text, _kv("SIZE", "Size of the pool instead, such as 2GiB.")] = None
    state_memory: Annotated[Text, _kv("SIZE", "Recurrent states, beside the pool: 2GiB, 5%, a number.")] = None
    tier: Annotated[Texts, _kv("TIER", "host:SIZE, disk:SIZE:FOLDER, or a shared store; again, fastest first.")] = None
    state_tier: Annotated[Texts, _kv("TIER", "The same for recurrent states.")] = None
    context: Annotated[Number, _kv("N", "Tokens of prompt and output, at most.", min=1)] = None
    kernels: Annotated[str, _kv("NAME", "One that `pagedkv doctor` lists.")] = "auto"
    window: Annotated[Number, _kv("N", "Each token sees the last N: constant memory.", min=1)] = None
    sinks: Annotated[int, _kv("N", "With --window: and the first N, such as 4.", min=0)] = 0
    max_sequences: Annotated[int, _kv("N", "Running at once.", min=1)] = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_frames is not None and self.memory is not None:
            raise InvalidRequest("--num-frames and --memory both set the size of the pool; give one of them")
        if self.memory is not None:
            amount("--memory", self.memory)
        if (self.tier or self.state_tier) and (key := debug.tier_key()) and not 16 <= len(key) <= 64:
            raise InvalidRequest(f"PAGEDKV_TIER_KEY has {len(key)} bytes; set it to 16 to 64 secret bytes, or unset it")
        if self.sinks and self.window is None:
            raise InvalidRequest(f"--sinks is {self.sinks} without --window; give --window, too, such as 1024")

    def check(self) -> None:
        """Read the configs of the model and of a draft, after fetching them. Raises: PagedKVError, before torch."""
        config = ModelConfig.load(self.folder() or BUNDLED)
        for name, value in (("--state-memory", self.state_memory), ("--state-tier", self.state_tier)):
            if value is not None and config.linear is None:
                raise InvalidRequest(f"{name} is given, and this model has no recurrent states; leave it out")
        with naming_options():
            config = config.within(self.context)
            kv_dtype = None if Gate.of(self.kv_dtype, self.kv_text) else self.kv_dtype
            specs = config.specs(dtype=self.dtype, kv_dtype=kv_dtype, block_size=self.block_size)
            if self.memory is not None:
                max(specs, key=lambda spec: spec.frame_bytes).frames_in(self.memory)
        if isinstance(draft := self.of_engine()["speculate"], Path):
            ModelConfig.load(draft)

    def of_engine(self) -> dict[str, Any]:
        """Return the options of Engine.load, without limits. Raises: CheckpointError for a draft without a snapshot"""
        names = (
            "dtype kv_dtype block_size weights device speculate num_frames memory kernels context window sinks".split()
        )
        found = {name: getattr(self, name) for name in names}
        states = self.state_memory
        found["state_memory"] = int(states) if states is not None and states.isdecimal() else states
        found |= {"tiers": tuple(self.tier or ()), "kv_text": self.text_of(self.kv_text)}
        found |= {"state_tiers": tuple(self.state_tier)} if self.state_tier else {}
        if "/" in (self.speculate or ""):  # a draft model; the name of a drafter has none
            found["speculate"] = folder_of(self.speculate or "", is_agreed=self.fetch)
        return found


@dataclass(frozen=True)
class Prompting:
    """The place of the prompt, its way through the chat template, and the output."""

    dash: Annotated[Text, typer.Argument(metavar="-", hidden=True)] = None
    prompt: Annotated[Text, option("TEXT", "The prompt. A lone - reads it from stdin, as does a pipe.")] = None
    prompt_file: Annotated[Path | None, option("FILE", 'A text; a .jsonl has {"prompt": "..."} on each line.')] = None
    chat: Annotated[bool, _chat("", "The prompt is a user's message; without one, talk.", "--chat")] = False
    system: Annotated[Text, _chat("TEXT", "A system message before the others.")] = None
    template_var: Annotated[Texts, _chat("NAME=VALUE", "For the template: JSON or a text; may be given again.")] = None
    num_samples: Annotated[int, option("N", "Outputs for each prompt; they share its frames.", min=1)] = 1
    as_json: Annotated[bool, option("", "Print one JSON object, or one for each line of a .jsonl.", "--json")] = False


@dataclass(frozen=True)
class Sampling:
    """The draw of tokens, and the end of a text."""

    max_tokens: Annotated[int, _sampling("N", "Tokens of output, at most.")] = 128
    min_tokens: Annotated[int, _sampling("N", "Tokens of output before it may end.")] = 0
    temperature: Annotated[float, _sampling("T", "0 is greedy.")] = 0.0
    top_k: Annotated[int, _sampling("N", "Only the N likeliest tokens; 0 is off.")] = 0
    top_p: Annotated[float, _sampling("P", "The likeliest tokens that add up to probability P; 1 is off.")] = 1.0
    min_p: Annotated[float, _sampling("P", "Only tokens at least P times as likely as the likeliest; 0 is off.")] = 0.0
    repetition_penalty: Annotated[float, _sampling("R", "1 is off.")] = 1.0
    frequency_penalty: Annotated[float, _sampling("F", "For each time a token is in the output; 0 is off.")] = 0.0
    presence_penalty: Annotated[float, _sampling("P", "For a token that is in the output, once; 0 is off.")] = 0.0
    num_beams: Annotated[int, _sampling("N", "Beam search: 1 is off.")] = 1
    seed: Annotated[Number, _sampling("N", "The same seed, the same text.", max=2**128)] = None
    stop: Annotated[Texts, _sampling("TEXT", "Where to end; may be given several times.")] = None
    ignore_eos: Annotated[bool, _sampling("", "Go on behind the model's end token.", "--ignore-eos")] = False
    json_schema: Annotated[Text, _sampling("FILE", "The text follows it; a file, or the JSON itself.")] = None
    regex: Annotated[Text, _sampling("TEXT", "The text matches it.")] = None
    choice: Annotated[Texts, _sampling("TEXT", "The text is one of these; give it several times.")] = None
    logprobs: Annotated[Number, _sampling("N", "With --json: log-probabilities of each token and N others.")] = None

    def params(self) -> SamplingParams:
        """Return the parameters. Raises: InvalidRequest"""
        for name in ("stop", "choice"):
            if "" in (getattr(self, name) or ()):
                raise InvalidRequest(f"--{name} is ''; give a text of at least one character")
        for name in ("stop", *shaping.OPTIONS, "logprobs") if self.num_beams > 1 else ():
            if getattr(self, name) is not None:
                raise InvalidRequest(f"{_option(name)} cannot go with --num-beams; leave one of them out")
        given = {name: value for name, value in vars(self).items() if name not in ("stop", *shaping.OPTIONS)}
        given |= shaping.grammar(self.json_schema, self.regex, self.choice)
        with naming_options():
            return SamplingParams(**given, stop=self.stop or ())


@dataclass(frozen=True)
class Serving:
    """The clients of a server, and its limits."""

    host: Annotated[str, _client("NAME", "0.0.0.0 for all addresses of this machine.")] = "127.0.0.1"
    port: Annotated[int, _client("N", "0 for any that is free.", min=0, max=65535)] = 8000
    name: Annotated[Text, _client("NAME", "Name of the model, for clients.")] = None
    api_key: Annotated[Text, _client("KEY", "Key that clients send; `ps` does not show PAGEDKV_API_KEY.")] = None
    api_keys: Annotated[Path | None, _client("FILE", "`key tenant` in each line, instead of a key.")] = None
    key_share: Annotated[float, _client("F", "Share of all requests for one of many tenants.", min=0.001, max=1)] = 0.5
    shared_priorities: Annotated[bool, _client("", "Priorities count across tenants.", "--shared-priorities")] = False
    allowed_host: Annotated[Texts, _client("NAME", "A name that clients ask for; may be given again.")] = None
    max_waiting: Annotated[int, _client("N", "Requests that wait; more are refused.", min=1)] = 256
    max_prompt: Annotated[Number, _client("N", "Tokens of a prompt, at most; else all that fit.", min=1)] = None
    max_body: Annotated[str, _client("SIZE", "Size of a request, at most.")] = "4MiB"
    max_connections: Annotated[int, _client("N", "Connections at once; more are refused.", min=1, max=2**20)] = 1024
    drain: Annotated[int, _client("N", "Seconds for running requests after SIGTERM.", min=0)] = 60
    hints: Annotated[float, _client("F", "Share of the pool for pages that clients retain.", min=0, max=1)] = 0.1
    max_retain: Annotated[float, _client("N", "Seconds for which clients may retain pages.", min=0)] = 3600
    step_timeout: Annotated[float, _client("N", "Seconds of one step until /health fails.", min=0.1)] = 300
    kv_events: Annotated[Text, _client("ADDRESS", "Publish KV events, such as tcp://*:5557.")] = None
    kv_events_replay: Annotated[Text, _client("ADDRESS", "Address that sends missed messages again.")] = None
    kv_events_topic: Annotated[str, _client("TEXT", "Topic of the KV events; llm-d reads kv@POD@MODEL.")] = ""

    def __post_init__(self) -> None:
        amount("--max-body", self.max_body)
        if self.api_key == "":
            raise InvalidRequest("--api-key is empty; give a key, or leave the option out to serve without one")
        for name in self.allowed_host or ():
            if "*" in name.removeprefix("*.") or not name:
                raise InvalidRequest(f"--allowed-host is {name!r}; give a name, or *.example.com for all of a domain")
        if self.kv_events is None and (self.kv_events_replay is not None or self.kv_events_topic):
            raise InvalidRequest("--kv-events-replay and --kv-events-topic need --kv-events; give it an address, too")


@dataclass(frozen=True)
class Geometry:
    """The numbers of a model without a config."""

    layers: Annotated[Number, _number("N", "Layers.", min=1)] = None
    kv_heads: Annotated[Number, _number("N", "KV heads.", min=1)] = None
    head_dim: Annotated[Number, _number("N", "Elements of a key.", min=1)] = None
    value_in_key: Annotated[bool, _number("", "Store keys alone, as the latents of MLA.", "--value-in-key")] = False
    window: Annotated[Number, _number("N", "Each token of every layer sees the last N.", min=1)] = None

    def of_spec(self) -> dict[str, Any]:
        """Return the fields of KVSpec that were given."""
        of_option = {"layers": "num_layers", "kv_heads": "num_kv_heads"}
        return {of_option.get(name, name): value for name, value in vars(self).items() if value not in (None, False)}


@dataclass(frozen=True)
class Fitting:
    """The model that should fit, and the memory."""

    model: Annotated[Text, option("DIR", "A Hugging Face folder, its config.json, or owner/name on the hub.")] = None
    weights: Annotated[Text, option("NAME", "int8 or int4; or the bytes of all weights, such as 140GB.")] = None
    context: Annotated[Number, option("N", "Tokens of each sequence.", min=1)] = None
    memory: Annotated[Text, option("SIZE", "For weights and KV, such as 72GB; else what is free here.")] = None
    bandwidth: Annotated[Text, option("SIZE", "Of that memory, such as 3.35TB/s; else it is measured here.")] = None
    as_json: Annotated[bool, option("", "Print one JSON object, no more.", "--json")] = False


@dataclass(frozen=True)
class Replaying:
    """A trace, and the pools and policies that it is replayed with."""

    trace: Annotated[Path, typer.Argument(metavar="TRACE", help='Lines {"hash_ids": [0, 1]}: an id is 512 tokens.')]
    num_frames: Annotated[Numbers, option("N", "Frames of 512 tokens; again for more.", min=1, max=2**50)] = None
    memory: Annotated[Texts, option("SIZE", "Instead: pools of that size, such as 40GiB.")] = None
    bytes_per_token: Annotated[int, option("N", "For --memory; default: Llama 3.1 8B in bfloat16.", min=1)] = 131072
    policy: Annotated[Texts, option("NAME", "lru, 2q, lfu, cost, belady, all.")] = None
    tier: Annotated[Text, option("N", "Frames of a tier below each pool, or 8x for eight times the pool.")] = None
    as_json: Annotated[bool, option("", "Print a list of objects, no more.", "--json")] = False


# --- commands ---


class _Help:
    """A command or group. Its --help shows no value for a flag; an error about a value has the form of the others."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for each in params:
            each.metavar = "" if getattr(each, "is_flag", False) else each.metavar
            each.process_value = partial(_processed, each)
        return params


class _Command(_Help, TyperCommand):
    pass


class _Group(_Help, TyperGroup):
    pass


def group(**settings: Any) -> typer.Typer:
    """Return a group of commands."""
    return typer.Typer(cls=_Group, add_completion=False, **settings)


def _processed(parameter: Any, context: Any, given: Any) -> Any:
    """Return the value of an option. Raises: InvalidRequest, which names the option, the value and what to give"""
    try:
        return type(parameter).process_value(parameter, context, given)
    except typer.BadParameter as error:
        text = given if isinstance(given, str) else ", ".join(map(str, given or ()))
        for pattern, words in _WANTED.items():
            if found := re.search(pattern, error.message):
                wanted = words.format(*found.groups()).replace("'", "")
                raise InvalidRequest(f"{max(parameter.opts, key=len)} is {text!r}; give {wanted}") from None
        raise  # an argument is missing


_WANTED: Final = {
    r"is not one of ([^.]+)": "one of {}",
    r"valid integer": "an integer",
    r"valid (?:number|float)": "a number",
}
"""The remedy for each error of the framework; older typer has the errors of click."""


def command(app: typer.Typer, example: str, name: str | None = None) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that adds a function of dataclasses of options to `app`, as a command with their fields."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        kinds: dict[str, Any] = {name: hint for name, hint in get_type_hints(function).items() if name != "return"}

        def run(**given: Any) -> Any:
            names = {name: [field.name for field in fields(kind)] for name, kind in kinds.items()}
            return function(**{name: kinds[name](**{each: given[each] for each in names[name]}) for name in kinds})

        hints: dict[str, Any] = {}
        parameters = []
        for kind in kinds.values():
            hints |= get_type_hints(kind, include_extras=True)
            for field in fields(kind):
                default = inspect.Parameter.empty if field.default is MISSING else field.default
                new = inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default)
                parameters.append(new.replace(annotation=hints[field.name]))
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__name__, run.__doc__, run.__annotations__ = function.__name__, function.__doc__, hints
        app.command(name or example.split()[1], cls=_Command, epilog=f"Example: {example}")(run)
        return function

    return add


# --- errors ---


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def amount(name: str, text: str) -> int:
    """Return the bytes of an option. Raises: InvalidRequest, which names it"""
    try:
        return parse_bytes(text)
    except InvalidRequest as error:
        raise InvalidRequest(f"{name}: {error}") from None


@contextmanager
def naming_options() -> Iterator[None]:
    """Raise an InvalidRequest of the block again, with the options of `generate` in place of names of Python."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(_in_options(str(error))) from None


def _in_options(text: str) -> str:
    """Return an error in which names of Python are those of options: `max_tokens is -5` names --max-tokens.

    A name of one word is an option where an error begins with it, or behind another option.
    """
    text = _LONG.sub(lambda found: _option(found[1]), text).replace("must be None or", "must be")
    return _SHORT.sub(r"\1--\2", text)


_NAMES: Final = [field.name for kind in (Loading, Sampling, Prompting, Geometry) for field in fields(kind)]
_LONG: Final = re.compile(rf"\b(?:\w+\.)?({'|'.join(name for name in _NAMES if '_' in name)})\b")
_SHORT: Final = re.compile(
    rf"(^|--[\w-]+ or )(?:\w+\.)?({'|'.join(name for name in _NAMES if '_' not in name)})(?= is |,)"
)
