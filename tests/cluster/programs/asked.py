"""Asks for a number of ranks, and ends. asked.py COUNT"""

import sys

from tilework import parallel
from tilework.errors import TileworkError

try:
    parallel.start(expected=int(sys.argv[1]))
except TileworkError as e:
    print(e, file=sys.stderr)
    sys.exit(e.exit_code)
