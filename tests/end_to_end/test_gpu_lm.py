"""A language model on a GPU."""

from __future__ import annotations

import pytest

from tests.end_to_end.conftest import language_model
from tests.running import serve, wait_for
from tests.token_streams import is_idle, run, text_of, together, whole

PROMPTS = ["import os\n\n\ndef read(", "class Stack:\n    def __init__(self", "for line in ", "try:\n    import "]


@pytest.mark.gpu
def test_a_language_model_on_a_gpu_says_what_it_says_on_the_cpu() -> None:
    """Greedily, by logarithms of probabilities: where two tokens are near each other, the texts may differ."""
    config = {"deployments": {name: {**language_model(), "device": name} for name in ("cuda", "cpu")}}
    with serve(config) as running:

        def ask(device: str, count: int) -> list[tuple[list[str], list[float], list[float]]]:
            greedy = {"model": device, "max_tokens": 40, "temperature": 0, "logprobs": 2}
            bodies = [{**greedy, "prompt": PROMPTS[row % len(PROMPTS)]} for row in range(count)]
            found = []
            for stream in run(together([whole(running, body) for body in bodies])):
                assert stream.error is None
                told = [choice["logprobs"] for event in stream.events for choice in event["choices"]]
                told = [one for one in told if one]
                tokens = [token for one in told for token in one["tokens"]]
                logprobs = [logprob for one in told for logprob in one["token_logprobs"]]
                tops = [sorted(top.values()) for one in told for top in one["top_logprobs"]]
                assert "".join(tokens) == text_of(stream.events)
                found.append((tokens, logprobs, [top[-1] - top[0] for top in tops]))
            return found

        on_cpu = ask("cpu", len(PROMPTS))
        for count in (1, 32):
            for row, (tokens, logprobs, _) in enumerate(ask("cuda", count)):
                expected, expected_logprobs, leads = on_cpu[row % len(PROMPTS)]
                pairs = enumerate(zip(tokens, expected, strict=True))
                differing = next((place for place, (got, wanted) in pairs if got != wanted), len(tokens))
                assert differing == len(tokens) or leads[differing] < 1e-3
                assert logprobs[:differing] == pytest.approx(expected_logprobs[:differing], abs=5e-3)
        wait_for(lambda: is_idle(running, "cuda"), 60, "the engine to be idle")
