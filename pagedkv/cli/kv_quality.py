"""`pagedkv kv-quality`: the cost of each KV kind on a model, as a table on stdout and as a picture."""

from __future__ import annotations

from pagedkv.bench.chart import Bar, bars, write
from pagedkv.cli.bench.shown import Shown
from pagedkv.cli.options import Measuring
from pagedkv.engine.checkpoint import BUNDLED
from pagedkv.engine.checkpoint.tokenizer import Tokenizer
from pagedkv.engine.model.decoder import Decoder
from pagedkv.engine.model.kv_quality import calibration_of, kv_quality
from pagedkv.errors import InvalidRequest
from pagedkv.kv_gate import BOUND, Gate


def run(given: Measuring) -> None:
    """Print the table, and draw the picture if it is asked for. Raises: InvalidRequest; CheckpointError"""
    folder, text, plot = given.folder(), given.text_of(given.text), Shown(plot=given.plot).plot
    if folder is None and text is None:
        raise InvalidRequest("the bundled checkpoint reads nothing but its records; give --model DIR, or --text FILE")
    path = folder or BUNDLED
    tokenizer = Tokenizer.load(path)
    decoder = Decoder.load(path, dtype=given.dtype, device=given.device, weights=given.weights)
    ids, others = Gate.token_ids(tokenizer.encode, decoder.config.max_position_embeddings, text)
    costs = kv_quality(decoder, ids, calibration=calibration_of(decoder, others))
    print(Gate().table(costs))
    if plot is not None:
        drawn = []
        for kind, at in sorted(costs.items(), key=lambda cost: cost[1].bits)[:-1]:  # the last is full precision
            name, ends = f"{at.bits:.2f} bits, {kind}", (max(0, at.kl - at.kl_error), at.kl + at.kl_error)
            drawn.append(Bar(name, at.kl, *ends, f"{at.kl:.4f}", "ours"))
        title = "KL divergence by the bits of an element of K and V"
        chart = bars(title, drawn, unit="nats", bound=("bound of auto", BOUND))
        model = given.model or "the bundled checkpoint"
        write([chart], plot, f"{model}, {len(ids):,} tokens. Whisker: one standard error.")
