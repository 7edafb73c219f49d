"""Renders the chart with Helm's library, in a process of its own: Go's runtime and its threads stay for good.

``python -m tests.deploy.rendering`` reads a JSON list of values and writes a JSON list of what they make: a template's
text by its file, or ``{"refused": the message}``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import helm_python

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "headwater"


def main() -> None:
    with helm_python.Chart.load(CHART) as chart:
        json.dump([_one(chart, values) for values in json.load(sys.stdin)], sys.stdout)


def _one(chart: helm_python.Chart, values: dict[str, Any]) -> dict[str, str]:
    try:
        return chart.render(values, name="headwater", namespace="models")
    except helm_python.HelmError as error:
        return {"refused": str(error)}


if __name__ == "__main__":
    main()
