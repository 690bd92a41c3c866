"""Writes results atomically, so that the file is complete even if the writer is killed."""

import json
from pathlib import Path
from typing import Any


def write_json(path: Path, document: Any) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(document, indent=1) + "\n")
    temporary.replace(path)
