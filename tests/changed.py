"""Print the test files of what was edited since a commit; `make changed` runs them.

A test belongs to an edited module if it imports the module, or a module of the same wing that imports it, over however
many steps. A module that no test imports has all tests of its wing. Sources that are not modules have the tests in
OTHERS.

    python -m tests.changed HEAD~3
"""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache

import pagedkv
from tests.test_architecture import PACKAGE, ROOT, import_graph, imports_of, layer_of, sources

TESTS = ROOT / "tests"
ALWAYS = ("tests/test_architecture.py", "tests/test_plain_words.py")
OTHERS = {
    "csrc/cpu/": ("tests/kernels", "tests/engine/model"),
    "csrc/cuda/": ("tests/kernels/cuda",),
    "csrc/simt/": ("tests/kernels/cuda",),
    "triton_kernels/tuning.json": ("tests/kernels/triton",),
    "pagedkv/engine/checkpoint/bundled/": ("tests/bundled", "tests/engine"),
    "scripts/": ("tests/bench", "tests/bundled", "tests/test_packaging.py"),
    "Makefile": ("tests/test_packaging.py",),
    "mkdocs.yml": ("tests/test_docs.py",),
    "bench/": ("tests/bench", "tests/cli/bench"),
    "docs/": ("tests/test_docs.py", "tests/manual"),
    "README.md": ("tests/test_docs.py", "tests/manual"),
    "examples/": ("tests/test_examples.py",),
    "setup.py": ("tests/test_packaging.py",),
    "pyproject.toml": ("tests/test_packaging.py",),
}


def edited(since: str) -> list[str]:
    """Return the files that differ from the commit `since`, and those that git does not know yet."""
    commands = (["git", "diff", "--name-only", since, "--"], ["git", "ls-files", "--others", "--exclude-standard"])
    found = [subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True) for command in commands]
    return sorted({line for run in found for line in run.stdout.splitlines()})


def reaching(module: str, graph: dict[str, set[str]]) -> set[str]:
    """Return the module and all that import it in `graph`, over however many steps."""
    found, new = set(), {module}
    while new:
        found |= new
        new = {name for name, targets in graph.items() if targets & new} - found
    return found


def dependents(module: str) -> set[str]:
    """Return the module and the modules of its wing that import it, over however many steps."""
    wing = {name: targets for name, targets in import_graph().items() if layer_of(name) == layer_of(module)}
    return reaching(module, wing)


def dotted(file: str) -> str:
    return file.removesuffix(".py").replace("/", ".")


@cache
def imports_of_tests() -> dict[str, set[str]]:
    """Return file of tests → modules that it imports; its whole folder counts as importing a conftest.py."""
    found = {}
    for path in sources("tests"):
        source, name = path.read_text(), dotted(str(path.relative_to(ROOT)))
        modules = {module.removeprefix("public:") for module in imports_of(name, source)}
        helpers = re.findall(r"^from (tests[\w.]*) import ([\w ]+)", source, re.MULTILINE)
        modules |= {f"{folder}.{helper.split()[0]}" for folder, helper in helpers}
        used = {home for public, home in pagedkv._HOME.items() if f"pagedkv.{public}" in source}
        above = {
            dotted(str(folder.relative_to(ROOT) / "conftest.py"))
            for folder in path.parents
            if folder.is_relative_to(TESTS)
        }
        found[name] = modules | used | above - {name}
    return found


def select(files: list[str]) -> set[str]:
    """Return the test files and folders of tests that belong to `files`."""
    modules, found = {str(path.relative_to(ROOT)): name for name, path in PACKAGE.items()}, set()
    for file in files:
        module = modules.get(file, dotted(file))
        if file in modules or file.startswith("tests/"):
            reached = set().union(*(reaching(name, imports_of_tests()) for name in dependents(module)))
            tests = {f"{name.replace('.', '/')}.py" for name in reached if name.startswith("tests.")}
            found |= tests or {f"tests/{layer_of(module)}"}
        elif file.startswith("pagedkv/") and file.endswith(".py"):  # a module that was removed
            found.add(f"tests/{layer_of(module)}")
        else:
            found.update(*(tests for prefix, tests in OTHERS.items() if file.startswith(prefix)))
    there = {test: ROOT / test for test in found if (ROOT / test).exists()}
    return {test for test, path in there.items() if path.is_dir() or path.name.startswith("test_")}


if __name__ == "__main__":
    since = sys.argv[1] if len(sys.argv) > 1 else "HEAD"
    print(*sorted({*select(edited(since)), *ALWAYS}), sep="\n")
