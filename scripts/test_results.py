"""Writes docs/test-results.md from the report of a test run: counts, date, commit, machine. `make test-full` does so by itself.

make test ARGS=--junitxml=out/test.xml
python scripts/test_results.py out/test.xml "make test"
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "test-results.md"


def page(report: Path, command: str, commit: str) -> str:
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None, f"{report}: not a report of pytest"
    counts = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    failed = counts["failures"] + counts["errors"]
    passed = counts["tests"] - failed - counts["skipped"]
    day = (suite.get("timestamp") or datetime.date.today().isoformat())[:10]
    lines = [
        "# Last recorded test run",
        "",
        "| | |",
        "|---|---|",
        f"| command | `{command}` |",
        f"| date | {day} |",
        f"| commit | {commit} |",
        f"| machine | {os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()} |",
        f"| torch | {version('torch')} |",
        f"| result | {passed} passed, {failed} failed, {counts['skipped']} skipped |",
        f"| time | {float(suite.get('time', 0)):.0f} s |",
        "",
        "`make test-full` also runs what `make test` skips: all models with all optimizers on `cpu`, 10 000 generated programs",
        "(every fifth on `cpu`), 10 000 mutated artifacts, and all models of [the coverage table](coverage.md).",
    ]
    for item in suite.iter("property"):
        if item.get("name") == "mutations":
            lines += _mutations(json.loads(str(item.get("value")).replace("'", '"')))
    return "\n".join(lines) + "\n"


def _mutations(outcomes: dict[str, int]) -> list[str]:
    rows = [f"| {outcome} | {count} |" for outcome, count in sorted(outcomes.items(), key=lambda kv: -kv[1])]
    return ["", "| outcome of 10 000 mutated artifacts | number |", "|---|---|", *rows, "",
            "`accepted`: half of the files had their digests recomputed, and many such mutations leave a well-formed artifact:",
            "a graph's text for reading, a source line, the report, a default value, a number inside a graph."]  # fmt: skip


def commit() -> str:
    """Of the tree that was tested; with a remark where files had been changed since."""
    git = ["git", "-C", str(ROOT)]
    found = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True).stdout.strip()
    return (found or "unknown") + (" with local changes" if changed else "")


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    PAGE.write_text(page(Path(arguments[0]), arguments[1], commit()))
    print(f"written: {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
