"""Writes docs/manifest.schema.json, the published schema of manifest.json, from the code."""

import json
from pathlib import Path

import msgspec

from tilework.artifact.manifest import Manifest

target = Path(__file__).parents[1] / "docs" / "manifest.schema.json"
target.write_text(json.dumps(msgspec.json.schema(Manifest), indent=1) + "\n")
print(target)
