"""make test-full: the big numbers (all combinations, 10 000 mutations), and their result kept in docs/test-results.md."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]


def main() -> int:
    report = ROOT / "out" / "test-full.xml"
    report.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-n", "2", "--timeout", "3600", f"--junitxml={report}", *sys.argv[1:]]
    code = subprocess.run(command, cwd=ROOT, env=os.environ | {"TILEWORK_FULL": "1"}).returncode
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    mutations = {}
    for item in suite.iter("property"):
        if item.get("name") == "mutations":
            mutations = json.loads(str(item.get("value")).replace("'", '"'))
    total, failed = int(suite.get("tests", 0)), int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    lines = [
        "# The last full test run",
        "",
        f"- date: {datetime.date.today().isoformat()}",
        "- command: `make test-full" + (f" ARGS='{shlex.join(sys.argv[1:])}'" if sys.argv[1:] else "") + "`",
        f"- machine: {os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}",
        f"- result: {total - failed - int(suite.get('skipped', 0))} passed, {failed} failed, {suite.get('skipped')} skipped "
        f"in {float(suite.get('time', 0)):.0f} s",
        "- as a whole: all models x all optimizers on cpu, 10 000 generated programs (every fifth on cpu), "
        "10 000 mutated artifacts, all models of docs/coverage.md",
    ]
    if mutations:
        lines += ["", "| what became of 10 000 mutated artifacts | number |", "|---|---|"]
        lines += [f"| {outcome} | {count} |" for outcome, count in sorted(mutations.items(), key=lambda kv: -kv[1])]
        lines += [
            "",
            "`accepted`: half of the files had their digests recomputed, and many such mutations leave a well-formed artifact:",
            "a graph's text for reading, a source line, the report, a default value, a number inside a graph.",
        ]
    (ROOT / "docs" / "test-results.md").write_text("\n".join(lines) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
