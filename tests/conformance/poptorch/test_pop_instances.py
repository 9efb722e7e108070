"""poprun, popdist and the stand-in for horovod.torch: several processes train as one does on the whole batch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pop_helpers import Classifier, data, eager, options

import popdist
import poptorch
from poprun.main import main, topology

HERE = Path(__file__).parent
TRAIN = """
import json, sys
sys.path.insert(0, {here!r})
import horovod.torch as hvd
import torch, popdist, popdist.poptorch, poptorch
from pop_helpers import Classifier, data
hvd.init()
popdist.init()
options = popdist.poptorch.Options()
options.deviceIterations(2).showCompilationProgressBar(False)
torch.manual_seed(popdist.getInstanceIndex())  # other weights in each, until they are broadcast
model = Classifier()
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
executor = poptorch.trainingModel(model, options, poptorch.optim.SGD(model.parameters(), lr=0.1))
x, y = data(8)
n, i = popdist.getNumInstances(), popdist.getInstanceIndex()
r = popdist.getNumLocalReplicas()
mine = [t.reshape(2, n, -1, *t.shape[1:])[:, i].flatten(0, 1) for t in (x, y)]
_, loss = executor(*mine)
mean = hvd.allreduce(loss.reshape(-1).mean(), average=True)
if i == 0:
    sent = hvd.broadcast_object([1, "a"])
    print(json.dumps({{"weight": model.fc.weight.tolist(), "mean": mean.item(), "size": hvd.size(), "all": sent}}))
else:
    hvd.broadcast_object(None)
"""


def poprun(*words: str, code: str = "", timeout: int = 120) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from poprun.main import run; run()", *words, sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


@pytest.mark.parametrize(
    ("instances", "replicas"), [(1, 2), pytest.param(2, 2, marks=pytest.mark.slow), pytest.param(2, 4, marks=pytest.mark.slow)]
)
def test_several_replicas_train_as_eager_does(instances: int, replicas: int) -> None:
    done = poprun("-v", f"--num-instances={instances}", f"--num-replicas={replicas}", code=TRAIN.format(here=str(HERE)))
    assert done.returncode == 0, done.stdout + done.stderr
    torch.manual_seed(0)
    model = Classifier()
    x, y = data(8)
    eager(model, torch.optim.SGD(model.parameters(), lr=0.1), x, y, 2, 1, replicas)
    line = next(line for line in done.stdout.splitlines() if line.startswith("[1,0]<stdout>:{"))
    found = json.loads(line.removeprefix("[1,0]<stdout>:"))
    torch.testing.assert_close(torch.tensor(found["weight"]), model.fc.weight.detach(), rtol=1e-4, atol=1e-6)
    assert found["size"] == instances and found["all"] == [1, "a"]
    assert "terminated with exit code 0" in done.stdout and "poprun topology" in done.stdout


SHARED = """
import json, sys
sys.path.insert(0, {here!r})
import torch, popdist.poptorch, poptorch
from pop_helpers import Classifier, data
popdist.init()
options = popdist.poptorch.Options()
options.deviceIterations(2).randomSeed(3).showCompilationProgressBar(False)
options.Training.gradientAccumulation(2)
torch.manual_seed(0)
model = Classifier()
executor = poptorch.trainingModel(model, options, poptorch.optim.SGD(model.parameters(), lr=0.1))
loader = poptorch.DataLoader(options, torch.utils.data.TensorDataset(*data(64)), batch_size=1, shuffle={shuffle})
rows = []
for x, y in loader:
    out, loss = executor(x, y)
    rows.append([x.tolist(), list(out.shape), list(loss.shape)])
print(json.dumps({{"weight": model.fc.weight.tolist(), "rows": rows, "offset": popdist.getReplicaIndexOffset()}}))
"""


@pytest.mark.parametrize("shuffle", [pytest.param(False, marks=pytest.mark.slow), True])
def test_each_instance_reads_its_own_share(shuffle: bool) -> None:
    """Two instances of two replicas, each with half of the data: every update is made from the micro-batches of all four."""
    done = poprun("--num-instances=2", "--num-replicas=4", code=SHARED.format(here=str(HERE), shuffle=shuffle))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if "<stdout>:{" in line)
    found = [json.loads(line.split(":", 1)[1]) for line in lines]
    assert [f["offset"] for f in found] == [0, 2] and found[0]["weight"] == found[1]["weight"]
    shares = [torch.tensor([row for x, *_ in f["rows"] for row in x]) for f in found]
    rows, labels = data(64)
    numbers = [[int((rows == row).all(1).nonzero()) for row in share] for share in shares]
    assert len(found[0]["rows"]) == 4 and sorted(numbers[0] + numbers[1]) == list(range(64))
    assert shuffle or numbers == [list(range(32)), list(range(32, 64))]
    assert found[0]["rows"][0][1:] == [[2, 3], [2]]  # outputs of the instance's own replicas
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(0, 32, 4):  # an update: [accumulation][replicas] of each instance
        now = torch.tensor([*numbers[0][i : i + 4], *numbers[1][i : i + 4]])
        eager(model, optimizer, rows[now], labels[now], 1, 2, 4)
    torch.testing.assert_close(torch.tensor(found[0]["weight"]), model.fc.weight.detach(), rtol=1e-4, atol=1e-6)


def test_the_exit_code_is_the_programs() -> None:
    done = poprun("--num-instances=1", code="print('hello'); raise SystemExit(7)")
    assert done.returncode == 7 and "[1,0]<stdout>:hello" in done.stdout and "POPRUN [E]" in done.stdout


def test_what_instances_are_told(tmp_path) -> None:
    code = "import os, json; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith(('POPDIST', 'POPTORCH'))}))"
    done = poprun("--num-instances=2", "--num-replicas=2", "--ipus-per-replica=4", f"--executable-cache-path={tmp_path}",
                  "--only-output-from-instance=1", code=code)  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if "<stdout>" in line]
    assert len(lines) == 1 and lines[0].startswith("[1,1]<stdout>:")
    found = json.loads(lines[0].removeprefix("[1,1]<stdout>:"))
    assert found["POPTORCH_CACHE_DIR"] == str(tmp_path)
    assert {
        k: found[f"POPDIST_{k}"]
        for k in (
            "NUM_TOTAL_REPLICAS",
            "NUM_LOCAL_REPLICAS",
            "NUM_IPUS_PER_REPLICA",
            "REPLICA_INDEX_OFFSET",
            "LOCAL_INSTANCE_INDEX",
        )
    } == {
        "NUM_TOTAL_REPLICAS": "2",
        "NUM_LOCAL_REPLICAS": "1",
        "NUM_IPUS_PER_REPLICA": "4",
        "REPLICA_INDEX_OFFSET": "1",
        "LOCAL_INSTANCE_INDEX": "1",
    }


def test_the_table_of_the_topology() -> None:
    assert topology("host", 1, 4).splitlines() == [
        " ===========================",
        "|      poprun topology      |",
        "|===========================|",
        "| hosts     | host          |",
        "|-----------|---------------|",
        "| ILDs      |       0       |",
        "|-----------|---------------|",
        "| instances |       0       |",
        "|-----------|---------------|",
        "| replicas  | 0 | 1 | 2 | 3 |",
        " ---------------------------",
    ]
    assert "| instances | 0 | 1 | 2 | 3 |" in topology("h", 4, 4)


@pytest.mark.parametrize(("words", "text"), [
    ([], "no program"), (["--num-replicas=3", "--num-instances=2", "python"], "divided evenly"),
    (["--num-instances=0", "python"], "1 or more"), (["-H", "elsewhere", "python"], "this machine only"),
    (["no-such-command-here"], "there is no command"),
])  # fmt: skip
def test_wrong_command_lines(capsys, words, text: str) -> None:
    assert main(words) == 2
    assert text in capsys.readouterr().err


def test_options_without_poprun() -> None:
    import popdist.poptorch

    assert not popdist.isPopdistEnvSet() and popdist.getNumInstances() == 1 and popdist.getInstanceIndex() == 0
    with pytest.raises(RuntimeError, match="not started by poprun"):
        popdist.poptorch.Options()


@pytest.fixture
def started(monkeypatch) -> None:
    for name, value in (("NUM_TOTAL_REPLICAS", 4), ("NUM_LOCAL_REPLICAS", 4), ("NUM_IPUS_PER_REPLICA", 2)):
        monkeypatch.setenv(f"POPDIST_{name}", str(value))


@pytest.mark.parametrize("name", ["replicationFactor", "useIpuId", "Distributed.disable", "Distributed.configureProcessId",
                                  "Distributed.IPUoFConfigFiles"])  # fmt: skip
def test_what_poprun_has_set_cannot_be_changed(started, name: str) -> None:
    import popdist.poptorch

    opts = popdist.poptorch.Options()
    assert opts.replication_factor == 4 and isinstance(opts, poptorch.Options)
    target = opts
    for part in name.split("."):
        target = getattr(target, part)
    with pytest.raises(RuntimeError, match=f"Cannot call `{name}` with popdist.poptorch.Options"):
        target(1)


def test_a_number_of_ipus_that_is_not_popruns(started) -> None:
    import popdist.poptorch

    assert popdist.poptorch.Options(ipus_per_replica=2).device_iterations == 1
    with pytest.raises(RuntimeError, match="not that of poprun"):
        popdist.poptorch.Options(ipus_per_replica=3)


def test_processes_that_no_launcher_has_started_do_not_train_alone() -> None:
    opts = options()
    opts.Distributed.configureProcessId(0, 2)
    model = Classifier()
    x, y = data(4)
    assert poptorch.inferenceModel(model, opts)(x).shape == (4, 3)
    executor = poptorch.trainingModel(model, opts, poptorch.optim.SGD(model.parameters(), lr=0.1))
    before = model.fc.weight.detach().clone()
    for _ in range(2):
        with pytest.raises(poptorch.Error, match=r"(?s)not started together.*poprun --num-instances=2 or mpirun -n 2"):
            executor(x, y)
    assert torch.equal(model.fc.weight, before)
    executor.destroy()
    opts = opts.clone()
    opts.Distributed.disable()
    poptorch.trainingModel(model, opts, poptorch.optim.SGD(model.parameters(), lr=0.1))(x, y)
    assert not torch.equal(model.fc.weight, before)


def test_functions_in_some_instances() -> None:
    assert popdist.execute_on_instances({0}, lambda a: a + 1, 2) == 3
    assert popdist.execute_on_instances({1}, lambda a: a + 1, 2) is None


def test_horovod_alone() -> None:
    import horovod.torch as hvd

    hvd.init()
    x = torch.tensor([1.0, 2.0])
    assert (hvd.rank(), hvd.size(), hvd.local_rank()) == (0, 1, 0)
    assert torch.equal(hvd.allreduce(x), x) and torch.equal(hvd.allreduce(x, op=hvd.Sum), x)
    assert torch.equal(hvd.allgather(x), x) and hvd.broadcast_object({"a": [1]}) == {"a": [1]}
    assert hvd.broadcast_object(b"abc") == b"abc"
