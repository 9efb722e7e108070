"""kernels/gemm.cpp alone: products of any shape, stride and orientation against float64."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilework.compiler import toolchain
from tilework.plan.options import Options

WRAPPER = """
#include "kernels/gemm.h"
extern "C" int own(const float* a, long a_leading, int a_turned, const float* b, long b_leading, int b_turned, long m, long k,
                   long n, float* out, long leading, float alpha, float beta) {
  return tilework::own_gemm({a, a_leading, a_turned != 0}, {b, b_leading, b_turned != 0}, m, k, n, out, leading, alpha, beta);
}
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory):
    folder: Path = tmp_path_factory.mktemp("gemm")
    options = Options()
    (folder / "own.cpp").write_text(WRAPPER)
    include = f"-I{toolchain.KERNELS.parent}"
    flags = [f for f in toolchain.flags(options) if f != "-fvisibility=hidden"]
    toolchain.run([toolchain.compiler(), *flags, include, "-c", f"{folder}/own.cpp", "-o", f"{folder}/own.o"], "own")
    made = toolchain.own_object(toolchain.GEMM, options, folder)
    libraries = ["-Wl,--no-as-needed", *toolchain.empty_libraries(folder)]
    toolchain.run([toolchain.compiler(), "-shared", "-o", f"{folder}/own.so", f"{folder}/own.o", str(made), *libraries], "own")
    function = ctypes.CDLL(f"{folder}/own.so").own
    pointer, number, real = ctypes.c_void_p, ctypes.c_long, ctypes.c_float
    function.argtypes = [
        pointer,
        number,
        ctypes.c_int,
        pointer,
        number,
        ctypes.c_int,
        number,
        number,
        number,
        pointer,
        number,
        real,
        real,
    ]
    one, out = torch.ones(64, 64), torch.empty(64, 64)
    if not function(one.data_ptr(), 64, 0, one.data_ptr(), 64, 0, 64, 64, 64, out.data_ptr(), 64, 1.0, 0.0):
        pytest.skip("no AVX-512, or an Intel processor: MKL is used here")
    return function


def matrix(rows: int, columns: int, turned: bool, gap: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(memory, what it means): `gap` floats of something else between the rows that lie there."""
    memory = torch.randn((columns, rows + gap) if turned else (rows, columns + gap))
    return memory, memory[:, :rows].t() if turned else memory[:, :columns]


size = st.one_of(st.sampled_from([13, 14, 15, 16, 17, 31, 32, 33, 255, 256, 257]), st.integers(1, 600))


@settings(max_examples=150, deadline=None)
@given(m=size, k=size, n=size, a_turned=st.booleans(), b_turned=st.booleans(), gap=st.integers(0, 20), scale=st.sampled_from(
    [(1.0, 0.0), (-0.25, 1.0), (2.0, 0.5)]), threads=st.integers(1, 4))  # fmt: skip
def test_any_product(own, m, k, n, a_turned, b_turned, gap, scale, threads) -> None:
    (a, a_means), (b, b_means) = matrix(m, k, a_turned, gap), matrix(k, n, b_turned, gap)
    out = torch.randn(m, n + gap)
    before, (alpha, beta) = out.clone(), scale
    if beta == 0:
        out[:, :n] = torch.nan  # is not read
    wanted = alpha * (a_means.double() @ b_means.double()) + (beta * before[:, :n].double() if beta else 0)
    known = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        done = own(
            a.data_ptr(),
            a.stride(0),
            a_turned,
            b.data_ptr(),
            b.stride(0),
            b_turned,
            m,
            k,
            n,
            out.data_ptr(),
            n + gap,
            alpha,
            beta,
        )
    finally:
        torch.set_num_threads(known)
    if not done:  # small: nothing has been touched
        assert m < 4 or m * n * k < 1 << 17
        return
    bound = 1e-6 * (abs(alpha) * (a_means.double().abs() @ b_means.double().abs()) + 1)
    assert ((out[:, :n].double() - wanted).abs() <= bound).all()
    assert torch.equal(out[:, n:], before[:, n:])
