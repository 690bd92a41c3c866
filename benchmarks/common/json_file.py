"""Writes results atomically, so that the file is complete even if the writer is killed."""

import json
from pathlib import Path
from typing import Any


def write_json(path: Path, document: Any) -> None:
    """Writes the document to `path`, and makes the folder if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(document, indent=1) + "\n")
    temporary.replace(path)
