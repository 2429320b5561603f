# SPDX-License-Identifier: Apache-2.0
"""Faults that strike real training processes."""
