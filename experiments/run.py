"""Make a table: run the rows of `tables/NAME.yaml`, evaluate them, write its records and its page.

    python experiments/run.py text --data DATA --hosts HOSTS --cache CACHE
    python experiments/run.py text --rows "Hydra distilled" --draws 0 1   # a part of it
    python experiments/run.py text --page                                 # page and picture only
    python experiments/run.py finetune sst2 --seeds 0 1 2                 # hosts: recipes.yaml

Answers of every row, draw and set are kept in CACHE: a stopped run goes on, and figures are made
anew without running a model. Rows that are not run keep their lines in docs/results/NAME.csv.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lab.least_squares
import lab.paper_form  # noqa: F401  (both register their methods)
import yaml
from lab import plainly
from lab.answers import Store, evaluate_answers
from lab.methods import answer, draws_of, prepare_masks
from lab.page import write_page
from lab.records import PAGES, Records
from lab.tasks import open_task

from hydra_ensembles.errors import DataError

TABLES = Path(__file__).parent / "tables"


def read_table(name: str) -> dict[str, Any]:
    """Read a table file."""
    path = TABLES / f"{name}.yaml"
    if not path.exists():
        known = ", ".join(sorted(file.stem for file in TABLES.glob("*.yaml")))
        raise SystemExit(f"There is no table {name!r}. There are: {known}.")
    table = {"name": name, **yaml.safe_load(path.read_text(encoding="utf-8"))}
    if "base" not in table:
        return table
    base = read_table(table["base"])  # one of several tasks with the same rows and one page
    shared = {key: base[key] for key in ("scores", "against")}
    only = set(table.get("rows", ())) or {row["name"] for row in base["shared_rows"]}
    rows = [_with_trios(row, table) for row in base["shared_rows"] if row["name"] in only]
    own = [_with_trios(row, table) for row in table.get("own_rows", [])]
    return {**shared, **table, "rows": rows + own}


def _with_trios(row: dict[str, Any], table: dict[str, Any]) -> dict[str, Any]:
    """Return a row with one draw per trio of hosts (three for a row of single hosts).

    `trios` is how many there are, `first_trio` the number of the first one.
    """
    each = {"single": 3, "trio": 1, "fold": 1, "probe": 1}.get(row["method"])
    if each is None or "hosts" in row:  # of more hosts there is one group
        return row
    first = table.get("first_trio", 0)
    return {**row, "draws": list(range(each * first, each * (first + table.get("trios", 1))))}


def run(table: dict[str, Any], args: argparse.Namespace) -> None:
    """Run rows, add them to the table's records, write its page."""
    rows = [row for row in table["rows"] if args.rows is None or row["name"] in args.rows]
    unknown = set(args.rows or ()) - {row["name"] for row in rows}
    if unknown:
        known = ", ".join(row["name"] for row in table["rows"])
        raise SystemExit(f"No row is called {', '.join(sorted(unknown))}. There are: {known}.")
    if args.rows is None:
        rows = [row for row in rows if not row.get("by_name")]
    store = Store(args.cache, open_task(table["task"], args.data, args.hosts))
    prepare_masks(store, rows, args.draws)
    matched = {row["name"]: row.get("against", []) for row in table["rows"]}
    against = {name: [*table["against"], *others] for name, others in matched.items()}
    compared = {name for row in rows for name in against[row["name"]]}
    references = [row for row in table["rows"] if row["name"] in compared]
    results, costs = {}, {}
    for row in {row["name"]: row for row in (*references, *rows)}.values():
        wanted = draws_of(row) if args.draws is None or row in references else args.draws
        try:
            found = {draw: answer(store, row, draw) for draw in wanted}
        except DataError as error:
            if row in rows:
                raise
            print(f"Nothing is compared with {row['name']!r}: {error}", flush=True)
            continue
        costs[row["name"]] = max(one.cost for one in found.values())
        results[row["name"]] = {
            draw: evaluate_answers(one, scores=table["scores"], name=row["name"])
            for draw, one in found.items()
        }
    records = Records.read(table["name"], args.out)
    records.add(results, costs, against=against, count=args.resamples, matched=matched)
    records.write(table["name"], [row["name"] for row in table["rows"]], args.out)
    if table.get("kind") == "members":
        from lab.members import write_examples

        write_examples(table, store, args.out)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", help="a name in tables/, `all` (with --page), or `finetune`")
    parser.add_argument("recipe", nargs="?", help="with finetune: a name in recipes.yaml")
    parser.add_argument("--data", type=Path, default=os.environ.get("HYDRA_DATA"))
    parser.add_argument("--hosts", type=Path, default=os.environ.get("HYDRA_HOSTS"))
    parser.add_argument("--cache", type=Path, default=os.environ.get("HYDRA_CACHE", "work/answers"))
    parser.add_argument(
        "--rows", nargs="+", help="names of rows; by default all but those marked by_name"
    )
    parser.add_argument("--draws", nargs="+", type=int, help="by default those of the table")
    parser.add_argument("--resamples", type=int, default=200, help="of intervals; 0 for none")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="with finetune")
    parser.add_argument(
        "--precision", default="bf16", choices=["bf16", "no"], help="with finetune; no is float32"
    )
    parser.add_argument("--epochs", type=int, help="with finetune; by default those of the recipe")
    parser.add_argument("--out", type=Path, default=PAGES, help="where records and pages go")
    parser.add_argument("--page", action="store_true", help="write the page and picture only")
    args = parser.parse_args(arguments)
    args.cache = Path(args.cache)
    if args.table == "finetune":
        from lab.recipes import finetune_hosts

        finetune_hosts(args.recipe, args.data, args.hosts, args.seeds, args.precision, args.epochs)
        return
    every = sorted(file.stem for file in TABLES.glob("*.yaml"))
    for name in every if args.table == "all" else [args.table]:
        table = read_table(name)
        if not args.page:
            if table.get("kind") == "sweep":
                from lab.sweeps import run_sweep

                run_sweep(table, args)
            elif "rows" in table:
                run(table, args)
        if "rows" not in table or Records.read(name, args.out).rows:  # no page of no figures
            write_page(read_table(table["base"]) if "base" in table else table, args.out)


if __name__ == "__main__":
    plainly(main)
