# SPDX-License-Identifier: Apache-2.0
"""The command ``hyper-parallel``: plans, groupings and checkpoints, from a terminal."""
