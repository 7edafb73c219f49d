"""Speech recognition with a transformers folder: a CTC network, or Whisper."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch

from headwater.errors import BadInput
from headwater.hf.files import file_of
from headwater.hf.folder import HfFolder
from headwater.hf.texts import as_rows
from headwater.model import Model, Parameter, Tensor, Transcription
from headwater.wire.arrays import Array

__all__ = ["SpeechRecognition", "read"]

LEAST_RATE: Final = 4_000
MOST_RATE: Final = 192_000
"""Hz. If two rates have no common divisor, the filter that resamples has 20 coefficients for each Hz of the larger
rate."""
MOST_SECONDS: Final = 3_600
MOST_SAMPLES: Final = 2**27
"""The most samples of all channels of a recording: 512 MiB as FP32. Some formats compress zeros a thousandfold."""


class SpeechRecognition(Model):
    """Transcribes a recording, as transformers' pipeline does.

    Recordings are computed successively, not as a batch, since padding would change the results of some networks. Only
    a single recording is unpacked at a time.

    Args:
        folder: a folder with the weights of a CTC network such as Wav2Vec2, or of Whisper, and its feature extractor.
        chunk_length_s: length in seconds of the pieces into which transformers cuts long recordings, meant for CTC
            networks; 0: they are not cut.

    Inputs:
        audio: BYTES [1], a WAV file, or any file that the package soundfile reads if it is installed; or this file in
            base64, or as a data URL. The recording is mixed to a single channel and resampled to the network's rate.
            Limits: 4,000 to 192,000 samples a second, at most 3,600 seconds, and at most 2^27 samples of all channels.

    Outputs:
        text: BYTES [1], UTF-8.
        duration: FP32 [1], seconds.

    Parameters:
        language: per row; the language of the recording, such as ``en``; empty: Whisper detects it. Only with Whisper.

    Raises:
        LoadError: the folder can't be served for this task.
    """

    inputs = (Tensor("audio", "BYTES", [1]),)
    outputs = (Tensor("text", "BYTES", [1]), Tensor("duration", "FP32", [1]))

    def __init__(self, folder: HfFolder, chunk_length_s: float = 0) -> None:
        self._folder = folder
        if isinstance(chunk_length_s, bool) or not isinstance(chunk_length_s, (int, float)) or chunk_length_s < 0:
            reason = f"options.chunk_length_s: expected seconds, got {chunk_length_s!r:.80}"
            raise folder.error(reason, "correct or remove `options.chunk_length_s`")
        self._chunk_length_s = chunk_length_s
        self._is_ctc = folder.architecture.endswith("ForCTC")
        language = Parameter("language", "str", "", per="row", description="Such as en; empty: the model detects it")
        # These attributes depend on the folder.
        self.parameters = () if self._is_ctc else (language,)  # type: ignore[misc]
        self.transcription = Transcription(  # type: ignore[misc]
            "audio", "text", "duration", language=None if self._is_ctc else "language"
        )
        self.example = {"audio": [_silence()]}  # type: ignore[misc]

    def load(self, device: str) -> None:
        folder = self._folder
        network = folder.network("AutoModelForCTC" if self._is_ctc else "AutoModelForSpeechSeq2Seq", device)
        extractor = folder.load("AutoFeatureExtractor")
        self._rate = int(extractor.sampling_rate)
        self._pipeline = folder.need("transformers").AutomaticSpeechRecognitionPipeline(
            model=network, feature_extractor=extractor, tokenizer=folder.load("AutoTokenizer"),
            device=torch.device(device), **({"chunk_length_s": self._chunk_length_s} if self._chunk_length_s else {}),
        )  # fmt: skip

    @torch.inference_mode()
    def __call__(self, audio: Array, parameters: Mapping[str, Sequence[str]] | None = None) -> dict[str, Array]:
        files = audio[:, 0].tolist()
        for raw in files:
            read(raw)  # a file that can't be read fails before any file is computed
        languages = [""] * len(files) if parameters is None else parameters["language"]
        heard = [self._heard(raw, language) for raw, language in zip(files, languages, strict=True)]
        return {
            "text": as_rows([text for text, _ in heard]),
            "duration": np.array([[seconds] for _, seconds in heard], np.float32),
        }

    def _heard(self, raw: bytes, language: str) -> tuple[str, float]:
        """The text of a recording, and the recording's length in seconds."""
        samples, rate = read(raw)
        return self._hear(_resampled(samples, rate, self._rate), language), len(samples) / rate

    def _hear(self, samples: Array, language: str) -> str:
        more = {"generate_kwargs": {"language": language}} if language else {}
        try:
            said = self._pipeline({"raw": samples, "sampling_rate": self._rate}, **more)
        except ValueError as error:
            if language:
                raise BadInput(f"parameter 'language': {error}") from error
            raise
        return str(said["text"])


def read(raw: bytes) -> tuple[Array, int]:
    """A file's samples mixed to a single channel, FP32 [n], and its rate in Hz; raises `BadInput` if it can't be
    read, or `_check_size` refuses it."""
    file = file_of("audio", raw)
    try:
        samples, rate = _decoded(file)
    except BadInput:
        raise
    except Exception as error:  # these readers raise errors of many classes
        raise BadInput(f"input 'audio': the file can't be read: {error}") from error
    mono = samples if samples.ndim == 1 else samples.mean(axis=1)
    return mono.astype(np.float32), rate


def _decoded(file: bytes) -> tuple[Array, int]:
    """Samples from -1 to 1, [n] or [n, channels], and the rate in Hz."""
    if file[:4] == b"RIFF" and file[8:12] == b"WAVE":
        from scipy.io import wavfile

        rate, samples = wavfile.read(io.BytesIO(file))  # in the file's type, so at most twice the file's size
        _check_size(rate, len(samples), samples.size)
        if samples.dtype.kind == "f":
            return samples, int(rate)
        if samples.dtype == np.uint8:  # the only unsigned integers in WAV files
            return (samples.astype(np.float32) - 128) / 128, int(rate)
        return samples.astype(np.float32) / -float(np.iinfo(samples.dtype).min), int(rate)
    try:
        import soundfile
    except ImportError:
        start = bytes(file[:4])
        raise BadInput(
            f"input 'audio': expected a WAV file, got one that begins with {start!r}; for other formats the server "
            "needs the package soundfile"
        ) from None
    with soundfile.SoundFile(io.BytesIO(file)) as opened:
        _check_size(opened.samplerate, opened.frames, opened.frames * opened.channels)
        return opened.read(dtype="float32"), int(opened.samplerate)


def _check_size(rate: int, length: int, samples: int) -> None:
    """Refuse a recording that is too large to be unpacked.

    Args:
        rate: in Hz.
        length: number of samples of a channel.
        samples: number of samples of all channels.

    Raises:
        BadInput: the recording is too large or empty, or its rate is out of range.
    """
    if not length:
        raise BadInput(f"input 'audio': expected a recording, got 0 samples at {rate} Hz")
    if not LEAST_RATE <= rate <= MOST_RATE:
        raise BadInput(f"input 'audio': expected {LEAST_RATE} to {MOST_RATE} samples a second, got {rate}")
    if length > MOST_SECONDS * rate:
        raise BadInput(f"input 'audio': expected at most {MOST_SECONDS} seconds, got {length / rate:.1f}")
    if samples > MOST_SAMPLES:
        raise BadInput(f"input 'audio': expected at most {MOST_SAMPLES} samples of all channels, got {samples}")


def _resampled(samples: Array, rate: int, wanted: int) -> Array:
    if rate == wanted:
        return samples
    from scipy.signal import resample_poly

    shared = math.gcd(rate, wanted)
    return np.asarray(resample_poly(samples, wanted // shared, rate // shared), np.float32)


def _silence() -> str:
    """A second without sound, as the base64 of a WAV file."""
    import base64
    import wave

    file = io.BytesIO()
    with wave.open(file, "wb") as wav:
        wav.setnchannels(1)
        wav.setsampwidth(2)
        wav.setframerate(8000)
        wav.writeframes(bytes(2 * 8000))
    return base64.b64encode(file.getvalue()).decode()
