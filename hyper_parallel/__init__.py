# SPDX-License-Identifier: Apache-2.0
"""A distributed Muon optimizer for PyTorch ``DTensor``."""

__version__ = "0.1.0.dev0"
