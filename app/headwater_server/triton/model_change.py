"""Commands of Triton's repository extension, ``load`` and ``unload`` of a model, at all replicas of a deployment."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from headwater_server.errors import DeadlineExceeded, HeadwaterError, ReplicaLost
from headwater_server.triton.relayed_calls import RelayedRequest, TritonAnswer, TritonReplica

__all__ = ["change_model"]


async def change_model(
    model: str, request: RelayedRequest, replicas: Collection[TritonReplica], timeout_s: float
) -> TritonAnswer:
    """Send a command to all replicas at once, and wait until each has answered or failed. A replica that carries the
    command out keeps the change, even if another replica doesn't.

    Args:
        model: the model's name.
        request: the command.
        replicas: at least one replica.
        timeout_s: seconds in which each replica must answer.

    Returns:
        The refusal of the first replica by name that refuses, or else the last replica's answer.

    Raises:
        DeadlineExceeded: no replica refuses, and a replica doesn't answer in time.
        ReplicaLost: no replica refuses, and a replica ends before it answers.
    """
    named = sorted(replicas, key=lambda replica: replica.route.id)
    outcomes = await asyncio.gather(*(_outcome(model, request, replica, timeout_s) for replica in named))
    answers = [outcome for outcome in outcomes if isinstance(outcome, TritonAnswer)]
    for answer in answers:
        if answer.status != 200:
            return answer
    for outcome in outcomes:
        if isinstance(outcome, HeadwaterError):
            raise outcome
    return answers[-1]


async def _outcome(
    model: str, request: RelayedRequest, replica: TritonReplica, timeout_s: float
) -> TritonAnswer | HeadwaterError:
    action = request.path.rpartition("/")[2]
    subject = f"model `{model}`: replica {replica.route.id}"
    others = "the other replicas keep what they did"
    try:
        return await asyncio.wait_for(_answer(request, replica), timeout_s)
    except asyncio.TimeoutError:
        fix = f"send {action} again, with a larger load_timeout_s if it takes that long, or reload the deployment"
        return DeadlineExceeded(
            f"{subject} gave no answer to {action} within load_timeout_s = {timeout_s:g} s, and {others}; {fix}"
        )
    except ReplicaLost as error:
        return error.again(f"{subject} ended before it answered {action}, and {others}; send {action} again")


async def _answer(request: RelayedRequest, replica: TritonReplica) -> TritonAnswer:
    upstream = await replica.client.connect()
    try:
        await upstream.send(request.method, request.path, request.body)
        return TritonAnswer.of(upstream, await upstream.whole())
    finally:
        upstream.release()
