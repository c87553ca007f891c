"""The options and arguments of all commands, as annotated types: metavar and help text. Defaults stand in `app.py`.

A bare name serves `generate`; the others begin with their command's subject: Serve, Fit, Replay. No
imports beyond typer, because --help must be quick.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

_MEMORY: Final = "The KV cache"
_CHAT: Final = "The checkpoint's chat template"
_SAMPLING: Final = "Sampling"
_GEOMETRY: Final = "Numbers, without a model"
_CLIENTS: Final = "Clients"

Version = Annotated[bool, typer.Option("--version", help="Print the version and exit.")]

# generate: the prompt and the output

Dash = Annotated[str | None, typer.Argument(metavar="[-]", help="Read the prompt from stdin, as is done for a pipe.")]
PromptText = Annotated[str | None, typer.Option(metavar="TEXT", help="The prompt.")]
PromptFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help='A text, or with the ending .jsonl many prompts: {"prompt": "..."} on each line.'
    ),
]
Model = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="A Hugging Face folder, or owner/name in its cache; without, the bundled one."),
]
Weights = Annotated[
    str | None, typer.Option(metavar="NAME", help="int8 or int4: quantise the linear layers while loading.")
]
MaxTokens = Annotated[int, typer.Option(metavar="N", help="Of output, at most.")]
MinTokens = Annotated[int, typer.Option(metavar="N", help="Of output, before it may end.")]
NumSamples = Annotated[int, typer.Option(metavar="N", help="Outputs for each prompt; they share its frames.")]
Device = Annotated[str, typer.Option(metavar="NAME", help="cpu, cuda or cuda:N.")]
JsonObject = Annotated[
    bool, typer.Option("--json", help="Print one JSON object (a line for each prompt of a .jsonl), no more.")
]

# generate: the chat template

Chat = Annotated[
    bool,
    typer.Option("--chat", help="The prompt is a user's message; without one, talk.", rich_help_panel=_CHAT),
]
System = Annotated[
    str | None, typer.Option(metavar="TEXT", help="A system message before the others.", rich_help_panel=_CHAT)
]
TemplateVar = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE", help="For the template: JSON or a text; may be given again.", rich_help_panel=_CHAT
    ),
]

# generate: sampling

Temperature = Annotated[float, typer.Option(metavar="T", help="0 is greedy.", rich_help_panel=_SAMPLING)]
TopK = Annotated[int, typer.Option(metavar="N", help="From the N likeliest; 0 is off.", rich_help_panel=_SAMPLING)]
TopP = Annotated[
    float, typer.Option(metavar="P", help="From the likeliest that hold P; 1 is off.", rich_help_panel=_SAMPLING)
]
MinP = Annotated[
    float, typer.Option(metavar="P", help="None below P times the likeliest; 0 is off.", rich_help_panel=_SAMPLING)
]
RepetitionPenalty = Annotated[float, typer.Option(metavar="R", help="1 is off.", rich_help_panel=_SAMPLING)]
Seed = Annotated[int | None, typer.Option(metavar="N", help="The same seed, the same text.", rich_help_panel=_SAMPLING)]
Stop = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="Where to end; may be given several times.", rich_help_panel=_SAMPLING),
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on behind the model's end token.", rich_help_panel=_SAMPLING)
]
JsonSchema = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="The text follows it; a file, or the JSON itself.", rich_help_panel=_SAMPLING),
]
Regex = Annotated[str | None, typer.Option(metavar="TEXT", help="The text matches it.", rich_help_panel=_SAMPLING)]
Choice = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="The text is one of these; give it several times.", rich_help_panel=_SAMPLING),
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TOKEN=BIAS",
        help="Added to a token's logit, -100 to 100; may be given again.",
        rich_help_panel=_SAMPLING,
    ),
]
Logprobs = Annotated[
    int | None,
    typer.Option(metavar="N", help="With --json: of each token, and of N alternatives.", rich_help_panel=_SAMPLING),
]

# generate: the pool

BlockSize = Annotated[int, typer.Option(metavar="N", help="Tokens in a frame.", rich_help_panel=_MEMORY)]
NumFrames = Annotated[int | None, typer.Option(metavar="N", help="Frames in the pool.", rich_help_panel=_MEMORY)]
Memory = Annotated[str | None, typer.Option(metavar="SIZE", help="Or its size, such as 2GiB.", rich_help_panel=_MEMORY)]
Tiers = Annotated[
    list[str] | None,
    typer.Option(
        "--tier",
        metavar="TIER",
        help="Under the pool: host:SIZE, disk:SIZE:FOLDER, or a shared store; again, fastest first.",
        rich_help_panel=_MEMORY,
    ),
]
FrequencyPenalty = Annotated[
    float,
    typer.Option(metavar="F", help="For each time a token is in the output; 0 is off.", rich_help_panel=_SAMPLING),
]
PresencePenalty = Annotated[
    float, typer.Option(metavar="P", help="Once, if a token is in the output; 0 is off.", rich_help_panel=_SAMPLING)
]
NumBeams = Annotated[int, typer.Option(metavar="N", help="Beam search: 1 is off.", rich_help_panel=_SAMPLING)]
Speculate = Annotated[
    str | None,
    typer.Option(metavar="HOW", help="Guess tokens: prompt-lookup, draft, or a smaller model as --model."),
]
SeenWindow = Annotated[
    int | None,
    typer.Option("--window", metavar="N", help="Each token sees the last N: constant memory.", rich_help_panel=_MEMORY),
]
Sinks = Annotated[
    int, typer.Option(metavar="N", help="With --window: and the first N, such as 4.", rich_help_panel=_MEMORY)
]
Kernels = Annotated[str, typer.Option(metavar="NAME", help="One that `pagedkv doctor` lists.", rich_help_panel=_MEMORY)]
Dtype = Annotated[str | None, typer.Option(metavar="NAME", help="float32, bfloat16, float16.", rich_help_panel=_MEMORY)]
KvDtype = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Of the stored KV: fp8_e4m3, fp8_e5m2, int8, int4.", rich_help_panel=_MEMORY),
]
MaxSequences = Annotated[int, typer.Option(metavar="N", help="Running at once.", rich_help_panel=_MEMORY)]
PrefillChunk = Annotated[
    int | None,
    typer.Option(metavar="N", help="Tokens of one prompt in a step, so that others go on.", rich_help_panel=_MEMORY),
]
Tenant = Annotated[str, typer.Option(metavar="NAME", help="Only its prefixes are found.", rich_help_panel=_MEMORY)]

# serve

ServeHost = Annotated[
    str, typer.Option(metavar="NAME", help="0.0.0.0 for all addresses of this machine.", rich_help_panel=_CLIENTS)
]
ServePort = Annotated[
    int, typer.Option(metavar="N", min=0, max=65535, help="0 for any that is free.", rich_help_panel=_CLIENTS)
]
ServeName = Annotated[
    str | None, typer.Option(metavar="NAME", help="Of the model, for clients.", rich_help_panel=_CLIENTS)
]
ServeKey = Annotated[
    str | None,
    typer.Option(metavar="KEY", help="Ask for it; or in PAGEDKV_API_KEY, unseen by `ps`.", rich_help_panel=_CLIENTS),
]
ServeKeys = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="`key tenant` in each line, instead of a key.", rich_help_panel=_CLIENTS),
]
ServeShare = Annotated[
    float,
    typer.Option(
        metavar="F",
        min=0.001,
        max=1,
        help="The most of all running and waiting requests that one of several tenants may have.",
        rich_help_panel=_CLIENTS,
    ),
]
ServePriorities = Annotated[
    bool,
    typer.Option(
        "--shared-priorities", help="A priority counts among the requests of all tenants.", rich_help_panel=_CLIENTS
    ),
]
ServeHosts = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="A name that clients ask for; may be given again.", rich_help_panel=_CLIENTS),
]
ServeConnections = Annotated[
    int, typer.Option(metavar="N", min=1, max=2**20, help="At once; more are refused.", rich_help_panel=_CLIENTS)
]
ServeStep = Annotated[
    float, typer.Option(metavar="N", min=0.1, help="Seconds of a step that /health bears.", rich_help_panel=_CLIENTS)
]
ServeEvents = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="Publish KV events, such as tcp://*:5557.", rich_help_panel=_CLIENTS),
]
ServeReplay = Annotated[
    str | None, typer.Option(metavar="ADDRESS", help="Where readers ask for them again.", rich_help_panel=_CLIENTS)
]
ServeTopic = Annotated[
    str, typer.Option(metavar="TEXT", help="Theirs; llm-d reads kv@POD@MODEL.", rich_help_panel=_CLIENTS)
]
ServeWaiting = Annotated[
    int, typer.Option(metavar="N", min=1, help="Requests that wait; more are refused.", rich_help_panel=_CLIENTS)
]
ServePrompt = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Tokens of a prompt, at most; else all that fit.", rich_help_panel=_CLIENTS),
]
ServeBody = Annotated[str, typer.Option(metavar="SIZE", help="Of a request, at most.", rich_help_panel=_CLIENTS)]
ServeDrain = Annotated[
    int,
    typer.Option(metavar="N", min=0, help="Seconds for running requests after SIGTERM.", rich_help_panel=_CLIENTS),
]

# fit

FitModel = Annotated[
    str | None,
    typer.Option(
        metavar="DIR", help="A Hugging Face folder, its config.json, or owner/name in the cache; without, the bundled."
    ),
]
FitLayers = Annotated[int | None, typer.Option(metavar="N", help="Layers.", rich_help_panel=_GEOMETRY)]
FitKvHeads = Annotated[int | None, typer.Option(metavar="N", help="KV heads.", rich_help_panel=_GEOMETRY)]
FitHeadDim = Annotated[int | None, typer.Option(metavar="N", help="Of a key.", rich_help_panel=_GEOMETRY)]
FitHeadDimV = Annotated[
    int | None, typer.Option(metavar="N", help="Of a value, if not that of a key.", rich_help_panel=_GEOMETRY)
]
FitValueInKey = Annotated[
    bool, typer.Option("--value-in-key", help="Store keys alone, as the latents of MLA.", rich_help_panel=_GEOMETRY)
]
FitWindow = Annotated[int | None, typer.Option(metavar="N", help="Of all layers.", rich_help_panel=_GEOMETRY)]
FitDtype = Annotated[str | None, typer.Option(metavar="NAME", help="float32, bfloat16, float16.")]
FitWeights = Annotated[
    str | None, typer.Option(metavar="NAME", help="int8 or int4; or the bytes of all weights, such as 140GB.")
]
FitContext = Annotated[int | None, typer.Option(metavar="N", min=1, max=2**31 - 1, help="Tokens of each sequence.")]
FitMemory = Annotated[str | None, typer.Option(metavar="SIZE", help="Of one GPU, for weights and KV; such as 72GB.")]
FitBandwidth = Annotated[str | None, typer.Option(metavar="SIZE", help="Of one GPU, such as 3.35TB/s.")]
FitChunk = Annotated[
    int | None, typer.Option("--prefill-chunk", metavar="N", min=1, help="Tokens of one prompt in a step.")
]
FitGpus = Annotated[int, typer.Option(metavar="N", min=1, max=1024, help="1 to N that share the heads equally.")]
FitJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, no more.")]

# replay

ReplayTrace = Annotated[
    Path,
    typer.Argument(metavar="TRACE", help='On each line a request: {"hash_ids": [0, 1]}, 512 prompt tokens an id.'),
]
ReplayFrames = Annotated[
    list[int] | None, typer.Option(metavar="N", help="Frames of 512 tokens; again for more pools.")
]
ReplayMemory = Annotated[
    list[str] | None, typer.Option(metavar="SIZE", help="Instead: pools of that size, such as 40GiB.")
]
ReplayTier = Annotated[
    str | None, typer.Option(metavar="N", help="Frames of a tier below each pool, or 8x for eight times the pool.")
]
ReplayBytesPerToken = Annotated[int, typer.Option(metavar="N", help="For --memory; as is, Llama 3.1 8B in bfloat16.")]
ReplayPolicy = Annotated[list[str] | None, typer.Option(metavar="NAME", help="lru, 2q, lfu, cost, belady, all.")]
ReplayPlot = Annotated[Path | None, typer.Option(metavar="FILE", help="Draw hit rate against pool size.")]

JsonList = Annotated[bool, typer.Option("--json", help="Print a list of objects, no more.")]
