# SPDX-License-Identifier: Apache-2.0
"""One process of a training run that is struck by faults: ``examples/train_gpt.py``, armed."""

import json
import os
import sys
from pathlib import Path

from benchmarks.soak_faults import EventLog, Fault, armed
from examples import train_gpt


def write_faults(faults: list[Fault], path: Path) -> None:
    """Write the faults of a run where its processes find them.

    Args:
        faults: Of all ranks.
        path: A JSON file.
    """
    path.write_text(json.dumps([vars(fault) for fault in faults], indent=1) + "\n")


def main(argv: list[str]) -> None:
    """Train under faults.

    Args:
        argv: The file of the faults, the log of events, then the options of the example.

    Raises:
        RuntimeError: What this rank was told when another was struck.
    """
    faults = [Fault(**fields) for fields in json.loads(Path(argv[0]).read_text())]
    log = EventLog(Path(argv[1]))
    with armed(faults, log):
        try:
            train_gpt.main(argv[2:])
        except RuntimeError as error:
            log.add("error", rank=int(os.environ["RANK"]), message=str(error))
            raise


if __name__ == "__main__":
    main(sys.argv[1:])
