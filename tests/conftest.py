# SPDX-License-Identifier: Apache-2.0
"""Shared fixtures."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("default", deadline=None, derandomize=True)
settings.load_profile("default")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
