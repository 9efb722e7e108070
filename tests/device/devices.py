"""The devices that one suite is for: ours, and one that another distribution brings (tests/outside)."""

import pytest

COMPUTING = ["cpu", "reference", "outside", pytest.param("cuda", marks=pytest.mark.gpu)]
ALL = [*COMPUTING, "null"]
