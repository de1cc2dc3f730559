"""What notebooks show: HTML that is well formed, says what the text says, and escapes names."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest
import torch

import hydra_ensembles as hydra
from hydra_ensembles.uncertainty import choose_policy, predict_from_logits
from tests import zoo
from tests.fusion.test_fusion import EARLY, LATE


class Page(HTMLParser):
    """Reads HTML strictly: every tag is closed in its turn; keeps texts, rows and colours."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.rows: list[list[str]] = []
        self.styles: list[str] = []
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.open.append(tag)
        self.tags.add(tag)
        self.styles += [value for name, value in attributes if name == "style"]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def test_an_ensemble_shows_its_summary() -> None:
    ensemble = hydra.fuse(zoo.host("vit"), LATE)
    page = Page(ensemble._repr_html_())
    said = {row[0]: row[1] for row in page.rows if row[0]}
    assert said["trunk"] == "blocks 0-1, 3-4 of 4 heads, computed once"
    assert said["cost"] in str(ensemble) and "not fitted" in said["novelty"]
    assert len(page.rows) == len(str(ensemble).splitlines()) - 1
    ensemble.policy = choose_policy(torch.rand(50), torch.rand(50) < 0.1, risk=0.1, alarm=None)
    words = [row[1] for row in Page(ensemble._repr_html_()).rows]
    assert any(line.startswith("answer · ") and line.count(" · ") == 2 for line in words)


@pytest.mark.parametrize("novelty", [False, True])
def test_a_prediction_shows_its_examples(novelty: bool) -> None:
    ensemble = hydra.fuse(zoo.host("vit"), EARLY)
    if novelty:
        ensemble.fit_novelty_([zoo.batch("vit", size=40, seed=3)], progress=False)
    answer = ensemble.predict(zoo.batch("vit", size=23))
    head, *rows = Page(answer._repr_html_()).rows
    assert ("novelty" in head) is novelty and "uncertainty (msp)" in head
    assert len(rows) == 20 and "3 more" in answer._repr_html_()
    assert [row[1] for row in rows] == answer.labels[:20]
    if novelty:
        assert [row[-1] for row in rows] == [f"{v:.4g}" for v in answer.novelty[:20].tolist()]
    empty = Page(predict_from_logits(torch.zeros(0, 3, 5))._repr_html_())
    assert not empty.rows
    tokens = predict_from_logits(torch.zeros(2, 3, 7, 5))._repr_html_()
    assert "each of 7 tokens" in tokens and not Page(tokens).rows


def test_results_show_headlines_and_escape_names() -> None:
    ensemble = hydra.fuse(zoo.host("vit"), EARLY)
    batch = (zoo.batch("vit", size=30), torch.arange(30) % 5)
    plain, drawn = (
        hydra.evaluate(ensemble, [batch], bootstrap=n, progress=False, name="<script>bad</script>")
        for n in (0, 20)
    )
    page = Page(plain._repr_html_())
    assert "script" not in page.tags
    assert page.rows[0] == ["figure", "value"]
    assert ["cls/Acc ↑", f"{100 * plain['cls/Acc']:.2f}"] in page.rows
    assert [len(row) for row in Page(drawn._repr_html_()).rows] == [3] * len(page.rows)


def test_masks_and_scores_show_squares() -> None:
    mask = hydra.HeadMask([[1, 0, 1], [0, 1]])
    page = Page(mask._repr_html_())
    assert [(row[0], row[-1]) for row in page.rows] == [("0", "2/3"), ("1", "1/2")]
    assert all(len(row) == 5 for row in page.rows)  # number, three squares or blanks, note
    colours = [style.rpartition(":")[2] for style in page.styles if "background-color" in style]
    kept = "rgba(58, 95, 140, 1.0)"
    assert [colour == kept for colour in colours] == [True, False, True, False, True]
    scores = hydra.HeadScores([[1.0, 2.0], [3.0, -1.0]], name="<b>")
    page = Page(scores._repr_html_())
    assert "b" not in page.tags and page.rows[1][-1] == "-1 to 3"
