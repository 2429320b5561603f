# SPDX-License-Identifier: Apache-2.0
"""Shapes of models, and where the usual recipes of parallelism put them. No data, no ranks."""
