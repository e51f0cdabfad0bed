"""The shipped schema files, written anew by ``python -m phaze_fast.schemas``."""

import json
from pathlib import Path

from phaze_fast.schemas import KINDS, generate

for kind in KINDS:
    file = Path(__file__).with_name(f"{kind}.schema.json")
    file.write_text(json.dumps(generate(kind), indent=2, sort_keys=True) + "\n", encoding="utf-8")
