"""The page: complete, escaped, self-contained, and alive in a real browser."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import subprocess
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hydra_ensembles import Results
from hydra_ensembles.cli.report_data import first_untaken
from hydra_ensembles.errors import DataError, FormatError
from hydra_ensembles.evaluation import compare
from hydra_ensembles.evaluation.intervals import winners
from hydra_ensembles.report.curves import answered_at
from hydra_ensembles.report.examples import Example, image_address
from hydra_ensembles.report.page import write_report
from hydra_ensembles.report.rounding import percent
from hydra_ensembles.report.set_figures import sets

from .made import MASKS, results_of, some_examples, three_results

COSTS = {"hydra": 1.05, "single": 1.0, "deep ensemble": 3.0}
CHROMIUM = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    ),
    None,
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a page with everything on it."""
    return write_report(
        tmp_path_factory.mktemp("page") / "report.html",
        three_results(),
        title="A <title> & more",
        lead="hydra beats single.",
        summary="HydraEnsemble of <Host>, 3 members",
        masks=MASKS,
        branch=1,
        costs=COSTS,
        examples=some_examples(),
        settings={"seed": 0, "where": "</script><script>alert(1)</script>"},
        command="hydra-ensembles eval a b",
        made="today",
    )


class Structure(HTMLParser):
    """Collect tags, and check that they are closed in order."""

    void = frozenset({"meta", "link", "img", "input", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for key, value in attrs if key == "id" and value]
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for key, value in attrs if key == "id" and value]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def structure(page: Path) -> Structure:
    parser = Structure()
    parser.feed(page.read_text())
    parser.close()
    assert parser.open == []
    return parser


def test_it_is_well_formed_and_has_every_section(page: Path) -> None:
    found = structure(page)
    assert len(found.ids) == len(set(found.ids))
    wanted = {"built", "figures", "cost", "calibration", "detection", "abstention", "examples"}
    assert wanted | {"reproduce", "data", "coverage", "risk-chart", "cursor"} <= set(found.ids)
    text = page.read_text()
    for piece in ("98.33", "1.05 ×", "ROC of the out-of-distribution set near", "eval a b"):
        assert piece in text


def test_it_loads_nothing_and_runs_no_foreign_script(page: Path) -> None:
    found = structure(page)
    for tag, attributes in found.tags:
        for key in ("src", "href", "action", "data"):
            address = attributes.get(key)
            assert address is None or address.startswith(("#", "data:")), (tag, address)
    assert sum(tag == "script" for tag, _ in found.tags) == 2
    assert not re.search(r"https?://|@import|url\(", page.read_text())
    assert "default-src 'none'" in page.read_text()


def test_pictures_tell_what_they_show(page: Path) -> None:
    found = structure(page)
    for tag, attributes in found.tags:
        if tag == "img":
            assert attributes["alt"]
        if tag == "svg":
            assert attributes.get("aria-label") or attributes.get("aria-hidden") == "true"
        if tag == "th":
            assert attributes["scope"] in ("col", "row")
    assert found.tags[0] == ("html", {"lang": "en"})


def test_colours_contrast_with_both_papers() -> None:
    style = (Path(write_report.__code__.co_filename).parent / "templates" / "page.css").read_text()
    schemes = re.findall(r":root \{([^}]*)\}", style)[:2]
    for scheme in schemes:
        colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", scheme))
        for name, least in {"ink": 7, "soft": 4.5, "link": 4.5, "bad": 4.5, "good": 4.5}.items():
            assert contrast(colours[name], colours["paper"]) >= least
            assert contrast(colours[name], colours["card"]) >= 4.5
        for series in range(8):
            assert contrast(colours[f"s{series}"], colours["paper"]) >= 3


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of WCAG 2."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_alarms_per_set_and_the_newest_examples(tmp_path: Path) -> None:
    results = three_results()
    without = write_report(tmp_path / "without.html", results).read_text(encoding="utf-8")
    assert "Like anything known?" not in without
    for number, columns in enumerate(results[0].examples.values()):
        count = len(next(iter(columns.values())))
        columns["score:novelty"] = torch.arange(count) / 10 + 1000 * number
        columns["alarm"] = torch.arange(count) % 4 == 0
    text = write_report(tmp_path / "with.html", results).read_text(encoding="utf-8")
    assert "Like anything known?" in text and "<td>25.0\u00a0%</td>" in text
    assert '<th scope="row">near</th>' in text and "ood/near" not in text.split("<script")[0]
    newest = text.split("newest test examples")[1].split("(hydra):")[1].strip()
    assert newest.startswith("239 (23.9), 238 (23.8)")
    assert text.count("hydra, novelty") == 3  # in the legend and below both pictures


def test_a_confidence_is_never_rounded_up_to_certainty(tmp_path: Path) -> None:
    shown = Example("surest", "3", 0.99996, 0.00004, label="5", source="test 1")
    text = write_report(tmp_path / "sure.html", three_results(), examples=[shown]).read_text()
    assert "says 3 (99.9\u00a0%)" in text and "label 5 <span" in text


def test_shares_are_rounded_in_one_way() -> None:
    shares = (None, 0.0, 0.0002, 0.0494, 0.99996, 1.0)
    assert [percent(share).replace("\u00a0", " ") for share in shares] == [
        *("–", "0.0 %", "0.1 %", "4.9 %", "99.9 %", "100.0 %")
    ]


def test_names_of_files_may_be_broken_behind_their_separators(tmp_path: Path) -> None:
    shown = Example("surest", "3", 0.9, 0.1, source="n01/ILSVRC2012_val_01.jpg")
    text = write_report(tmp_path / "x.html", three_results(), examples=[shown]).read_text()
    assert "n01/<wbr>ILSVRC2012_<wbr>val_<wbr>01.jpg" in text


def test_an_example_is_shown_once() -> None:
    taken: set[int] = set()
    assert first_untaken([4, 2, 7], 2, taken) == [4, 2]
    assert first_untaken([2, 4, 7, 1], 2, taken) == [7, 1]


def test_rows_say_what_they_mean(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "What the rows mean" in text and "<dt>NLL</dt>" in text
    assert text.index('id="figures"') < text.index('id="built"')


def test_figures_alone_are_enough(tmp_path: Path) -> None:
    bare = Results(name="bare", figures={"cls/Acc": 0.9, "cls/NLL": 0.3})
    text = write_report(tmp_path / "bare.html", [bare]).read_text()
    assert 'id="figures"' in text and 'id="calibration"' not in text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bare.html"]


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    bare = Results(name="bare", figures={"cls/Acc": 0.9})
    with pytest.raises(DataError, match="no results"):
        write_report(tmp_path / "x.html", [])
    with pytest.raises(DataError, match="same name"):
        write_report(tmp_path / "x.html", [bare, bare])
    with pytest.raises(FormatError, match="data:image"):
        Example.from_dict({**some_examples()[0].to_dict(), "image": "http://x/y.png"})
    with pytest.raises(FormatError, match="Not an example"):
        Example.from_dict({"a": 1})


def test_a_picture_survives_its_encoding() -> None:
    pixels = torch.arange(2 * 3 * 3).view(3, 2, 3) / 25
    address = image_address(pixels, mean=None)
    content = np.array(Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2]))))
    assert (content == (pixels * 255).round().permute(1, 2, 0).numpy()).all()
    large = image_address(torch.zeros(1, 400, 200))
    with Image.open(io.BytesIO(base64.b64decode(large.partition(",")[2]))) as image:
        assert image.size == (80, 160) and image.mode == "L"
    with pytest.raises(DataError, match="expected 1 or 3"):
        image_address(torch.zeros(2, 4, 4), mean=None)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_it_works_in_a_browser(page: Path, tmp_path: Path) -> None:
    """Load it with every request forbidden, use its controls, and read what changed."""
    driver = """
<script>
window.addEventListener("error", (e) => { document.title = "ERROR " + e.message; });
document.addEventListener("securitypolicyviolation", (e) => {
  document.title = "ERROR " + e.blockedURI;
});
</script>"""
    actions = """
<script>
const set = (id, value, kind) => {
  const item = document.getElementById(id); item.value = value;
  item.dispatchEvent(new Event(kind, {bubbles: true}));
};
const read = (id) => document.getElementById(id).textContent;
const seen = {start: read("out-coverage"), startRisk: read("out-risk")};
set("coverage", "50", "input");
seen.half = read("out-coverage");
set("coverage", "100", "input"); seen.full = read("out-risk");
set("coverage-model", "single", "change"); seen.single = read("out-risk");
seen.ood = document.querySelector("[data-ood]").textContent;
const all = (what) => [...document.querySelectorAll(what)];
const panels = () => all(".ood-panel").filter((p) => p.offsetHeight > 0).length;
seen.panels = panels(); set("ood-set", "near", "change"); seen.one = panels();
const box = document.querySelector("input[data-toggle='1']"); box.click();
const lines = all("svg [data-series='1']");
seen.hidden = lines.length > 3 && lines.every((l) => getComputedStyle(l).display === "none");
seen.wide = document.documentElement.scrollWidth <= window.innerWidth;
const loaded = performance.getEntriesByType("resource");
seen.requests = loaded.filter((r) => !r.name.startsWith("data:")).length;
seen.title = document.title;
const out = document.createElement("pre"); out.id = "seen"; out.textContent = JSON.stringify(seen);
document.body.append(out);
</script>"""
    text = (
        page.read_text()
        .replace("<title>", driver + "<title>")
        .replace("</body>", actions + "</body>")
    )
    tried = tmp_path / "tried.html"
    tried.write_text(text)
    assert CHROMIUM is not None
    result = subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
            *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
            *(
                "--disable-sync",
                f"--user-data-dir={tmp_path / 'profile'}",
                "--window-size=900,1000",
            ),
            *("--virtual-time-budget=4000", "--dump-dom", tried.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    found = re.search(r'<pre id="seen">(.*?)</pre>', result.stdout)
    assert found is not None, result.stdout[-500:]
    seen = json.loads(unescape(found.group(1)))
    assert seen["title"] == "A <title> & more" and seen["requests"] == 0
    assert seen["start"] == "90.0\u00a0%" and seen["half"] == "50.0\u00a0%"
    hydra, single, _ = (answered_at(result) for result in three_results())
    assert seen["full"] == f"{100 * hydra['risk'][-1]:.1f}\u00a0%"
    assert seen["single"] == f"{100 * single['risk'][-1]:.1f}\u00a0%" != seen["full"]
    assert seen["ood"] == f"{100 * single['ood/near'][-1]:.1f}\u00a0%"
    assert seen["panels"] == 2 and seen["one"] == 1 and seen["hidden"] and seen["wide"]


def test_stars_and_verdicts_are_those_of_paired_intervals(tmp_path: Path) -> None:
    hydra, single, deep = three_results()
    text = write_report(tmp_path / "all.html", [hydra, single, deep]).read_text(encoding="utf-8")
    section = text.split('id="figures"')[1].split("</section>")[0]
    for other in (single, deep):
        words = section.split(f"<li>hydra against {other.name}: ")[1].split("</li>")[0]
        found = compare(hydra, other, count=100)
        for key, name in (("cls/Acc", "accuracy"), ("cls/NLL", "NLL"), ("sc/AURC", "AURC")):
            place = words.index(found[key].verdict)
            assert name in words[:place]
    body = section.split("<tbody>")[1].split("</tbody>")[0]
    rows = {row.split('title="')[1].split('"')[0]: row for row in body.split("<tr>")[1:]}
    ahead = winners([hydra, single, deep])
    assert ahead and all(("★" in row) == (key in ahead) for key, row in rows.items())
    # without draws nothing is called better
    bare = [results_of(name, noise=noise) for name, noise in (("a", 0.1), ("b", 0.6))]
    assert all(result.intervals == {} for result in bare)
    text = write_report(tmp_path / "bare.html", bare).read_text(encoding="utf-8")
    assert "★" not in text and "a against b" not in text


def test_sets_are_told_by_size_novelty_and_class(tmp_path: Path) -> None:
    results = results_of("hydra", noise=0.3)
    columns = results.examples["id"]
    generator = torch.Generator().manual_seed(0)
    columns["set_size"] = torch.randint(1, 4, (240,), generator=generator).double()
    columns["covered"] = columns["correct"] | (columns["set_size"] > 2)
    columns["novelty"] = torch.rand(240, generator=generator)
    figures = {"set/Coverage": float(columns["covered"].double().mean()), "set/Size": 2.0}
    results.figures.update(figures)
    about = {"asked": 0.9, "method": "lac", "by": "class", "classes": list("abcd")}
    results.settings["sets"] = about
    section = sets([results], ["hydra"])
    assert section is not None
    (model,) = section.content["models"]
    worst = model["tables"]["class"]
    assert [row["count"] for row in worst] == [60] * 4 and {r["name"] for r in worst} == {*"abcd"}
    shares = [float(row["covered"].split("\u00a0")[0]) for row in worst]
    label = "abcd".index(worst[0]["name"])
    expected = columns["covered"][columns["label"] == label].double().mean()
    assert shares == sorted(shares) and shares[0] == pytest.approx(100 * float(expected), abs=0.06)
    assert sum(row["count"] for row in model["tables"]["novelty"]) == 240
    page = write_report(tmp_path / "report.html", [results])
    structure(page)
    text = unescape(page.read_text())
    assert "90.0\u00a0% asked for, each class is covered as often" in text
    assert sets([results_of("without", noise=0.3)], ["without"]) is None
