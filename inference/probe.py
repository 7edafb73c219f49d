"""Tries models without loading them: imports and constructs each, and reads its declarations.

``python -m inference.probe`` reads a JSON list of `Request` on its standard input and prints, as each is done, one
JSON `Finding` a line. It is a process of its own because a model's module may do anything: one that ends the process
leaves those findings that were printed before it.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from typing import Any

import msgspec

from inference.environment import Problem
from inference.errors import DeclarationError, ReplicaError
from inference.loader import LoadError, construct, load_class, problem_of
from inference.replica import choose_device
from inference.signature import Signature

__all__ = ["Finding", "Request", "main", "probe"]


class Request(msgspec.Struct, frozen=True):
    """What to try; the fields are a deployment's."""

    name: str
    model: str
    options: dict[str, Any] = {}
    max_batch_size: int = 1
    device: str = "auto"
    path: tuple[str, ...] = ()
    """Put first on ``sys.path``."""
    working_dir: str | None = None
    """Where relative paths in the user's code start."""


class Finding(msgspec.Struct, frozen=True):
    """What came of one request."""

    name: str
    signature: Signature | None = None
    problems: tuple[dict[str, str], ...] = ()
    """Each an `inference.environment.Problem`."""


def probe(request: Request) -> Finding:
    """Try one model. Its module stays imported, and ``sys.path`` and the working folder stay changed."""
    sys.path[:0] = [entry for entry in request.path if entry not in sys.path]
    if request.working_dir is not None:
        os.chdir(request.working_dir)
    title = f"deployment {request.name}"
    problems = []
    signature = None
    try:
        model = construct(load_class(request.model), request.options)
        signature = Signature.of(model, name=request.name, max_batch_size=request.max_batch_size)
    except LoadError as error:
        problems.append(Problem(title, f"{request.model}: {error.problem.reason}", error.problem.mend))
    except DeclarationError as error:
        problems.append(Problem(title, f"{request.model}: {error}", "correct the declaration"))
    except Exception as error:  # the declarations may be properties, which run the user's code
        problem = problem_of(error, title, "reading its declarations")
        problems.append(Problem(title, f"{request.model}: {problem.reason}", problem.mend))
    if request.device.startswith("cuda"):
        problems += _device_problems(title, request.device)
    return Finding(request.name, signature, tuple(asdict(problem) for problem in problems))


def _device_problems(title: str, wanted: str) -> list[Problem]:
    try:
        choose_device(wanted, uses_torch=True)
    except ModuleNotFoundError as error:
        return [Problem(title, f"device {wanted!r} needs torch: {error}", f"{sys.executable} -m pip install torch")]
    except ReplicaError:
        import torch

        mend = "set `device: cpu` or `auto`"
        if torch.version.cuda is None:
            reason = f"torch {torch.__version__} is a build without CUDA"
            mend = f"install a CUDA build of torch, or {mend}"
        elif not torch.cuda.is_available():
            reason = "torch finds no GPU that it can use"
            mend = f"check the driver (nvidia-smi), a container's --gpus and CUDA_VISIBLE_DEVICES, or {mend}"
        else:
            count = torch.cuda.device_count()
            reason = f"there {'is 1 GPU' if count == 1 else f'are {count} GPUs'}, and the first is cuda:0"
        return [Problem(title, f"device {wanted!r} was asked for, but {reason}", mend)]
    return []


def main() -> None:
    """Answer the requests on standard input."""
    requests = msgspec.json.decode(sys.stdin.buffer.read(), type=list[Request])
    # What a model prints while it is imported must not land between the findings.
    with os.fdopen(os.dup(1), "wb") as output:
        os.dup2(2, 1)
        for request in requests:
            output.write(msgspec.json.encode(probe(request)) + b"\n")
            output.flush()


if __name__ == "__main__":
    main()
