# SPDX-License-Identifier: Apache-2.0
"""The drawings of this site, made from what the package computes: ``python -m docs.drawings``."""
