"""Write the bundled checkpoint to pagedkv/model/bundled; the same bytes every time.

    python scripts/make_bundled.py               write its files
    python scripts/make_bundled.py --check       compare with what is there; exit status 1 if a byte differs
    python scripts/make_bundled.py --evaluate    ask it about held-out documents, through transformers

What the weights are is in bundled/circuit.py, the words' codes in bundled/codes.py, the file formats in bundled/folder.py, and the language
in pagedkv/model/records.py. README.md in that folder is written by hand.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bundled.folder import files
from bundled.picture import picture

FOLDER = Path(__file__).resolve().parents[1] / "pagedkv" / "model" / "bundled"


def main() -> int:
    """Do what the command line asks; the exit status."""
    parser = argparse.ArgumentParser(description="Write the bundled checkpoint; the same bytes every time.")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder to write to, compare with or evaluate")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--check", action="store_true", help="compare with what is there instead; exit status 1 if a byte differs"
    )
    what.add_argument(
        "--evaluate", action="store_true", help="ask it about held-out documents; needs torch and transformers"
    )
    options = parser.parse_args()
    if options.evaluate:
        from bundled.evaluate import evaluate

        return evaluate(options.out)
    made = {**files(), "circuit.svg": picture().encode()}
    if options.check:
        differing = [
            name
            for name, data in made.items()
            if not (options.out / name).is_file() or (options.out / name).read_bytes() != data
        ]
        print(
            "\n".join(f"{options.out / name} differs" for name in differing)
            or f"{options.out}: all {len(made)} files as made"
        )
        return 1 if differing else 0
    options.out.mkdir(parents=True, exist_ok=True)
    for name, data in made.items():
        fresh = options.out / (name + ".new")  # a process may have the old file mapped
        fresh.write_bytes(data)
        fresh.replace(options.out / name)
    print(f"{options.out}: {', '.join(made)}; {sum(map(len, made.values())) / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
