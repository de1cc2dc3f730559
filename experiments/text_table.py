"""The text table: MiniLM on SST-2, its rivals, and Hydra with and without trained branches.

    python experiments/finetune_sst2.py --data DATA --out HOSTS
    python experiments/select_members.py text --data DATA --cache CACHE --model HOSTS/seed0
    python experiments/text_table.py --data DATA --cache CACHE --hosts HOSTS

Members of searched rows are those that `select_members.py` chose on each draw of validation data.
Writes results/table_text.json; what is done is kept in CACHE, so that a stopped run goes on.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, ClassVar

import real_data
import table_runs as runs
import torch
from real_data import TextSet
from torch import Tensor, nn
from transformers import AutoTokenizer, BertForSequenceClassification

from hydra_ensembles.data.proxies import make_proxies


class TextTable(runs.Table):
    """MiniLM on SST-2."""

    name = "text"
    title = "Text: MiniLM-L6 on SST-2"
    command = "python experiments/text_table.py --data DATA --cache CACHE --hosts HOSTS"
    paper: ClassVar[dict[str, dict[str, float]]] = {
        "Hydra (Circ), BERT, SST-2": {"AUROC": 77.60, "FPR95": 55.06},
        "Deep Ensembles, BERT, SST-2": {"AUROC": 74.81, "FPR95": 62.69},
    }
    seen = ("trec-test",)
    unseen = ("ag-news", "multi30k", "movie-reviews")
    trained_parameters = r"layer\.5\.|pooler|classifier"
    training: ClassVar[dict[str, Any]] = {"epochs": 1, "learning_rate": 1e-4, "distill": 0.5}
    plan: ClassVar[dict[str, runs.Branch]] = {
        "Hydra select M=3, trained": runs.Branch("select M=3"),
        "Hydra select M=6, trained": runs.Branch("select M=6"),
        "Hydra select M=3, trained with outliers": runs.Branch("select M=3", outliers=True),
        "single, trained with outliers": runs.Branch("host", outliers=True),
    }
    branched = (5,)
    branch_layers = (5, 4, 3, 2)

    def __init__(self, args: argparse.Namespace) -> None:
        self.data, self.hosts = args.data, args.hosts
        self.tokenizer = AutoTokenizer.from_pretrained(args.hosts / "seed0")
        super().__init__(args.cache, trained=args.trained)

    def load(self, seed: int) -> nn.Module:
        """Load a fine-tuned host."""
        return BertForSequenceClassification.from_pretrained(self.hosts / f"seed{seed}").eval()

    def batches(self, texts: TextSet, size: int = 50) -> list[Any]:
        """Tokenize."""
        return list(texts.batches(self.tokenizer, batch_size=size))

    def read_data(self) -> dict[str, Tensor]:
        """Read the test sets, and one sentence of median length."""
        self.texts = real_data.sst2_sets(self.data, count=300, reviews=300)
        names = ["calibration", "test", *self.seen, *self.unseen]
        self.sets = {name: runs.labelled(self.batches(self.texts[name])) for name in names}
        test = self.texts["test"]
        self.one = self.batches(test.subset([len(test) // 2]))[0]
        return {
            name: torch.tensor(texts.labels)
            for name, texts in self.texts.items()
            if texts.labels is not None
        }

    def training_set(self) -> list[Any]:
        """Return the reserve sentences and their phrases, which the hosts have not seen."""
        reserve = [real_data.sst2(self.data, part) for part in ("reserve", "reserve_phrases")]
        own = TextSet(
            [text for part in reserve for text in part.texts],
            [label for part in reserve for label in part.labels or []],
        )
        return self.batches(own.by_length(), 32)

    def outliers(self) -> list[Any]:
        """Return questions of TREC.train and proxies, what the search saw too."""
        validation = self.texts["validation"].batches(self.tokenizer)
        kinds = ["shuffle_words", "token_noise", "foreign", "halves"]
        made = make_proxies(validation, kinds, tokenizer=self.tokenizer)
        proxies = [batch for proxy in made.values() for batch in proxy]
        return self.batches(self.texts["trec-train"]) + proxies

    def rival_data(self, count: int) -> list[Any]:
        """Return sentences that the hosts were trained on."""
        return self.batches(real_data.sst2(self.data, "train").sample(count).by_length(), 32)

    def setup(self) -> list[str]:
        """Say how the table was made, of what is in it."""
        lines = [
            "Host: MiniLM-L6 (6 blocks of 12 heads), two epochs on 6,920 rows of SST-2's train "
            "file; `single` is seed 0, Deep Ensembles are the seeds 0, 1 and 2.",
            "Test: dev (872 sentences). OOD: TREC.test (seen family, as TREC.train is OOD "
            "validation), AG News, Multi30k, movie reviews (a near shift), 300 texts each, cut at "
            "64 tokens.",
            "Search: `select_members.py text`, six draws of 80 % of 1,500 sentences that no host "
            "has seen, 500 questions of TREC.train and four proxies; 320 masks of the last block. "
            "`circavg-single` is the third circuit alone, `taylor-single` the first Taylor mask.",
            "Temperatures: fitted for each row on the 500 calibration sentences; searches saw 80 % "
            "of them, to choose among masks, and nothing was trained on them.",
            f"Trained branches: last block, {self.draws} draws, {self.training['epochs']} epoch at "
            f"{self.training['learning_rate']}, 3,190 reserve sentences and phrases that no host "
            "has seen, a bootstrap a member; half of each label is the untrained ensemble's own "
            "prediction at its temperature. With outliers: TREC.train and proxies; weight chosen "
            f"on the calibration sentences: {self.weights.get('seed 0')}. `single, trained with "
            "outliers` is the unpruned model with the same training.",
            "Rivals were trained in a shrunken setting: one epoch on 500 training sentences from "
            "seed 0, three members (Laplace: 1,500 sentences). They might do better with more.",
            "Cost: counted on a sentence of median length. The single model with the readout-only "
            "last block alone would cost 0.866.",
        ]
        leave = [] if any("trained" in name for name in self.rows) else ["Trained branches"]
        leave += [] if any(name in self.rows for name in self.rivals) else ["Rivals were"]
        return [line for line in lines if not line.startswith(tuple(leave))]


def main() -> None:
    """Run what is missing and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("HYDRA_DATA"))
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--hosts", type=Path, required=True)
    parser.add_argument("--trained", type=int, default=5, help="draws of trained rows")
    parser.add_argument("--groups", nargs="+", default=TextTable.groups, choices=TextTable.groups)
    args = parser.parse_args()
    args.data = real_data.data_root(args.data)
    torch.set_num_threads(1)
    TextTable(args).run(args.groups)


if __name__ == "__main__":
    main()
