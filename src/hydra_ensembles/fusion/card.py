"""The model card of a saved ensemble: what it is, what it costs, what was measured."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ..evaluation.result_tables import compare_table
from ..evaluation.results import Results
from .summary import counted_cost

TASKS = {
    "ForImageClassification": "image-classification",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForAudioClassification": "audio-classification",
    "ForVideoClassification": "video-classification",
}
"""The hub's name for a host's task, by the suffix of the host's class name."""


def remember_results(ensemble: Any, results: Results | list[Results]) -> None:
    """Keep figures in the ensemble's record, for its card."""
    several = [results] if isinstance(results, Results) else list(results)
    ensemble.record["results"] = [json.loads(result.to_json()) for result in several]


def make_card(ensemble: Any, name: str = "this-folder") -> str:
    """Write the model card of an ensemble that is called `name` on the hub."""
    host = type(ensemble.host).__name__
    parts = [
        _head(ensemble),
        f"# A Hydra ensemble of {host}",
        f"One model that is an ensemble of {ensemble.members} members with different attention "
        "heads, in one forward pass. With every answer it says how sure it is"
        + (" and how new the input is." if ensemble.novelty is not None else "."),
        _usage(ensemble, name),
        *_cost(ensemble),
        *_figures(ensemble.record.get("results", [])),
        *_classes(ensemble.id2label),
        f"## What was built\n\n```\n{ensemble}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _head(ensemble: Any) -> str:
    """Return the hub's metadata: plain words, quoted where they come from a config."""
    lines = ["library_name: hydra-ensembles", "tags: [uncertainty, ensemble, pruning]"]
    host = type(ensemble.host).__name__
    task = next((tag for end, tag in TASKS.items() if host.endswith(end)), None)
    if task is not None:
        lines.insert(1, f"pipeline_tag: {task}")
    base = ensemble.name_or_path
    # a local path is not a model of the hub
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+", base) and not Path(base).exists():
        lines.insert(1, f'base_model: "{base}"')
    return "\n".join(["---", *lines, "---"])


def _usage(ensemble: Any, name: str) -> str:
    says = "# .label .probabilities .uncertainty .novelty .member_logits"
    if ensemble.novelty is None:
        says = says.replace(" .novelty", "")
    return f"""## Use

```python
import hydra_ensembles as hydra

ensemble = hydra.HydraEnsemble.from_pretrained("{name}")
answer = ensemble.predict(batch)  {says}
```"""


def _cost(ensemble: Any) -> list[str]:
    counted = counted_cost(ensemble)
    if counted is None:
        return []
    ratio, shape = counted
    return [
        "## Cost",
        f"| | of the plain host |\n|---|---:|\n"
        f"| multiply-adds, counted ({shape}) | {ratio.multiply_adds:.2f} x |\n"
        f"| size on disk | {ratio.bytes_on_disk:.2f} x |",
    ]


def _figures(saved: list[dict[str, Any]]) -> list[str]:
    if not saved:
        return ["## Results", "None were given: `ensemble.save_pretrained(folder, results=...)`."]
    results = [Results.from_json(json.dumps(record)) for record in saved]
    sizes = results[0].settings.get("examples", {})
    sets = ", ".join(f"{name} ({size:,})" for name, size in sizes.items())
    table = compare_table(results, rows="figures")
    words = "Rates are in percent; arrows point to the better side."
    return ["## Results", table, f"{words} Examples: {sets}." if sets else words]


def _classes(names: dict[int, str] | None) -> list[str]:
    if not names:
        return []
    plain = [" ".join(name.replace("`", "").split()) for name in list(names.values())[:20]]
    shown = ", ".join(f"`{name}`" for name in plain)
    more = f" and {len(names) - 20:,} more" if len(names) > 20 else ""
    return [f"## Classes\n\n{shown}{more}"]
