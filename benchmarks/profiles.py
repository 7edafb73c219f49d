"""Whether the configurations that ``headwater plan`` recommended serve and give what is stated for them.

``python -m benchmarks.profiles PLAN.json``: of a plan's report (``--json``). Serves each profile's file as a user
would, waits until all replicas are ready, and puts the load on it that its file names, with ``headwater bench``. The
status is 1 if one doesn't start, a request fails, or the rate is more than 15 % from the stated one.

``--smoke`` makes a small plan of its own first, and compares nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx

from benchmarks.servers import free_port, running
from benchmarks.smoke import parse_with_smoke
from headwater_server.cli.plan.measuring import RATE_TOLERANCE

READY_TIMEOUT_S: Final = 240.0
HEADWATER: Final = (sys.executable, "-m", "headwater_server")
SMALL_PLAN: Final = (
    "headwater.zoo.scale:Scale", "--batch-sizes", "4", "--instances", "1", "--replicas", "1", "--seconds", "0.5",
    "--no-verify",
)  # fmt: skip
ROW: Final = "{:<12} {:>16} {:>10} {:>10} {:>22} {:>8}  {}"


class Stated(NamedTuple):
    """What a plan says of one profile."""

    name: str
    size: str
    file: Path
    rate: float
    """Measured, or predicted if the plan did not run it."""
    bench: list[str]


def read_plan(path: Path) -> tuple[str, list[Stated]]:
    """The unit of its rates, and its profiles but those that fit nowhere."""
    told = json.loads(path.read_bytes())
    found = []
    for one in told["profiles"]:
        if one["file"] is None:
            print(f"{one['name']}: {one['note']}")
            continue
        size = f"{one['rows']} × {one['instances']} × {one['replicas']}"
        rate = (one["measured"] or one["predicted"])["rate"]
        file = Path(one["file"])
        found.append(Stated(one["name"], size, file if file.exists() else path.parent / file.name, rate, one["bench"]))
    return told["unit"], found


def measure(one: Stated, unit: str, folder: Path, *more: str) -> dict[str, float]:
    """Serve a profile, and bench it: median, least and greatest of the rates.

    Args:
        one: the profile.
        unit: of its rate.
        folder: for what is written meanwhile.
        more: options of ``headwater bench``.

    Raises:
        RuntimeError: it doesn't start, or requests failed.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    report = folder / f"{one.name}.json"
    serve = [*HEADWATER, "serve", str(one.file), "--host", "127.0.0.1", "--port", str(port)]
    with running(serve, f"{url}/v2/health/ready", log=folder / f"{one.name}.log"):
        wait_for_all(url)
        arguments = [url if part == "URL" else part for part in one.bench]
        bench = [*HEADWATER, "bench", *arguments, *more, "--json", str(report)]
        ended = subprocess.run(bench, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise RuntimeError(f"headwater bench ended with status {ended.returncode}: {ended.stdout}{ended.stderr}")
    (result,) = json.loads(report.read_bytes())["points"]
    summary: dict[str, float] = result["summary"]["tokens_per_s" if unit == "tokens/s" else "requests_per_s"]
    return summary


def wait_for_all(url: str) -> None:
    """Wait until every replica is ready: a model is from its first one on.

    Raises:
        RuntimeError: they aren't in time.
    """
    until_s = time.monotonic() + READY_TIMEOUT_S
    with httpx.Client(trust_env=False) as client:
        while True:
            models: list[dict[str, Any]] = client.get(f"{url}/v2/repository/index").json()
            counts = [one["replicas"] for one in models if one.get("replicas")]
            if counts and all(one["ready"] >= one["wanted"] for one in counts):
                return
            if time.monotonic() > until_s:
                raise RuntimeError(f"not all replicas are ready after {READY_TIMEOUT_S:g} s: {counts}")
            time.sleep(0.1)


def small_plan(folder: Path) -> Path:
    """Its report."""
    report = folder / "plan.json"
    subprocess.run(
        [*HEADWATER, "plan", *SMALL_PLAN, "--out", str(folder), "--json", str(report)], check=True, capture_output=True
    )
    return report


def main() -> None:
    """Measure all profiles, and compare."""
    parser = argparse.ArgumentParser(description="Serve the profiles of a plan, and compare their rates with it.")
    parser.add_argument("plan", nargs="?", type=Path, metavar="PLAN.json", help="of headwater plan --json")
    options = parse_with_smoke(parser)
    if (options.plan is None) != options.smoke:
        parser.error("expected a plan's report, or --smoke without one")
    off = []
    with tempfile.TemporaryDirectory(prefix="hw-profiles-") as name:
        unit, profiles = read_plan(small_plan(Path(name)) if options.smoke else options.plan)
        print(ROW.format("PROFILE", "SIZE", "STATED", "MEASURED", "REPEATS", "ERROR", unit))
        for one in profiles:
            try:
                rate = measure(one, unit, Path(name), *(("--repeats", "1") if options.smoke else ()))
            except RuntimeError as failure:
                off.append(one.name)
                print(f"{one.name}: {failure}")
                continue
            error = one.rate / rate["median"] - 1
            is_off = abs(error) > RATE_TOLERANCE and not options.smoke
            if is_off:
                off.append(one.name)
            between = f"{rate['min']:.4g} to {rate['max']:.4g}"
            shown = (f"{one.rate:.4g}", f"{rate['median']:.4g}", between, f"{error:+.1%}")
            print(ROW.format(one.name, one.size, *shown, "too far off" if is_off else ""), flush=True)
    if off:
        sys.exit(f"not as stated: {', '.join(off)}")


if __name__ == "__main__":
    main()
