"""Options that commands share, so that they are called and explained alike everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

MODEL_HELP = (
    "A hub name, a folder (of a host or of a saved ensemble), or a timm name, as timm:NAME "
    "(timm:NAME@FILE for your own weights: .safetensors, or tensors in .pth, .pth.tar, .bin)."
)
DATA_HELP = (
    "An image folder (one subfolder per class), a CSV/TSV/JSONL/TXT file of texts, or the name of "
    "a Hugging Face dataset (name:config)."
)

Model = Annotated[str, typer.Argument(help=MODEL_HELP, show_default=False)]
Data = Annotated[str, typer.Option("--data", help=DATA_HELP, show_default=False)]
Ood = Annotated[
    list[str] | None,
    typer.Option("--ood", help="Out-of-distribution data, as NAME=DATA or DATA; repeatable."),
]
Split = Annotated[str | None, typer.Option(help="Split of a Hugging Face dataset.")]
TextColumn = Annotated[str | None, typer.Option(help="Column of the texts.")]
PairColumn = Annotated[
    str | None, typer.Option(help="Column of the second texts; usual pairs are found by name.")
]
LabelColumn = Annotated[str | None, typer.Option(help="Column of the labels.")]
Labels = Annotated[
    Path | None, typer.Option(help="Table with a label for each file of a flat image folder.")
]
ClassNames = Annotated[
    str | None,
    typer.Option(
        help="Names in the order of the model's classes: a file with one per line, or a,b,c. "
        "Makes a dual encoder (CLIP) a zero-shot classifier."
    ),
]
Limit = Annotated[
    int | None, typer.Option(min=1, help="Use at most this many examples per set, stratified.")
]
BatchSize = Annotated[int, typer.Option(min=1, help="Examples per batch.")]
SkipBroken = Annotated[
    bool, typer.Option("--skip-broken", help="Skip broken images with a warning.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps ...")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")]
Seed = Annotated[int, typer.Option(help="Random seed.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="Folder to write to.")]
Names = Annotated[
    bool,
    typer.Option(
        "--names/--no-names",
        help="Save file names, or the first 100 characters, of up to 512 known examples, which "
        "explain novelty.",
    ),
]
Config = Annotated[
    Path | None,
    typer.Option("--config", help="YAML file of options; the command line overrides it."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Criteria = Annotated[
    list[str],
    typer.Option(
        "--criterion",
        help="random, magnitude, taylor, his, entropy, hies or fisher; repeatable.",
    ),
]
Scope = Annotated[str, typer.Option(help="Rank heads within each 'layer' or over the 'model'.")]
Members = Annotated[int, typer.Option(min=1, help="Number of members.")]
MembersOrDefault = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Number of members; by default 3, for parts 5, and auto may choose one.",
        show_default=False,
    ),
]
MaxCost = Annotated[
    float, typer.Option(help="Bound on multiply-adds relative to the model; 0 for none.")
]
Risk = Annotated[
    float,
    typer.Option(help="Largest share of wrong answers, for example 0.02; 0 turns this check off."),
]
Alarm = Annotated[
    float, typer.Option(help="False-alarm rate: share of known data called new; 0 turns it off.")
]
Guarantee = Annotated[
    str,
    typer.Option(
        help="What --risk bounds: 'conformal' (answered and wrong among all, on average), "
        "'selective' (wrong among the answered, with probability 1 - delta) or 'empirical' "
        "(no guarantee)."
    ),
]
Delta = Annotated[
    float, typer.Option(help="Probability that the guarantee of 'selective' may fail.")
]
Models = Annotated[
    list[str], typer.Argument(help="One or more, as MODEL or NAME=MODEL. " + MODEL_HELP)
]
