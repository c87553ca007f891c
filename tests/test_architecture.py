"""The architecture, frozen: which module may import which, how long functions may be, the public names.

The tests read the sources with `ast`; imports inside functions and under TYPE_CHECKING count.
"""

from __future__ import annotations

import ast
import graphlib
import importlib
import math
import re
import subprocess
import sys
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import pagedkv
import pagedkv.engine
from pagedkv import debug
from pagedkv.kernels import registry

ROOT = Path(__file__).parents[1]

FREE = {"errors", "spec", "debug", "machine_code", "kv_gate"}
"""Integers and names only; every layer may import them, they import one another and the standard library."""

ARROWS = {
    "core": set(),
    "kernels": set(),  # core and kernels do not know each other
    "tiers": {"core", "kernels"},
    "cache": {"core", "kernels", "tiers"},
    "engine": {"core", "kernels", "cache", "tiers"},
    "conformance": {"kernels"},
    "integrations": set(),
    "cli": {"engine"},
}
"""layer → layers it may import, besides itself and FREE."""

ALSO = {
    "engine": {"pagedkv.integrations.prometheus", "pagedkv.integrations.zmq_events"},
    #      the counters of the cache, at /metrics, and its events
    "integrations": {"pagedkv.core", "pagedkv.tiers"},
    #      MemoryManager, for those who hold their own tensors; the packages, not their parts
    "cli": {
        *("pagedkv.core", "pagedkv.core.policies", "pagedkv.core.replay", "pagedkv.core.warm"),
        *("pagedkv.kernels.registry", "pagedkv.kernels.threads", "pagedkv.bench"),
    },
    #      for `replay`; registry and threads: `doctor` shows why a kernel cannot run here, and the quota; benchmarks
}
"""Single modules open to a layer; integrations and cli may import the public names from `pagedkv` too."""

THIRD_PARTY = {
    "core": {"numpy", "numba"},
    "kernels": {"numpy", "numba", "torch", "triton", "cupy", "cuda"},
    "free": set(),
}
"""The packages that these layers may import from outside. "free" stands for the modules of FREE."""

EXTRAS_AT_HOME = (
    "pagedkv.integrations",
    "pagedkv.kernels.triton",
    "pagedkv.kernels.cuda",
    "pagedkv.engine",  # the extra `engine`, as the next
    "pagedkv.cli",
)
"""Modules that are imported only after someone found their extra installed."""

LEVELS = {
    "pagedkv.core": (
        "state background",
        "compiled",
        "arguments prefix",
        "pool",
        "handles policies",
        "tables last_callers",
        "observe check thread_guard tenants",
        "recovery frame_pool spaces",
        "states",
        "hints",
        "manager",
        "replay warm",
    ),
    "pagedkv.kernels": (
        "args quant threads layout huge_pages",
        "case checks",
        "reference registry",
        "cpu numba cuda triton",
        "library",
        "operators",
        "bound",
        "ops linear recurrent",
    ),
    "pagedkv.engine": ("checkpoint", "sampling", "model requests", "drafts", "step", "serve"),
}
"""The parts of a layer (modules or folders), from the lowest level up. A part imports only parts of lower levels."""

ENGINE_NAMES = "Completion Engine Limits Request SamplingParams".split()
"""The public names of `pagedkv.engine`. Its modules are a reference to read, not an interface to build on."""

PUBLIC_NAMES = """AddressSpace InvariantViolation KVLayer KVSpec KernelUnavailable OutOfFrames PagedBatch PagedKVCache
PagedKVError StateSpec bind_attention bind_write copy_frames explain gather_kv linear merge_states paged_attention
write_kv""".split()

PARAMETERS_MAX, PUBLIC_TOP_LEVEL_MAX = 5, 832
FUNCTION_LINES_P90, FUNCTION_LINES_MAX, KERNEL_LINES_MAX = 35, 60, 120
HEAD_LINES_MAX = 30
FOLDER_FILES_MAX = 20
SOURCES = (".py", ".cpp", ".h", ".hpp", ".inc", ".cu", ".cuh")
NAMES_THAT_SAY_NOTHING = {"utils", "util", "helpers", "helper", "common", "misc"}


def sources(*trees: str, ends: tuple[str, ...] = (".py",)) -> list[Path]:
    return sorted(
        path
        for tree in trees
        for path in (ROOT / tree).rglob("*")
        if path.suffix in ends and "__pycache__" not in path.parts
    )


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "triton_kernels":
        parts[:1] = ["pagedkv", "kernels", "triton"]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PACKAGE = {module_name(path): path for path in sources("pagedkv", "triton_kernels")}


def layer_of(module: str) -> str:
    part = module.split(".")[1] if "." in module else "root"
    return "free" if part in FREE else part


def imports_of(module: str, source: str, is_package: bool = False) -> set[str]:
    """The modules that `source` imports, anywhere in it; a public name counts as the module it lives in."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = module.split(".")[: len(module.split(".")) - node.level + is_package]
                base = ".".join([*above, base] if base else above)
            found |= {named(base, name.name) for name in node.names}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
            found |= {arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)}
    return found


def named(base: str, name: str) -> str:
    if base == "pagedkv" and name in pagedkv._HOME:
        return f"public:{pagedkv._HOME[name]}"
    return f"{base}.{name}" if f"{base}.{name}" in PACKAGE else base


def objections(module: str, source: str, is_package: bool = False) -> list[str]:
    """Return a line for each import of a module that breaks DESIGN section 3."""
    layer, found = layer_of(module), []
    for target in sorted(imports_of(module, source, is_package)):
        public, target = target.startswith("public:"), target.removeprefix("public:")
        outside = target.split(".")[0]
        if outside != "pagedkv":
            if outside not in sys.stdlib_module_names and outside not in THIRD_PARTY.get(layer, {outside}):
                found.append(
                    f"{module} imports {target}; "
                    f"{layer} may import {sorted(THIRD_PARTY[layer]) or 'the standard library only'}"
                )
            continue
        to = layer_of(target)
        allowed = to in {layer, "free"} | ARROWS.get(layer, set()) or target in ALSO.get(layer, set())
        allowed |= layer == "cli" and target.startswith("pagedkv.bench.")
        allowed |= target == "pagedkv.engine" and module.startswith("pagedkv.integrations.ray.")  # it serves engines
        allowed |= layer in ALSO and (public or target == "pagedkv")
        allowed |= target == "pagedkv" and layer != "free"  # __version__; public names were resolved to their homes
        if not allowed:
            found.append(
                f"{module} imports {target}; {layer} may import {sorted(ARROWS.get(layer, set())) or 'no other layer'}"
            )
    return found


def p90(values: list[int]) -> int:
    return sorted(values)[math.ceil(0.9 * len(values)) - 1]


def test_nothing_imports_upwards():
    layered = {module: path for module, path in PACKAGE.items() if module not in ("pagedkv", "pagedkv.__main__")}
    assert {layer_of(module) for module in layered} <= {*ARROWS, "free"}
    found = [
        line
        for module, path in layered.items()
        for line in objections(module, path.read_text(), path.name == "__init__.py")
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source", "legal"),
    [
        ("pagedkv.core.pool.frames", "import numpy as np\nimport os\nfrom pagedkv.errors import OutOfFrames", True),
        ("pagedkv.core.pool.frames", "def f():\n    import torch", False),
        ("pagedkv.core.pool.frames", "if TYPE_CHECKING:\n    from pagedkv.kernels.args import KVLayer", False),
        ("pagedkv.core.pool.frames", "from pagedkv import PagedKVCache", False),
        ("pagedkv.core.pool.frames", "from ...cache import paged", False),
        ("pagedkv.core.pool.frames", "importlib.import_module('pagedkv.cache.paged')", False),
        ("pagedkv.kernels.ops", "import torch\nfrom pagedkv.spec import KVSpec", True),
        ("pagedkv.integrations.vllm", "from pagedkv.cache.paged import PagedKVCache", False),
        ("pagedkv.integrations.ray.replica", "from pagedkv.engine import Engine", True),
        ("pagedkv.engine.serve.streaming", "from pagedkv.cli.options import Model", False),
    ],
)
def test_the_layer_check_sees_what_it_should(module, source, legal):
    assert (objections(module, source) == []) is legal


def test_a_base_install_can_import_every_module():
    """Extras are imported inside functions, in a `try`, or in folders that are loaded only when the extra is there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = (
        {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in project["dependencies"]}
        | set(sys.stdlib_module_names)
        | {"pagedkv"}
    )
    for module, path in PACKAGE.items():
        if module.startswith(EXTRAS_AT_HOME):
            continue
        body = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {name for node in body for name in imports_of(module, ast.unparse(node), path.name == "__init__.py")}
        needed = {name.removeprefix("public:").split(".")[0] for name in names}
        assert needed <= base, f"{module} needs an extra when it is imported"


def test_triton_sources_have_one_home():
    assert not (ROOT / "pagedkv/kernels/triton").exists(), "they are in triton_kernels/, mapped by setup.py"
    with pytest.raises(ImportError, match=r"pagedkv\.kernels\.triton"):
        importlib.import_module("triton_kernels")


def part_of(module: str, layer: str) -> str:
    """The part of a layer to which a module belongs; "" for the layer itself."""
    return module.removeprefix(layer).strip(".").split(".")[0]


@pytest.mark.parametrize("layer", LEVELS)
def test_a_part_imports_lower_levels_only(layer):
    level = {part: number for number, parts in enumerate(LEVELS[layer]) for part in parts.split()}
    parts = {part_of(module, layer) for module in PACKAGE if module.startswith(f"{layer}.")}
    assert parts == set(level), "a new part needs a level, and a level names parts that exist"
    climbing = [
        f"{module} imports {target}"
        for module, path in PACKAGE.items()
        if module.startswith(f"{layer}.")
        for target in imports_of(module, path.read_text(), path.name == "__init__.py")
        if target.startswith(f"{layer}.")
        and part_of(target, layer) != part_of(module, layer)
        and level[part_of(target, layer)] >= level[part_of(module, layer)]
    ]
    assert not climbing, "\n".join(climbing)


@cache
def import_graph() -> dict[str, set[str]]:
    """module → modules that it imports; without `pagedkv` itself, which holds the public names."""
    return {
        module: {
            target.removeprefix("public:")
            for target in imports_of(module, path.read_text(), path.name == "__init__.py")
        }
        & (PACKAGE.keys() - {"pagedkv", module})
        for module, path in PACKAGE.items()
        if module != "pagedkv"
    }


def room_of(module: str) -> str:
    """The wing of a module, and within `engine` the folder."""
    return ".".join(module.split(".")[1 : 3 if module.startswith("pagedkv.engine.") else 2])


def require_no_circle(graph: dict[str, set[str]]) -> None:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as circle:
        pytest.fail(" imports ".join(reversed(circle.args[1])))


def test_imports_form_no_circle():
    """Imports inside functions and for types count, too: a reader can read the files below a file before that file."""
    require_no_circle(import_graph())


@pytest.mark.parametrize("wing", ["tiers", "cache", "integrations", "cli", "kernels.cuda", "kernels.numba"])
def test_the_parts_of_a_wing_form_no_circle(wing):
    layer, graph = f"pagedkv.{wing}", {}
    for module, targets in import_graph().items():
        if module.startswith(f"{layer}."):
            part = part_of(module, layer)
            inside = {part_of(target, layer) for target in targets if target.startswith(f"{layer}.")}
            graph[part] = graph.get(part, set()) | inside - {part}
    require_no_circle(graph)


def test_the_manual_shows_the_import_graph():
    graph = {}
    for module, targets in import_graph().items():
        room, rooms = room_of(module), {room_of(target) for target in targets}
        graph[room] = graph.get(room, set()) | rooms - {room} - FREE
    graph = {room: rooms for room, rooms in graph.items() if rooms and room not in {"engine", "__main__", *FREE}}
    arrows = {f"{room} → {' '.join(sorted(rooms))}" for room, rooms in graph.items()}
    page = re.sub("\n {21}", " ", (ROOT / "docs/explanation/architecture.md").read_text())
    shown = {re.sub(" +", " ", line).strip() for line in page.splitlines() if re.match(r"[a-z.]+ +→ ", line)}
    assert shown == arrows, "the page shows other arrows"


def private_uses(source: str) -> list[str]:
    """Return each expression that reaches into a manager or cache: its `state`, or a name that begins with `_`."""
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and (node.attr == "state" or node.attr.startswith("_"))
        and ast.unparse(node.value).endswith(("manager", "cache"))
    ]


def test_the_state_of_a_manager_is_private_to_core():
    outside = {name: path for name, path in PACKAGE.items() if layer_of(name) != "core"}
    paths = [*outside.values(), *sources("bench", "examples", "scripts")]
    found = {str(path.relative_to(ROOT)): private_uses(path.read_text()) for path in paths}
    assert not {path: uses for path, uses in found.items() if uses}


def test_the_registry_imports_no_backend():
    backends = {kernel.backend.split(":")[0] for kernel in registry.KERNELS}
    assert not backends & imports_of("pagedkv.kernels.registry", PACKAGE["pagedkv.kernels.registry"].read_text())


def test_folders_are_small():
    trees = ("pagedkv", "triton_kernels", "csrc", "scripts", "bench", "tests", "examples")
    folders = Counter(path.parent for path in sources(*trees, ends=SOURCES))
    crowded = {str(folder.relative_to(ROOT)): count for folder, count in folders.items() if count > FOLDER_FILES_MAX}
    assert not crowded, f"over {FOLDER_FILES_MAX} sources in a folder, split by subject: {crowded}"


def test_functions_are_short():
    lines: dict[str, int] = {}
    for module, path in PACKAGE.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
                lines[f"{module}:{node.lineno} {node.name}"] = node.end_lineno - node.lineno + 1
    limit = {name: KERNEL_LINES_MAX if name.startswith("pagedkv.kernels.") else FUNCTION_LINES_MAX for name in lines}
    too_long = {name: count for name, count in lines.items() if count > limit[name]}
    assert not too_long, f"over {FUNCTION_LINES_MAX} lines ({KERNEL_LINES_MAX} in kernels): {too_long}"
    assert p90(list(lines.values())) <= FUNCTION_LINES_P90, sorted(lines.items(), key=lambda item: -item[1])[:10]


def many_parameters(module: str, source: str) -> set[str]:
    """Return the names of functions in `source` with more than PARAMETERS_MAX parameters; self and cls do not count."""
    found: set[str] = set()

    def walk(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                walk(child, name)
                continue
            inner = f"{name}.{child.name}"
            if not isinstance(child, ast.ClassDef):
                its = child.args
                given = [arg.arg for arg in (*its.posonlyargs, *its.args, *its.kwonlyargs)]
                if len([arg for arg in given if arg not in ("self", "cls")]) > PARAMETERS_MAX:
                    found.add(inner)
            walk(child, inner)

    walk(ast.parse(source), module)
    return found


def test_functions_take_five_parameters():
    """Functions of the list have the signature of a host or a kernel, or are older than this law. It only shrinks."""
    exempt = set((ROOT / "tests/many_parameters.txt").read_text().split())
    found = set().union(*(many_parameters(module, path.read_text()) for module, path in PACKAGE.items()))
    assert not found - exempt, f"more than {PARAMETERS_MAX} parameters; make a dataclass of those that belong together"
    assert not exempt - found, "these are gone or take fewer parameters now: delete their lines from the list"


def test_names_say_something():
    every = sources("pagedkv", "triton_kernels", "csrc", "scripts", "bench", "tests", ends=SOURCES)
    words = {path: {*path.relative_to(ROOT).parts[:-1], *path.stem.split("_")} for path in every}
    assert not [path for path, parts in words.items() if parts & NAMES_THAT_SAY_NOTHING]


def test_every_file_says_what_it_knows():
    for path in sources("pagedkv", "triton_kernels", "scripts", "bench", "tests"):
        head = ast.get_docstring(ast.parse(path.read_text()))
        assert head, f"{path.relative_to(ROOT)} has no head docstring"
        assert len(head.splitlines()) <= HEAD_LINES_MAX, path


def test_the_public_names_are_these():
    assert sorted(pagedkv.__all__) == sorted(PUBLIC_NAMES) == sorted(pagedkv._HOME)
    assert set(PUBLIC_NAMES) <= set(dir(pagedkv))
    with pytest.raises(AttributeError, match="the public names are"):
        pagedkv.no_such_name  # noqa: B018
    for name in PUBLIC_NAMES:
        assert getattr(pagedkv, name).__module__ == pagedkv._HOME[name]


def test_few_names_are_public():
    """A class or function at the top of a module is public unless its name begins with `_`; a reader meets them all."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    trees = [ast.parse(path.read_text()) for path in PACKAGE.values()]
    names = [node.name for tree in trees for node in tree.body if isinstance(node, kinds)]
    assert sum(not name.startswith("_") for name in names) <= PUBLIC_TOP_LEVEL_MAX


def test_the_public_names_of_the_engine_are_these():
    assert sorted(pagedkv.engine.__all__) == sorted(pagedkv.engine._HOME) == ENGINE_NAMES
    for name in ENGINE_NAMES:
        assert getattr(pagedkv.engine, name).__module__ == pagedkv.engine._HOME[name]
    with pytest.raises(AttributeError, match="its names are Completion, Engine"):
        pagedkv.engine.no_such_name  # noqa: B018


def test_environment_variables_are_documented_and_read_in_one_place():
    documented = set(re.findall(r"^\| (PAGEDKV_[A-Z_]+)", debug.__doc__ or "", re.M))
    read: dict[str, set[str]] = {}
    for module, path in PACKAGE.items():
        strings = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        read[module] = {text for text in strings if isinstance(text, str) and re.fullmatch(r"PAGEDKV_[A-Z_]+", text)}
    assert read.pop("pagedkv.debug") == documented
    assert not {module: names for module, names in read.items() if names}, "PAGEDKV_* is read in pagedkv/debug.py only"


@pytest.mark.parametrize(
    ("statement", "needed", "left_out"),
    [
        ("import pagedkv", "pagedkv", "numpy numba torch triton cupy typer rich"),
        ("from pagedkv.core import MemoryManager", "numpy", "torch triton cupy transformers"),
    ],
)
def test_an_import_loads_little(statement, needed, left_out):
    program = f"import sys; {statement}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    loaded = {name.split(".")[0] for name in run.stdout.split()}
    assert needed in loaded
    assert not loaded & set(left_out.split())
