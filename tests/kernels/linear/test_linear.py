"""The linear operations in C++ against their definition, on every instruction set of this machine.

The definition in float64 is the truth. In float32, ours may be as far from it as sums in another order are; in 16 bits
twice as far as torch's own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor

from pagedkv.errors import InvalidRequest
from pagedkv.kernels import cpu as extension
from pagedkv.kernels import linear
from pagedkv.kernels.linear import Matrix, cpu
from pagedkv.kernels.linear.reference import Operations

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (
    (1, 1024, 512), (3, 100, 37), (8, 64, 96), (5, 33, 6), (17, 257, 130), (2, 1, 1), (7, 96, 2),
    (4, 2048, 50), (12, 2081, 52),
)  # fmt: skip
"""(tokens, columns of x, rows of W): whole vectors, rests of every kind, one number, and several blocks of columns."""
OF_GROUPS = ((1, 1024, 512), (3, 64, 37), (8, 192, 96), (5, 320, 6), (17, 256, 130), (2, 64, 1), (7, 128, 22))
"""The same for integers: one group and several, an even number of them and an odd one."""
KINDS = ("", "int8", "int4")
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_kind = pytest.mark.parametrize("kind", KINDS)
EPS = 1e-6
reference = Operations()
Result = tuple[Tensor, ...]

pytestmark = pytest.mark.skipif(bool(extension.missing()), reason="the C++ extension is not built")


@pytest.fixture(params=extension.extension().sets() if not extension.missing() else ())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Force each instruction set that this processor has."""
    monkeypatch.setenv("PAGEDKV_CPU_ISA", request.param)
    return str(request.param)


class Serving:
    """The extension. Each of its functions must serve the call."""

    def __getattr__(self, name: str) -> Any:
        run = getattr(extension.extension(), name)

        def serve(*given: Any) -> bool:
            assert run(*given), f"the C++ code refused a call of {name}"
            return True

        return serve


@pytest.fixture
def native(isa: str) -> cpu.Native:
    """Return the operations in C++, which may leave no call to the definition."""
    made = cpu.Native()
    made._x = Serving()
    return made


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def weights_of(kind: str, n: int, k: int, dtype: torch.dtype) -> Any:
    """Return W of the dtype, or of integers."""
    of = numbers(n, k, dtype=torch.float32 if kind else dtype, seed=1, scale=k**-0.5)
    return Matrix.quantised(of, kind) if kind else of


def wide(x: Any) -> Any:
    """Return the same argument in float64."""
    if isinstance(x, tuple):
        return tuple(map(wide, x))
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def error(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).abs().max() / exact.abs().max())


def compare(run: Callable[..., Tensor], theirs: Callable[..., Tensor], *given: Any, dtype: torch.dtype) -> None:
    """Compare two functions that return a result, and leave their arguments as they are."""
    exact = theirs(*wide(given))
    ours, plain = error(run(*given), exact), error(theirs(*given), exact)
    assert ours <= (2e-6 if dtype == torch.float32 else 2 * plain + 1e-4), (ours, plain)


def added(operations: Any) -> Callable[..., Tensor]:
    """Return a function that returns the residual, of a copy."""

    def run(residual: Tensor, *rest: Any) -> Tensor:
        into = residual.clone()
        operations.linear_add(into, *rest)
        return into

    return run


def rotated(operations: Any) -> Callable[..., Tensor]:
    def run(qkv: Tensor, *rest: Any) -> Tensor:
        into = qkv.clone()
        operations.norm_rotate(into, *rest)
        return into

    return run


@pytest.mark.parametrize(
    ("kind", "norm_dtype", "has_bias"),
    [
        *(("", *of) for of in itertools.product((None, "same", torch.float32), (False, True))),
        *((kind, "same", True) for kind in KINDS[1:]),
    ],
    ids=str,
)
@each_dtype
def test_operations_are_those_of_the_definition(
    native: cpu.Native, dtype: torch.dtype, kind: str, norm_dtype: Any, has_bias: bool
) -> None:
    for tokens, k, n in OF_GROUPS if kind else SIZES:
        x, weights = numbers(tokens, k, dtype=dtype), weights_of(kind, n, k, dtype)
        bias = numbers(n, dtype=dtype, seed=2) if has_bias else None
        in_dtype = dtype if norm_dtype == "same" else norm_dtype
        norm, out_norm = (
            None if in_dtype is None else 1.0 + numbers(size, dtype=in_dtype, seed=3, scale=0.1) for size in (k, n)
        )
        compare(native.norm_linear, reference.norm_linear, x, norm, weights, bias, EPS, dtype=dtype)
        residual = numbers(tokens, n, dtype=dtype, seed=4)
        compare(added(native), added(reference), residual, x, weights, bias, out_norm, EPS, dtype=dtype)
        if norm is not None:
            compare(native.logits, reference.logits, x, norm, weights, EPS, dtype=dtype)
        if n % 2 == 0:
            for activation in ("silu", "gelu_tanh"):
                args = (3 * x, norm, weights, bias, EPS, activation)
                compare(native.norm_gate_up, reference.norm_gate_up, *args, dtype=dtype)


@each_dtype
@pytest.mark.parametrize("norm_dtype", [None, "same", torch.float32], ids=str)
def test_heads_are_normed_and_rotated_as_in_the_definition(
    native: cpu.Native, dtype: torch.dtype, norm_dtype: Any
) -> None:
    for tokens, heads, kv_heads, size in ((1, 16, 8, 128), (5, 4, 2, 24), (40, 4, 1, 256), (3, 2, 2, 2)):
        qkv = numbers(tokens, (heads + 2 * kv_heads) * size, dtype=dtype)
        turns = 6 * torch.rand(tokens, size // 2, generator=torch.Generator().manual_seed(0))
        angles = (turns.cos().to(dtype), turns.sin().to(dtype))
        in_dtype = dtype if norm_dtype == "same" else norm_dtype
        norms = tuple(None if in_dtype is None else numbers(size, dtype=in_dtype, seed=seed) for seed in (1, 2))
        args = (qkv, (heads, kv_heads), norms, angles, EPS)
        compare(rotated(native), rotated(reference), *args, dtype=dtype)
        values = (heads + kv_heads) * size
        assert torch.equal(rotated(native)(*args)[:, values:], qkv[:, values:])


@each_dtype
def test_extreme_gates_are_finite(native: cpu.Native, dtype: torch.dtype) -> None:
    """For a gate of +-x and an `up` of 1."""
    largest = torch.finfo(dtype).max
    for size in (0.0, 1e-4, 20.0, 80.0, 88.0, 100.0, 1000.0, 60_000.0, largest):
        x = torch.tensor([[size, 1.0]], dtype=dtype)
        weights = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, 1.0]], dtype=dtype)
        for activation in ("silu", "gelu_tanh"):
            args = (x, None, weights, None, EPS, activation)
            found, wanted = native.norm_gate_up(*args), reference.norm_gate_up(*wide(args[:1]), None, *wide(args[2:]))
            torch.testing.assert_close(found.double(), wanted, rtol=1e-2, atol=1e-3)


@each_kind
@each_dtype
def test_the_bits_of_a_token_depend_on_no_other_token_and_on_no_thread(
    isa: str, dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, k, n = 21, 1088, 4 * 300
    x, weights, norm = numbers(tokens, k, dtype=dtype), weights_of(kind, n, k, dtype), numbers(k, dtype=dtype, seed=2)
    monkeypatch.setenv("PAGEDKV_NUM_THREADS", "1")
    one = cpu.Native()
    alone = [one.norm_gate_up(x[t : t + 1], norm, weights, None, EPS, "silu") for t in range(tokens)]
    for threads in ("1", "2", "3"):
        monkeypatch.setenv("PAGEDKV_NUM_THREADS", threads)
        for count in (2, 3, 7, 21):
            together = cpu.Native().norm_gate_up(x[:count], norm, weights, None, EPS, "silu")
            assert torch.equal(together, torch.cat(alone[:count]))


@each_dtype
@pytest.mark.parametrize(("tokens", "k", "n"), [(3, 16_384, 16), (1, 64, 3000), (8, 256, 1999)])
def test_each_row_is_computed_by_any_number_of_threads(
    isa: str, dtype: torch.dtype, tokens: int, k: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weights = numbers(tokens, k, dtype=dtype), numbers(n, k, dtype=dtype, seed=1)
    results = []
    for threads in ("1", "2", "5", "16"):  # for some of them no row is left
        monkeypatch.setenv("PAGEDKV_NUM_THREADS", threads)
        results.append(torch.full((tokens, n), float("nan"), dtype=dtype))
        cpu.Native().norm_linear(x, None, weights, None, EPS, results[-1])
    assert results[0].isfinite().all()
    assert all(torch.equal(result, results[0]) for result in results)


def among_poison(x: Tensor) -> Tensor:
    """Return an equal tensor whose rows lie among NaN: before, between and behind them."""
    rows, columns = (1, len(x)) if x.dim() == 1 else x.shape
    around = torch.full((rows + 2, columns + 5), float("nan"), dtype=x.dtype)
    inner = around[1:-1, 2 : 2 + columns]
    inner.copy_(x)
    return inner[0] if x.dim() == 1 else inner


def among_others(weights: Any) -> list[Any]:
    """Return equal weights among NaN, or among other integers: integers have no NaN."""
    if isinstance(weights, Tensor):
        return [among_poison(weights)]
    found, (n, columns) = [], weights.stored.shape
    for filler in (0x5A, 0xE1):
        around = torch.full((n + 2, columns + 5), filler, dtype=torch.uint8).view(weights.stored.dtype)
        around[1:-1, 2 : 2 + columns] = weights.stored
        found.append(Matrix(around[1:-1, 2 : 2 + columns], among_poison(weights.scales)))
    return found


@each_kind
@each_dtype
def test_only_the_tensors_are_read_and_written(native: cpu.Native, dtype: torch.dtype, kind: str) -> None:
    for tokens, k, n in OF_GROUPS if kind else SIZES:
        x, weights = numbers(tokens, k, dtype=dtype), weights_of(kind, n, k, dtype)
        bias, norm = numbers(n, dtype=dtype, seed=2), numbers(k, dtype=dtype, seed=3)
        wanted = native.norm_linear(x, norm, weights, bias, EPS)
        x, norm, bias = map(among_poison, (x, norm, bias))
        for among in among_others(weights):
            out = among_poison(torch.zeros(tokens, n, dtype=dtype))
            assert torch.equal(native.norm_linear(x, norm, among, bias, EPS, out), wanted)
            around = out.as_strided((tokens + 2, n + 5), out.stride(), 0)
            assert int(around.isnan().sum()) == around.numel() - tokens * n


@each_kind
def test_a_nan_stays_with_its_token(native: cpu.Native, kind: str) -> None:
    x, weights = numbers(6, 64, dtype=torch.bfloat16), weights_of(kind, 8, 64, torch.bfloat16)
    x[4, 7] = float("nan")
    found = native.norm_gate_up(x, numbers(64, dtype=torch.bfloat16), weights, None, EPS, "silu")
    assert found[4].isnan().all()
    assert found[[0, 1, 2, 3, 5]].isfinite().all()


@given(
    tokens=some.integers(1, 40), k=some.integers(1, 300), n=some.integers(1, 70), dtype=some.sampled_from(DTYPES),
    threads=some.sampled_from(("1", "2", "5")),
)  # fmt: skip
def test_any_size(tokens: int, k: int, n: int, dtype: torch.dtype, threads: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGEDKV_NUM_THREADS", threads)
        x, weights = numbers(tokens, k, dtype=dtype), numbers(n, k, dtype=dtype, seed=k, scale=k**-0.5)
        norm = numbers(k, dtype=dtype, seed=n)
        ours = cpu.Native().norm_linear(x, norm, weights, None, EPS)
    exact = reference.norm_linear(*wide((x, norm, weights)), None, EPS)
    limit = 3e-6 if dtype == torch.float32 else 3e-2 if dtype == torch.bfloat16 else 4e-3
    # One result of n = 1 may be small by cancellation; its terms are not.
    assert (ours.double() - exact).abs().max() <= limit * max(1.0, float(exact.abs().max()))


def test_calls_that_cpp_refuses_are_answered_by_the_definition() -> None:
    native, x, weights = cpu.Native(), numbers(3, 8, dtype=torch.float32), numbers(4, 8, dtype=torch.float32, seed=1)
    columns = weights.T.contiguous().T  # rows are no runs
    torch.testing.assert_close(
        native.norm_linear(x, None, columns, None, EPS), reference.norm_linear(x, None, weights, None, EPS)
    )
    with pytest.raises(RuntimeError, match=r"shapes|size"):  # torch has the words
        native.norm_linear(x, None, weights[:, :5], None, EPS)
    wrong = torch.zeros(2, 4)
    assert native.norm_linear(x, None, weights, None, EPS, wrong).shape == (3, 4)
    assert not wrong.any()


def test_the_choice_follows_device_dtype_tokens_and_the_named_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGEDKV_KERNELS", raising=False)

    def is_cpp(*given: Any) -> bool:
        return isinstance(linear.choose(*given), cpu.Native)

    most = cpu.most_tokens(torch.bfloat16)
    assert is_cpp(CPU, torch.bfloat16, most)
    assert is_cpp(CPU, torch.bfloat16, 1, "cpu")
    assert not is_cpp(CPU, torch.bfloat16, most + 1)
    assert not is_cpp(CPU, torch.float64, 1)
    assert not is_cpp(torch.device("meta"), torch.bfloat16, 1)
    assert not is_cpp(CPU, torch.bfloat16, 1, "numba")
    monkeypatch.setenv("PAGEDKV_KERNELS", "reference")
    assert not is_cpp(CPU, torch.bfloat16, 1)
    assert is_cpp(CPU, torch.bfloat16, 1, "cpu")
    monkeypatch.delenv("PAGEDKV_KERNELS")
    monkeypatch.setenv("PAGEDKV_CPU_ISA", "avx1024")
    with pytest.raises(InvalidRequest, match="avx1024"):
        linear.choose(CPU, torch.bfloat16, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(33, 64, 96), (40, 5000, 130), (33, 1, 1), (33, 0, 3)])
def test_widened_products_are_nearer_than_torchs_of_16_bits(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    T, K, N = shape
    dice = torch.Generator().manual_seed(0)
    x, weights, bias = (torch.randn(*size, generator=dice).to(dtype) for size in ((T, K), (N, K), (N,)))
    operations: Any = cpu.Widened()
    calls: list[Any] = [(x, None, weights, None, EPS), (x, torch.ones(K, dtype=dtype), weights, bias, EPS)]
    for args in calls:
        wide: list[Any] = [part.double() if isinstance(part, Tensor) else part for part in args]
        exact = reference.norm_linear(*wide)
        errors = [(of.norm_linear(*args).double() - exact).abs().amax() for of in (operations, reference)]
        assert errors[0] <= 1.5 * errors[1] + 1e-6
    for wrong_x, wrong_bias in ((x.float(), None), (x, bias.float()), (x, torch.cat((bias, bias, bias)))):
        with pytest.raises(RuntimeError, match=r"dtype|expand|size"):
            operations.norm_linear(wrong_x, None, weights, wrong_bias, EPS)


@pytest.mark.parametrize("is_fast", [True, False])
def test_weights_are_widened_where_torch_is_slow(is_fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGEDKV_KERNELS", raising=False)
    monkeypatch.setattr(cpu, "is_slow_in_torch", lambda dtype: not is_fast and dtype == torch.bfloat16)
    assert [cpu.most_tokens(dtype) for dtype in DTYPES] == [32, 32 if is_fast else 64, 32]
    many, expected = cpu.most_tokens(torch.bfloat16) + 1, Operations if is_fast else cpu.Widened
    assert type(linear.choose(CPU, torch.bfloat16, many)) is expected
    assert type(linear.choose(CPU, torch.bfloat16, many, "cpu")) is expected
    for args in ((CPU, torch.float32, many), (CPU, torch.bfloat16, many, "reference"), ("meta", torch.bfloat16, many)):
        assert type(linear.choose(torch.device(args[0]), *args[1:])) is Operations  # type: ignore[arg-type]


def test_widened_products_take_blocks_of_tokens_and_pieces_of_whole_128_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of a long prompt leaves the caches, and oneDNN is slow for other numbers of rows."""
    seen: list[tuple[int, int]] = []
    product = torch.nn.functional.linear

    def spy(x: Tensor, weights: Tensor, bias: Tensor | None = None) -> Tensor:
        seen.append((len(x), len(weights)))
        return product(x, weights, bias)

    monkeypatch.setattr(cpu, "_BLOCK", 16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(torch.nn.functional, "linear", spy)
    x, weights, norm = (numbers(*size, dtype=torch.bfloat16) for size in ((40, 1500), (300, 1500), (1500,)))
    residual, made = numbers(40, 300, dtype=torch.bfloat16, seed=1), torch.zeros(40, 300).bfloat16()
    widened: Any = cpu.Widened()
    for run, args in (
        ("norm_linear", (x, norm, weights, None, EPS)), ("norm_linear", (x, norm, weights, None, EPS, made)),
        ("norm_gate_up", (x, norm, weights, None, EPS, "silu")), ("logits", (x, norm, weights, EPS)),
    ):  # fmt: skip
        wanted = getattr(reference, run)(*wide(args))
        seen.clear()
        found = getattr(widened, run)(*args)
        assert seen == [(16, 128), (16, 128), (16, 44)] * 2 + [(8, 128), (8, 128), (8, 44)]
        assert error(found, wanted) < 0.01
    wanted = added(reference)(*wide((residual, x, weights, None, None, EPS)))
    assert error(added(widened)(residual, x, weights, None, None, EPS), wanted) < 0.01
    whole = Matrix.quantised(weights[:, :1472].float(), "int8")
    found = widened.norm_linear(x[:, :1472], None, whole, None, EPS)
    assert torch.equal(found, widened.norm_linear(x[:, :1472], None, whole.dense(x.dtype), None, EPS))


def test_results_may_lie_on_their_input() -> None:
    """A thread may write a result while another has not yet read its input, so the definition answers."""
    x, weights = numbers(3, 64, dtype=torch.float32), numbers(64, 64, dtype=torch.float32, seed=1)
    wanted = reference.norm_linear(x, None, weights, None, EPS)
    same = x.clone()
    found = cpu.Native().norm_linear(same, None, weights, None, EPS, same)
    assert found is not same
    torch.testing.assert_close(found, wanted)
    cpu.Native().linear_add(same, same, weights, None, None, EPS)
    torch.testing.assert_close(same, x + wanted)


@pytest.mark.parametrize(
    "call",
    [
        lambda native, x: native.linear_add(x[:1].expand(3, 8), x, torch.ones(8, 8), None, None, EPS),
        lambda native, x: native.norm_rotate(x[:1].expand(3, 8), (2, 1), (None, None), (x[:, :1], x[:, :1]), EPS),
        lambda native, x: native.norm_rotate(x, (2**62 + 2, 1), (None, None), (x[:, :1], x[:, :1]), EPS),
        lambda native, x: native.norm_rotate(x, (2**62, 2**61), (None, None), (x[:, :1], x[:, :1]), EPS),
        lambda native, x: native.linear_add(
            x[:1].expand(2**57, 8), x[:1].expand(2**57, 8), torch.ones(8, 8), None, None, EPS
        ),
    ],
)
def test_destinations_and_sizes_that_no_memory_has_are_refused(call: Callable[[cpu.Native, Tensor], None]) -> None:
    with pytest.raises(RuntimeError):
        call(cpu.Native(), torch.ones(3, 8))
