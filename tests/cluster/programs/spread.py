"""One process of several replicas: trains each of the artifacts. spread.py JSON"""

import json
import os
import sys

import torch
from training import STEPS, share, tell

from tilework import parallel

asked = json.loads(sys.argv[1])
if asked.get("machines"):  # one machine plays several, as under Slurm
    os.environ["SLURMD_NODENAME"] = f"node{int(os.environ['TILEWORK_RANK']) % asked['machines']}"
group = parallel.start(timeout=asked.get("timeout", 60))
x, y = share(group.size, group.rank)
if asked.get("fault") == group.rank:
    y[7, -1] = 99  # of the process's last replica, in the eighth step
found = []
for case in asked["cases"]:
    how = {"reduce": case["reduce"], "algorithm": case["algorithm"]}
    with parallel.Replicas(case["path"], case["count"], group=group, seed=3, **how) as replicas:
        losses = []
        for i in range(0, STEPS, case["steps"]):
            now = slice(i, i + case["steps"])
            results = replicas.run(x[now].flatten(0, 1), y[now].flatten(0, 1), num_steps=case["steps"])
            losses += torch.stack([r.losses.reshape(case["steps"], -1).mean(1) for r in results]).mean(0).tolist()
        sessions = replicas.sessions
        weights = [{k: v.flatten().tolist() for k, v in s.state_dict().items()} for s in sessions]
        assert all(w == weights[0] for w in weights)
        first = sessions[0]
        found.append({"losses": losses, "weights": weights[0], "ranks": [s.rank for s in sessions], "size": first.group.size,
                      "nodes": first.group.nodes, "natively": first._running.natively})  # fmt: skip
tell(group.rank, cases=found)
