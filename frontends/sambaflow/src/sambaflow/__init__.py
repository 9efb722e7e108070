"""SambaFlow's names on Tilework: programs that were written for an RDU run on the tiles that this machine has.

This package translates: names, arguments and conventions go to tilework's Step, compile and Session. It has no engine of
its own. docs/sambaflow.md says what there is, what differs and how to port a program.
"""

from __future__ import annotations

import tilework

__version__ = f"1.24.1+tilework.{tilework.__version__}"


def is_demo() -> bool:
    return False
