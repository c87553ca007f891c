"""The fields of a call have one list, in args.py: C++ and Python that give them by position have the same order.

The CUDA kernels' parameters are compared with their struct by the compiler, in cuda/test_driver.py.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from pathlib import Path

import pytest

from pagedkv.kernels import args, bound, cpu, layout
from pagedkv.kernels.args import AttentionCall, GatherSource, WriteCall

CSRC = Path(__file__).parents[3] / "csrc" / "cpu"
ATTENTION, MOVES = ((CSRC / "python" / name).read_text() for name in ("attention.cpp", "moves.cpp"))
RENAMED = {"q_THD": "q", "causal": "causal_of", "return_lse": "lse", "k_TKD": "k_new", "v_TKD": "v_new"}
RENAMED |= {"at": "slots", "places": "positions"}


def enumerators(source: str, last: str) -> tuple[str, ...]:
    """Return the names of the enum that ends with `last`, in lower case."""
    names = re.search(rf"enum\s*{{([^}}]*),\s*{last}\s*}}", source)
    assert names is not None
    return tuple(name.strip().lower() for name in names[1].split(","))


def parameters(source: str, function: str) -> tuple[str, ...]:
    """Return the names of the parameters of a function of C++."""
    listed = re.search(rf"\b{function}\(([^)]*)\) {{", source)
    assert listed is not None
    return tuple(re.findall(r"(\w+)(?:,|$)", listed[1]))


def arguments(function: object, called: str) -> tuple[str, ...]:
    """Return the last names of the arguments with which a function of Python calls `called`, but the first."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))  # type: ignore[arg-type]
    (call,) = (
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(called)
    )
    return tuple(ast.unparse(argument).rpartition(".")[2] for argument in call.args[1:])


def test_cpp_attends_by_the_fields_of_an_attention_call():
    assert parameters(ATTENTION, "bind_attention") == AttentionCall._fields[:12]
    assert enumerators(ATTENTION, "NUM_ATTEND") == AttentionCall._fields[12:]


def test_cpp_writes_by_the_fields_of_a_write_call():
    assert parameters(MOVES, "bind_write") == WriteCall._fields[:7]
    assert enumerators(MOVES, "NUM_WRITE") == WriteCall._fields[7:]


def test_cpp_gathers_by_the_fields_of_a_gather_source():
    (tables,) = re.findall(r"tables = \((.*)\)", inspect.getsource(cpu.gather_kv))
    given = tuple(name.rpartition(".")[2] for name in tables.split(", "))
    assert given == (*GatherSource._fields[4:], "starts")
    assert parameters(MOVES, "gather") == ("pool", "scale", *given, "out", "isa", "threads")


@pytest.mark.parametrize(
    ("call", "called", "wanted"),
    [
        (bound.BoundAttention.__call__, "_extension.attend", AttentionCall._fields[12:]),
        (bound.BoundWrite.__call__, "_extension.write", (*WriteCall._fields[7:], "False")),
    ],
)
def test_a_bound_call_gives_the_fields_in_order(call, called, wanted):
    assert tuple(RENAMED.get(name, name) for name in arguments(call, called)) == wanted


def test_the_fields_of_a_layer_and_of_a_batch_are_in_order():
    layer = tuple(re.findall(r"layer\.(\w+)", inspect.getsource(args.bound_fields)))
    assert layer == AttentionCall._fields[:4] == WriteCall._fields[:4] == GatherSource._fields[:4]
    assert args.AttentionOptions._fields == AttentionCall._fields[4:12]
    tables = tuple(re.findall(r"\bx\.(\w+)", inspect.getsource(args.tables_of)))
    assert tables == AttentionCall._fields[13:19]


def test_the_farthest_position_is_one_number():
    (power,) = re.findall(r"FARTHEST = int64_t\{1\} << (\d+);", (CSRC / "contract.hpp").read_text())
    assert 1 << int(power) == layout.FARTHEST
