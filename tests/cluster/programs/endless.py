"""Trains until something happens. endless.py ARTIFACT"""

import sys

from training import share

import tilework
from tilework import parallel

group = parallel.start(timeout=5)
x, y = share(group.size, group.rank)
session = tilework.load(sys.argv[1], group=group)
for i in range(10**9):
    session.run(x[i % len(x)], y[i % len(y)])
    if i == 5:
        print("training", flush=True)
