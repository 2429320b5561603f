# SPDX-License-Identifier: Apache-2.0
"""``python -m hyper_parallel`` is ``hyper-parallel``."""

import sys

from hyper_parallel.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
