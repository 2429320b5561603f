# SPDX-License-Identifier: Apache-2.0
"""A distributed Muon optimizer for PyTorch ``DTensor``."""

from hyper_parallel.core.optimizer import Muon, muon_param_groups, orthogonalize

__all__ = ["Muon", "__version__", "muon_param_groups", "orthogonalize"]

__version__ = "0.1.0.dev0"
