"""The devices that one suite is for: ours, and one that another distribution brings (tests/outside)."""

COMPUTING = ["cpu", "reference", "outside"]
ALL = [*COMPUTING, "null"]
