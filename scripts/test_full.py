"""make test-full: the big numbers (all combinations, 10 000 mutations), and their result kept in docs/test-results.md."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import test_results

ROOT = Path(__file__).parents[1]


def main() -> int:
    report = ROOT / "out" / "test-full.xml"
    report.parent.mkdir(exist_ok=True)
    tested = test_results.commit()
    limits = ["--timeout", "3600", "-o", "faulthandler_timeout=4000"]
    command = [sys.executable, "-m", "pytest", "-n", "2", *limits, f"--junitxml={report}", *sys.argv[1:]]
    code = subprocess.run(command, cwd=ROOT, env=os.environ | {"TILEWORK_FULL": "1"}).returncode
    words = "make test-full" + (f" ARGS='{shlex.join(sys.argv[1:])}'" if sys.argv[1:] else "")
    test_results.PAGE.write_text(test_results.page(report, words, tested))
    return code


if __name__ == "__main__":
    sys.exit(main())
