"""Print the test files of what was edited since a commit; `make changed` runs them.

A test belongs to an edited module if it imports the module, or a module of the same wing that imports it, over however
many steps. A module that no test imports has all tests of its wing. Sources that are not modules have the tests in
OTHERS.

    python -m tests.changed HEAD~3
"""

from __future__ import annotations

import subprocess
import sys

import pagedkv
from tests.test_architecture import PACKAGE, ROOT, import_graph, imports_of, layer_of, sources

ALWAYS = ("tests/test_architecture.py", "tests/test_plain_words.py")
OTHERS = {
    "csrc/cpu/": ("tests/kernels", "tests/engine/model"),
    "csrc/cuda/": ("tests/kernels/cuda",),
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
    found = [subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True) for command in commands]
    return sorted({line for run in found for line in run.stdout.splitlines()})


def dependents(module: str) -> set[str]:
    """Return the module and the modules of its wing that import it, over however many steps."""
    wing = {name: targets for name, targets in import_graph().items() if layer_of(name) == layer_of(module)}
    found, new = set(), {module}
    while new:
        found |= new
        new = {name for name, targets in wing.items() if targets & new} - found
    return found


def imported_by_tests() -> dict[str, set[str]]:
    """Return test file → modules that it imports; a public name counts as the module that defines it."""
    found = {}
    for path in sources("tests"):
        source, name = path.read_text(), str(path.relative_to(ROOT))
        modules = imports_of(name.removesuffix(".py").replace("/", "."), source)
        used = {home for public, home in pagedkv._HOME.items() if f"pagedkv.{public}" in source}
        found[name] = used | {module.removeprefix("public:") for module in modules}
    return found


def select(files: list[str]) -> set[str]:
    """Return the test files and folders of tests that belong to `files`."""
    by_tests, modules = imported_by_tests(), {str(path.relative_to(ROOT)): name for name, path in PACKAGE.items()}
    found: set[str] = set()
    for file in files:
        if file.startswith("tests/"):
            helper = file.removesuffix(".py").replace("/", ".")
            importers = {test for test, names in by_tests.items() if helper in names}
            found |= {file.rpartition("/")[0]} if file.endswith("conftest.py") else importers | {file}
        elif module := modules.get(file):
            wanted = dependents(module)
            found |= {test for test, names in by_tests.items() if names & wanted} or {f"tests/{layer_of(module)}"}
        else:
            found.update(*(tests for prefix, tests in OTHERS.items() if file.startswith(prefix)))
    return {test for test in found if (ROOT / test).is_dir() or (ROOT / test).name.startswith("test_")}


if __name__ == "__main__":
    since = sys.argv[1] if len(sys.argv) > 1 else "HEAD"
    print(*sorted({*select(edited(since)), *ALWAYS}), sep="\n")
