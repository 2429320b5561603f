# SPDX-License-Identifier: Apache-2.0
"""The code of the page about training runs as it stands."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "training.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_code_of_the_page_about_training_runs() -> None:
    namespace: dict[str, object] = {}
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert len(blocks) == 3
    for number, body in enumerate(blocks):
        exec(compile(body, f"{PAGE.name}, block {number}", "exec"), namespace)
