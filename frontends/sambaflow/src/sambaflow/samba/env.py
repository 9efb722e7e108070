"""Switches that apps ask for. There is no stochastic rounding and no mock runtime here: every answer is what holds."""

from __future__ import annotations


def use_mock_samba_runtime() -> bool:
    return False


def enable_conv_grad_accum_stoc(*_: object) -> bool:
    return False


def enable_addbias_grad_accum_stoc(*_: object) -> bool:
    return False


def disable_sgd_stoc(*_: object) -> bool:
    return True
