"""Each test is a small program in the style of those that exist. It has a session of its own, and the reference device unless it
says otherwise: the interface is what is tested here, the devices are tested elsewhere."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest

from sambaflow import samba
from sambaflow.samba.utils.argparser import parse_app_args


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("TILEWORK_DEVICE", "reference")
    monkeypatch.chdir(tmp_path)
    samba.session.reset()
    samba.session.args = Namespace()
    samba.session.seed = None
    yield
    samba.session.reset()


@pytest.fixture
def compiled(tmp_path: Path):  # type: ignore[no-untyped-def]
    """compiled(make, argv): runs `compile` on a program's (model, inputs, optimizers), then starts it anew for `run`, as a second
    process would: returns (args, model, inputs, optimizers) after trace_graph."""

    def start(make, *flags, common=None, compile_kwargs=None, trace_kwargs=None):  # type: ignore[no-untyped-def]
        args = parse_app_args(["compile", "--pef-name", "m", "--output-folder", str(tmp_path), *flags], common_parser_fn=common)
        model, inputs, optimizers = make(args)
        path = samba.session.compile(model, inputs, optimizers, name="m", config_dict=vars(args), **(compile_kwargs or {}))
        assert path == str(tmp_path / "m" / "m.pef")
        samba.session.reset()
        args = parse_app_args(["run", "--pef", path, *flags], common_parser_fn=common)
        model, inputs, optimizers = make(args)
        samba.utils.trace_graph(model, inputs, optimizers, pef=args.pef, mapping=args.mapping, **(trace_kwargs or {}))
        return args, model, inputs, optimizers

    return start
