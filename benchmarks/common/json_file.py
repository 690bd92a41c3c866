"""Results as a file that is whole at any time: its writer may be killed."""

import json
from pathlib import Path
from typing import Any


def write_json(path: Path, document: Any) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(document, indent=1) + "\n")
    temporary.replace(path)
