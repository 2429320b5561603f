# SPDX-License-Identifier: Apache-2.0
"""The distributed Muon optimizer."""
