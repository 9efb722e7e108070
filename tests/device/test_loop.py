"""The loop: K steps in one call give, bit for bit, the numbers of K calls; outputs by mode; schedules; no Python inside."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from devices import COMPUTING
from test_native_call import frames_during

import tilework
from parity import batches

NUM_STEPS = 5
# Dropout and its seeds, batch norm's buffers, accumulation, clipping, several outputs, LayerNorm, recurrent nets.
LOOPED = [
    ("linear", {}),
    ("linear", {"optimizer": "adam"}),
    ("dropout", {}),
    ("conv_bn", {}),
    ("accumulated", {}),
    ("clipped", {}),
    ("multi_output", {}),
    ("residual", {}),
    ("tied", {}),
]


def joined(step: tilework.Step, data) -> list[torch.Tensor]:
    dim = step.batch_dim if step.batch_dim is not None else 0
    return [torch.cat(parts, dim=dim) for parts in zip(*data, strict=True)]


def step_data(session: tilework.Session, step: tilework.Step, num_steps: int) -> list[list[torch.Tensor]]:
    """One entry a step, each with the inputs of all its micro-batches."""
    micro = session.manifest.signature.num_micro_batches
    flat = batches(step, num_steps * micro)
    return [joined(step, flat[i * micro : (i + 1) * micro]) for i in range(num_steps)]


def leaves(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    return [leaf for item in value for leaf in leaves(item)] if value is not None else []


@pytest.mark.parametrize("device", COMPUTING)
@pytest.mark.parametrize(("name", "kwargs"), LOOPED, ids=[f"{n}-{len(k)}" for n, k in LOOPED])
def test_many_steps_equal_single_steps_bit_for_bit(session_of, name: str, kwargs: dict, device: str) -> None:
    one, step = session_of(name, device, seed=3, **kwargs)
    many, _ = session_of(name, device, seed=3, **kwargs)
    data = step_data(one, step, NUM_STEPS)
    single = [one.run(*b) for b in data]
    together = many.run(*joined(step, data), num_steps=NUM_STEPS)
    assert torch.equal(torch.cat([r.losses for r in single]), together.losses)
    assert torch.allclose(torch.stack([r.loss for r in single]).mean(0), together.loss)
    for parts in zip(*(leaves(r.outputs) for r in single), leaves(together.outputs), strict=True):
        alone = torch.stack(parts[:-1]) if parts[0].dim() == 0 else torch.cat(parts[:-1], dim=min(0, parts[0].dim() - 1) or 0)
        assert torch.equal(alone.flatten(), parts[-1].flatten())
    assert many.num_steps == one.num_steps == NUM_STEPS
    after = many.tensors()
    assert all(torch.equal(t, after[k]) for k, t in one.tensors().items())
    assert torch.equal(one.run(*data[0]).losses, many.run(*data[0]).losses)  # random numbers go on from the same place


@pytest.mark.parametrize("device", COMPUTING)
@pytest.mark.parametrize("name", ["linear", "accumulated", "dropout"])
def test_a_schedule_gives_each_step_its_own_value(session_of, name: str, device: str) -> None:
    rates = [0.1, 0.02, 0.5, 0.0, 0.3]
    one, step = session_of(name, device, seed=2)
    many, _ = session_of(name, device, seed=2)
    constant, _ = session_of(name, device, seed=2)
    data = step_data(one, step, NUM_STEPS)
    single = torch.cat([one.run(*b, hyper={"lr": r}).losses for b, r in zip(data, rates, strict=True)])
    for values in (rates, np.array(rates), torch.tensor(rates, dtype=torch.float64)):
        many, _ = session_of(name, device, seed=2)
        together = many.run(*joined(step, data), num_steps=NUM_STEPS, hyper={"lr": values})
        assert torch.equal(single, together.losses)
        assert all(torch.equal(t, many.tensors()[k]) for k, t in one.tensors().items())
        assert all(v == 0.3 for k, v in many.hyper.items() if k.endswith(".lr"))  # the last value stays
    assert not torch.equal(single, constant.run(*joined(step, data), num_steps=NUM_STEPS).losses)


def test_a_schedule_of_two_hyperparameters(session_of) -> None:
    kwargs = {"optimizer": "sgd_nesterov"}
    one, step = session_of("linear", "cpu", **kwargs)
    many, _ = session_of("linear", "cpu", **kwargs)
    data = step_data(one, step, 3)
    schedule = {"lr": [0.1, 0.2, 0.3], "momentum": [0.5, 0.9, 0.1]}
    for i, b in enumerate(data):
        one.run(*b, hyper={k: v[i] for k, v in schedule.items()})
    many.run(*joined(step, data), num_steps=3, hyper=schedule)
    assert all(torch.equal(t, many.tensors()[k]) for k, t in one.tensors().items())


def test_wrong_schedules(session_of) -> None:
    session, step = session_of("linear", "reference")
    data = joined(step, step_data(session, step, 3))
    with pytest.raises(tilework.UserError, match="found 2 values, expected one for each of 3"):
        session.run(*data, num_steps=3, hyper={"lr": [0.1, 0.2]})
    with pytest.raises(tilework.UserError, match="did you mean 'lr'"):
        session.run(*data, num_steps=3, hyper={"lrr": [0.1, 0.2, 0.3]})
    with pytest.raises(tilework.UserError, match="fused step"):
        session.run(*step.inputs, sections=["fwd"], hyper={"lr": [0.1]})


@pytest.mark.parametrize("device", COMPUTING)
@pytest.mark.parametrize("name", ["linear", "accumulated"])
def test_output_modes(session_of, name: str, device: str) -> None:
    found = {}
    for mode in ("all", "last", "sum", "loss"):
        session, step = session_of(name, device, seed=2)
        data = step_data(session, step, NUM_STEPS)
        found[mode] = session.run(*joined(step, data), num_steps=NUM_STEPS, outputs=mode)
        assert torch.equal(found[mode].losses, found["all"].losses) and torch.equal(found[mode].loss, found["all"].loss)
    assert found["loss"].outputs is None
    whole, last, total = (leaves(found[m].outputs)[-1] for m in ("all", "last", "sum"))
    count = NUM_STEPS * session.manifest.signature.num_micro_batches
    slices = whole.reshape(count, *last.shape)
    assert torch.equal(last, slices[-1])
    assert torch.allclose(total, slices.sum(0), rtol=1e-5, atol=1e-6)


def test_chosen_outputs(session_of) -> None:
    session, step = session_of("linear", "cpu")
    names = [a.name for a in session.manifest.signature.outputs]
    data = joined(step, step_data(session, step, 4))
    chosen = next(n for n in names if n not in session.manifest.signature.losses)
    result = session.run(*data, num_steps=4, outputs={chosen: "last"})
    assert result.losses.shape == (4,) and leaves(result.outputs)[-1].shape == (6, 5)
    with pytest.raises(tilework.UserError, match="no output mode 'first'"):
        session.run(*data, num_steps=4, outputs="first")
    with pytest.raises(tilework.UserError, match="no output 'nothing'"):
        session.run(*data, num_steps=4, outputs={"nothing": "all"})


def test_python_frames_do_not_depend_on_the_number_of_steps(session_of) -> None:
    session, step = session_of("linear", "cpu")
    counts = []
    for num_steps in (1, 2, 64):
        data = joined(step, step_data(session, step, num_steps))
        session.run(*data, num_steps=num_steps, outputs="loss")  # the first call of a kind prepares it
        counts.append(len(frames_during(lambda d=data, n=num_steps: session.run(*d, num_steps=n, outputs="loss"))))
    assert counts[0] == counts[1] == counts[2] and counts[0] < 12


def test_parameters_are_updated_in_place(session_of) -> None:
    session, step = session_of("linear", "cpu")
    before = {k: (t.data_ptr(), t.clone()) for k, t in session._device.buffers.items() if k.startswith("param/")}
    session.run(*joined(step, step_data(session, step, 8)), num_steps=8)
    for name, (address, value) in before.items():
        now = session._device.buffers[name]
        assert now.data_ptr() == address and not torch.equal(now, value)


def test_results_do_not_change_when_the_session_goes_on(session_of) -> None:
    session, step = session_of("linear", "cpu")
    results = [session.run(*step.inputs) for _ in range(200)]  # more than one stock of output memory
    losses = [float(r.loss) for r in results]
    assert len(set(losses)) == 200 and losses == sorted(losses, reverse=True) and all(math.isfinite(v) for v in losses)
    assert torch.equal(results[0].outputs[1], session_of("linear", "cpu")[0].run(*step.inputs).outputs[1])


def test_two_threads_take_turns(session_of) -> None:
    """A session is one thing with one state: calls from several threads must not mix."""
    import threading

    session, step = session_of("linear", "cpu")
    data = joined(step, step_data(session, step, 50))
    results = []

    def work() -> None:
        for _ in range(20):
            results.append(session.run(*data, num_steps=50, outputs="loss").losses)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    alone, _ = session_of("linear", "cpu")
    expected = [alone.run(*data, num_steps=50, outputs="loss").losses for _ in range(60)]
    assert session.num_steps == 3000
    assert sorted(float(r.sum()) for r in results) == sorted(float(r.sum()) for r in expected)
