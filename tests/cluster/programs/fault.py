"""Four ranks, of which one goes wrong in the middle. fault.py ARTIFACT die|freeze|raise|exit device|host"""

import os
import signal
import sys

from training import share

import tilework
from tilework import parallel

path, fault, reduce = sys.argv[1:4]
group = parallel.start(timeout=4)
x, y = share(group.size, group.rank)
session = tilework.load(path, group=group, reduce=reduce)
for i in range(20):
    if i == 7 and group.rank == 2:
        if fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "raise":
            raise ValueError("a mistake of the program's own")
        if fault == "exit":
            sys.exit(5)
    session.run(x[i], y[i])
