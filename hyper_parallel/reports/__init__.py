# SPDX-License-Identifier: Apache-2.0
"""What a plan would cost, to show: in a terminal, as JSON, as a page and as a picture.

Terminal, page and picture need ``pip install 'hyper-parallel[plan]'``; JSON needs nothing.
"""

from hyper_parallel.reports.report import Headline, Report, build_report

__all__ = ["Headline", "Report", "build_report"]
