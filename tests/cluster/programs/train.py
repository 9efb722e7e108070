"""One rank: trains each of the artifacts in every way that is asked for. train.py JSON"""

import json
import sys

from training import share, tell, trained

import tilework
from tilework import parallel

asked = json.loads(sys.argv[1])
group = parallel.start(timeout=asked.get("timeout", 60))
found = []
for case in asked["cases"]:
    with tilework.load(case["path"], seed=3) as session:
        session.join(group, reduce=case["reduce"], algorithm=case["algorithm"], overlap=case.get("overlap"),
                     shard=case.get("shard", False))  # fmt: skip
        x, y = share(case.get("of", group.size), group.rank)
        norms: list[float] | None = [] if "norm/count" in session.manifest.buffers else None
        losses = trained(session, x, y, case["steps"], norms)
        weights = {k: v.flatten().tolist() for k, v in session.state_dict().items()}
        state = {}
        if session.shards is not None:
            session.gather()
            state = {k: v.flatten().tolist() for k, v in session.tensors().items() if k.startswith("state/")}
            case["kept"] = [session.shards.state_bytes, session.shards.all_bytes]
        found.append({"losses": losses, "weights": weights, "state": state, "kept": case.get("kept"), "norms": norms,
                      "natively": session._running.natively})  # fmt: skip
tell(group.rank, launcher=group.launcher, nodes=group.nodes, cases=found)
