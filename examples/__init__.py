# SPDX-License-Identifier: Apache-2.0
"""Runnable examples, one use each."""
