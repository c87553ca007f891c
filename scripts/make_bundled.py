"""Write the bundled checkpoint and its draft model to pagedkv/engine/checkpoint/bundled: the same bytes every time.

    python scripts/make_bundled.py               write its files
    python scripts/make_bundled.py --check       compare with the files there; exit status 1 if a byte differs

bundled/circuit.py defines the weights, bundled/codes.py the codes of the words, bundled/folder.py the file formats, and
tests/records.py the language. README.md and circuit.svg in pagedkv/engine/checkpoint/bundled are written by hand.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "pagedkv" / "engine" / "checkpoint" / "bundled"


def main() -> int:
    """Run the action that the command line names. Returns: the exit status"""
    sys.path.append(str(ROOT))  # for tests.records
    from bundled.circuit import DRAFT
    from bundled.folder import files

    parser = argparse.ArgumentParser(description="Write the bundled checkpoint: the same bytes every time.")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder to write to or compare with")
    parser.add_argument(
        "--check", action="store_true", help="compare with the files there instead; exit status 1 if a byte differs"
    )
    options = parser.parse_args()
    contents = {**files(), **{f"draft/{name}": data for name, data in files(DRAFT).items()}}
    if options.check:
        paths = {options.out / name: data for name, data in contents.items()}
        differing = [path for path, data in paths.items() if not path.is_file() or path.read_bytes() != data]
        print(
            "\n".join(f"{path} differs" for path in differing)
            or f"{options.out}: all {len(contents)} files are the same"
        )
        return 1 if differing else 0
    (options.out / "draft").mkdir(parents=True, exist_ok=True)
    for name, data in contents.items():
        fresh = options.out / (name + ".new")  # a process may have the old file mapped
        fresh.write_bytes(data)
        fresh.replace(options.out / name)
    print(f"{options.out}: {', '.join(contents)}; {sum(map(len, contents.values())) / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
