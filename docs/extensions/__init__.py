# SPDX-License-Identifier: Apache-2.0
"""What this site needs beside Sphinx, MyST and furo."""
