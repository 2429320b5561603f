# SPDX-License-Identifier: Apache-2.0
"""Measure this machine, so that predictions are made from what it does rather than a datasheet."""

from hyper_parallel.calibration.calibrate import calibrate

__all__ = ["calibrate"]
