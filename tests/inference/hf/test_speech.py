"""Speech recognition agrees with transformers' pipeline, for CTC networks and Whisper's, at any rate."""

from __future__ import annotations

import base64
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.signal import resample_poly

from headwater.errors import BadInput, LoadError
from headwater.hf.speech import LEAST_RATE, MOST_RATE, MOST_SAMPLES, MOST_SECONDS, read
from headwater.model import Model
from headwater.runtime.loader import load_model
from tests.inference.hf.folders import RATE, pipeline, wav, wav2vec2, whisper

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wav2vec2(tmp_path_factory.mktemp("wav2vec2"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    made = load_model(f"hf:{folder}", {})
    made.load("cpu")
    return made


def noise(count: int, seed: int = 1) -> Any:
    return np.random.default_rng(seed).normal(scale=0.2, size=count).clip(-1, 1).astype(np.float32)


def heard(model: Model, *files: bytes) -> tuple[list[str], list[float]]:
    found = model(audio=np.array([[file] for file in files], object))
    return [text.decode() for text in found["text"][:, 0]], found["duration"][:, 0].tolist()


def expected(folder: Path, samples: Any) -> str:
    said: str = pipeline("automatic-speech-recognition", str(folder))({"raw": samples, "sampling_rate": RATE})["text"]
    return said


def test_recordings_of_several_lengths_are_heard_as_the_pipeline_hears_them(folder: Path, model: Model) -> None:
    recordings = [noise(RATE), noise(RATE // 2, 2), noise(RATE + 777, 3)]
    texts, seconds = heard(model, *map(wav, recordings))
    assert texts == [expected(folder, samples) for samples in recordings]
    assert len(set(texts)) == 3
    assert seconds == pytest.approx([1, 0.5, 1.0486], abs=1e-3)


def test_channels_are_mixed_rates_changed_and_base64_read(folder: Path, model: Model) -> None:
    left, right = noise(8000), noise(8000, 2)
    stereo = wav(np.stack([left, right], axis=1), 8000)
    wanted = expected(folder, resample_poly((left + right) / 2, 2, 1).astype(np.float32))
    assert heard(model, stereo, base64.b64encode(stereo)) == ([wanted] * 2, [1.0, 1.0])


@pytest.mark.parametrize("kind", [np.int16, np.int32, np.uint8])
def test_integers_are_scaled(model: Model, folder: Path, kind: Any) -> None:
    top = 127.0 if kind is np.uint8 else float(np.iinfo(kind).max)
    whole = np.round(noise(RATE) * top + (128 if kind is np.uint8 else 0)).astype(kind)
    zero, scale = (128.0, 128.0) if kind is np.uint8 else (0.0, top + 1)
    assert heard(model, wav(whole))[0] == [expected(folder, ((whole - zero) / scale).astype(np.float32))]


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (b"ID3\x04 music", "expected a WAV file, got one that begins with b'ID3.*needs the package soundfile"),
        (b"RIFF\x10\x00\x00\x00WAVEdata", "the file can't be read"),
        (wav(np.zeros(0, np.int16)), "expected a recording, got 0 samples"),
    ],
)
def test_what_is_no_recording_is_refused(
    model: Model, monkeypatch: pytest.MonkeyPatch, file: bytes, message: str
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "soundfile", None)
    with pytest.raises(BadInput, match=f"input 'audio': {message}"):
        heard(model, file)


@pytest.mark.parametrize("rate", [LEAST_RATE, 191_999, MOST_RATE])
def test_a_rate_within_bounds_is_taken(model: Model, rate: int) -> None:
    assert heard(model, wav(np.zeros(rate // 10, np.int16), rate))[1] == [pytest.approx(0.1, abs=1e-3)]


@pytest.mark.parametrize("rate", [1, LEAST_RATE - 1, MOST_RATE + 1, 20_000_003])
def test_a_rate_beyond_bounds_is_refused(model: Model, rate: int) -> None:
    expected = f"input 'audio': expected {LEAST_RATE} to {MOST_RATE} samples a second, got {rate}"
    with pytest.raises(BadInput, match=expected):
        heard(model, wav(np.zeros(1_500, np.int16), rate))


def test_a_recording_of_the_most_seconds_is_read() -> None:
    samples, rate = read(wav(np.zeros(MOST_SECONDS * LEAST_RATE, np.uint8), LEAST_RATE))
    assert len(samples) / rate == MOST_SECONDS


def test_a_longer_recording_is_refused(model: Model) -> None:
    length = MOST_SECONDS * LEAST_RATE + LEAST_RATE // 10
    with pytest.raises(BadInput, match=f"input 'audio': expected at most {MOST_SECONDS} seconds, got 3600.1"):
        heard(model, wav(np.zeros(length, np.uint8), LEAST_RATE))


def test_a_packed_recording_is_refused_before_it_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Opened:
        samplerate, channels = 48_000, 8
        frames = MOST_SAMPLES // 8

        def __init__(self, file: object) -> None:
            pass

        def __enter__(self) -> Opened:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def read(self, dtype: str) -> Any:
            assert self.frames * self.channels <= MOST_SAMPLES
            return np.zeros((4, self.channels), dtype)

    monkeypatch.setitem(sys.modules, "soundfile", SimpleNamespace(SoundFile=Opened))
    assert read(b"fLaC")[1] == 48_000
    Opened.frames += 1
    with pytest.raises(BadInput, match=f"at most {MOST_SAMPLES} samples of all channels, got {MOST_SAMPLES + 8}"):
        read(b"fLaC")


def test_the_example_is_a_recording(model: Model) -> None:
    assert model.example is not None
    assert heard(model, model.example["audio"][0].encode())[1] == [1.0]


def test_whisper_hears_as_in_the_pipeline_in_the_language_that_is_asked_for(tmp_path: Path) -> None:
    folder = whisper(tmp_path)
    made = load_model(f"hf:{folder}", {})
    made.load("cpu")
    assert made.transcription is not None
    assert made.transcription.language == "language"
    samples = noise(12_000, 0)
    rows = np.array([[wav(samples)]] * 2, object)
    got = made(audio=rows, parameters={"language": ["", "de"]})["text"][:, 0]
    library = pipeline("automatic-speech-recognition", str(folder))
    said = [
        library({"raw": samples, "sampling_rate": RATE}, **more)["text"]
        for more in ({}, {"generate_kwargs": {"language": "de"}})
    ]
    assert [text.decode() for text in got] == said
    assert said[0] != said[1]
    with pytest.raises(BadInput, match="parameter 'language': Unsupported language: xx"):
        made(audio=rows[:1], parameters={"language": ["xx"]})


def test_a_wrong_option_is_refused(folder: Path) -> None:
    with pytest.raises(LoadError, match=r"options.chunk_length_s: expected seconds, got -1"):
        load_model(f"hf:{folder}", {"chunk_length_s": -1})
