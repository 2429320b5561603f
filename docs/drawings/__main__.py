# SPDX-License-Identifier: Apache-2.0
"""Write all drawings to ``docs/drawings``."""

from pathlib import Path
from typing import Final

from docs.drawings import layouts, steps

FOLDER: Final = Path(__file__).parent
DRAWINGS: Final = {
    "sharding": steps.sharding,
    "layouts": layouts.layouts,
    "ownership": layouts.ownership,
    "exchange": steps.exchange,
    "pipeline": steps.pipeline,
    "replicas": steps.replicas,
    "agreement": steps.agreement,
}


def main() -> None:
    """Write one SVG file a drawing."""
    for name, draw in DRAWINGS.items():
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
