"""Writes docs/manifest.schema.json, the published schema of manifest.json, from the code."""

import json
from pathlib import Path

from tilework.artifact.manifest import Manifest

target = Path(__file__).parents[1] / "docs" / "manifest.schema.json"
target.write_text(json.dumps(Manifest.model_json_schema(), indent=1) + "\n")
print(target)
