# SPDX-License-Identifier: Apache-2.0
"""Measurements against other Muons and against one process. Not part of the package."""
