# SPDX-License-Identifier: Apache-2.0
"""A report as JSON, and the schema that describes it."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from hyper_parallel.reports.report import Report


def to_json(report: Report) -> str:
    """The report as text.

    Args:
        report: The report.

    Returns:
        JSON that :func:`schema` describes.
    """
    return json.dumps(report.to_dict(), indent=1, allow_nan=False)


def write_json(report: Report, path: str | Path) -> None:
    """Write the report.

    Args:
        report: The report.
        path: Where.
    """
    Path(path).write_text(to_json(report) + "\n", encoding="utf-8")


def schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of a report, with a description of every field."""
    text = files("hyper_parallel.reports").joinpath("schema.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found
