"""The images, recordings and videos in a request for vLLM: each is found, checked, and given the form that vLLM takes.

Source: OpenAI's API reference, and the parts that vLLM 0.32 takes.
"""

from __future__ import annotations

import re
from binascii import a2b_base64
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

from headwater_server.codecs.faults import at, shown
from headwater_server.vllm.image_size import FORMATS, pixel_count

__all__ = ["LinkedMedia", "Media"]

Kind = Literal["image", "audio", "video"]

MAX_PARTS: Final = 128
"""Maximum number of images (frames of a video in JPEG, too), recordings and videos in a request."""
MAX_PIXELS: Final = 40_000_000
"""Maximum number of pixels of an image."""
MAX_ALL_PIXELS: Final = 400_000_000
"""Maximum number of pixels of a request's images together: vLLM decodes them at once, to 3 bytes a pixel."""
HEAD_BYTES: Final = 1 << 20
"""An image must tell its size in its first bytes, up to this number."""

_PIECE_CHARACTERS: Final = 1 << 16
"""Base64 is checked in pieces, between which other threads can run; a multiple of 4."""
_TYPE_CHARACTERS: Final = 200
"""Maximum length of what stands before the comma of a ``data:`` URL."""
_KINDS: Final[dict[str, Kind]] = {
    "image_url": "image", "input_image": "image", "audio_url": "audio", "video_url": "video",
}  # fmt: skip
"""The kind of the parts that hold a URL, by their type."""
_EMBEDDED: Final = frozenset({"image_pil", "image_embeds", "audio_embeds", "video_embeds", "prompt_embeds"})
"""Types of parts that hold objects or tensors of the model's inside."""
_BY_KEY: Final = ("image_url", *sorted(_EMBEDDED), "audio_url", "input_audio", "video_url")
"""Fields that tell the type of a part without a type, as vLLM looks for them."""
_SUFFIXES: Final[dict[str, Kind]] = {
    **dict.fromkeys(("png", "jpg", "jpeg", "gif", "webp", "bmp"), "image"),
    **dict.fromkeys(("wav", "mp3", "flac", "ogg", "opus", "m4a", "aac"), "audio"),
    **dict.fromkeys(("mp4", "mov", "webm", "mkv", "avi", "mpeg"), "video"),
}  # fmt: skip
"""The kind of a file by the end of its name, if its type isn't told."""
_FORMAT: Final = re.compile(r"[a-z0-9][a-z0-9.+-]{0,31}", re.IGNORECASE)


class LinkedMedia(NamedTuple):
    """An image, recording or video that a request names by a URL which must be fetched."""

    path: str
    """The path of the field with the URL."""
    url: str
    kind: Kind
    place: dict[str, Any]
    """The object in the body for vLLM whose field ``url`` gets the ``data:`` URL."""


class Media:
    """The media of one request.

    Args:
        fetches: whether URLs of other schemes than ``data:`` may be named; they are collected in `links`.
    """

    def __init__(self, *, fetches: bool) -> None:
        self.links: list[LinkedMedia] = []
        """What must be fetched before the request can be sent; see `put`."""
        self._fetches = fetches
        self._count = self._pixels = 0

    def read(self, messages: object) -> object:
        """A copy of a chat's messages in which each part is in the form that vLLM takes. A value that is no list is
        returned as it is, as are other parts.

        Raises:
            BadRequest: a part can't be passed to vLLM, or crosses a bound. The message names the field by its path.
        """
        if not isinstance(messages, list):
            return messages
        return [self._message(f"messages[{place}].content", message) for place, message in enumerate(messages)]

    def put(self, link: LinkedMedia, url: str) -> None:
        """Put what was fetched into the request, as a ``data:`` URL.

        Raises:
            BadRequest: it isn't what the part expects, or crosses a bound.
        """
        self._check(link.path, url, link.kind)
        link.place["url"] = url

    def _message(self, path: str, message: object) -> object:
        if not isinstance(message, dict) or not isinstance(message.get("content"), list):
            return message
        parts = [self._part(f"{path}[{place}]", part) for place, part in enumerate(message["content"])]
        return {**message, "content": parts}

    def _part(self, path: str, part: object) -> object:
        if not isinstance(part, dict):
            return part
        if part.get("uuid") is not None:  # vLLM would look for it among the media of all clients
            raise at(f"{path}.uuid", None, "expected it absent, since this server keeps no media; send the data")
        kind = part.get("type")
        if kind is None:
            present = [key for key in _BY_KEY if key in part]
            kind = next((key for key in present if part[key] is not None), present[0] if present else None)
        if not isinstance(kind, str):
            return part
        if kind in _EMBEDDED:
            raise at(f"{path}.type", None, f"expected an image, a recording or a video itself, got {shown(kind)}")
        if kind == "input_audio":
            return self._recording(path, part)
        if kind in ("file", "input_file"):
            return self._file(path, part, kind)
        return self._linked(path, part, kind) if kind in _KINDS else part

    def _linked(self, path: str, part: dict[str, Any], kind: str) -> dict[str, Any]:
        """A part of one of the `_KINDS`: its URL is the field itself, or the field's ``url``."""
        field = f"{_KINDS[kind]}_url"
        source, path_of_url = part.get(field), f"{path}.{field}"
        _refuse_file_id(path, part)
        details = {key: part[key] for key in ("detail",) if part.get(key) is not None}
        if isinstance(source, dict):
            _refuse_file_id(path_of_url, source)
            details |= {key: value for key, value in source.items() if value is not None}
            source, path_of_url = details.pop("url", None), f"{path_of_url}.url"
        more = {key: value for key, value in part.items() if key not in ("type", "detail", "file_id", field)}
        return self._formed(path_of_url, source, _KINDS[kind], details, more)

    def _formed(
        self, path: str, url: object, kind: Kind, details: Mapping[str, Any], more: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The part of a URL in the form that vLLM takes. ``path``: the field with the URL; ``details``: the fields
        beside the URL; ``more``: other fields of the part."""
        if not isinstance(url, str):
            raise at(path, None, f"expected the URL of the {_word(kind)}, got {shown(url)}")
        self._count_part(path)
        field = f"{kind}_url"
        place: dict[str, Any] = {**details, "url": url}
        if url[:5].lower() == "data:":
            self._check(path, url, kind)
        elif self._fetches:
            self.links.append(LinkedMedia(path, url, kind, place))
        else:  # the rest of a URL may be secret
            scheme = shown(url.partition(":")[0])
            raise at(
                path, None, f"expected a data: URL, since this server fetches no URLs, got one that begins {scheme}"
            )
        return {**more, "type": field, field: place}

    def _recording(self, path: str, part: dict[str, Any]) -> dict[str, Any]:
        path = f"{path}.input_audio"
        source = part.get("input_audio")
        if not isinstance(source, dict):
            raise at(path, None, f"expected an object with data and format, got {shown(source)}")
        data, format = source.get("data"), source.get("format")
        if not isinstance(format, str) or not _FORMAT.fullmatch(format):
            raise at(f"{path}.format", None, f"expected a format such as wav or mp3, got {shown(format)}")
        if not isinstance(data, str):
            raise at(f"{path}.data", None, f"expected the recording in base64, got {shown(data)}")
        self._count_part(path)
        _decoded_head(f"{path}.data", data, 0, len(data))
        return {**part, "type": "input_audio"}

    def _file(self, path: str, part: dict[str, Any], kind: str) -> dict[str, Any]:
        source: Any = part if kind == "input_file" else part.get("file")
        path = path if kind == "input_file" else f"{path}.file"
        if not isinstance(source, dict):
            raise at(path, None, f"expected an object with file_data and filename, got {shown(source)}")
        _refuse_file_id(path, source)
        field = "file_url" if source.get("file_data") is None and "file_url" in source else "file_data"
        path, data = f"{path}.{field}", source.get(field)
        if not isinstance(data, str):
            raise at(path, None, f"expected the file as a data: URL, or in base64, got {shown(data)}")
        if data[:5].lower() == "data:":
            type = data[5 : 5 + _TYPE_CHARACTERS].partition(",")[0].partition(";")[0].lower()
            media_kind = next((one for one in _SUFFIXES.values() if type.startswith(f"{one}/")), None)
        else:
            name_of_file = data.partition("?")[0].partition("#")[0] if field == "file_url" else source.get("filename")
            type = name_of_file.rpartition(".")[2].lower() if isinstance(name_of_file, str) else ""
            media_kind = _SUFFIXES.get(type)
            if field == "file_data":
                data = f"data:{media_kind}/{type};base64,{data}"
        if media_kind is None:
            expected = "expected an image, a recording or a video, by a data: URL's type or by the file's name"
            raise at(path, None, f"{expected}, got {shown(type)}; send a text as a part of type text")
        return self._formed(path, data, media_kind, {}, {})

    def _count_part(self, path: str) -> None:
        self._count += 1
        if self._count > MAX_PARTS:
            raise at(path, None, f"expected at most {MAX_PARTS} images, recordings and videos, got more")

    def _check(self, path: str, url: str, kind: Kind) -> None:
        """Check a ``data:`` URL: an image by its bytes, others by their type only."""
        comma = url.find(",", 5, 5 + _TYPE_CHARACTERS)
        types, _, encoding = url[5:comma].rpartition(";")
        if comma < 0 or encoding != "base64":
            raise at(path, None, f"expected a URL such as data:{kind}/...;base64,..., got {shown(url[:40])}")
        type = types.partition(";")[0].lower()
        if kind == "image":
            self._check_image(path, type, _decoded_head(path, url, comma + 1, len(url)))
        elif not type.startswith(f"{kind}/"):
            raise at(path, None, f"expected data of a type {kind}/..., got {shown(type)}")
        elif type == "video/jpeg":  # vLLM's form of a video: its frames, between commas
            while comma < len(url):
                start, comma = comma + 1, url.find(",", comma + 1)
                comma = len(url) if comma < 0 else comma
                self._count_part(path)
                self._check_image(path, "a frame", _decoded_head(path, url, start, comma))
        else:
            _decoded_head(path, url, comma + 1, len(url))

    def _check_image(self, path: str, type: str, head: bytes) -> None:
        pixels = pixel_count(head)
        if pixels is None:
            got = f"got {shown(type)} that begins {head[:8]!r}"
            raise at(path, None, f"expected an image in {FORMATS} whose first {HEAD_BYTES} bytes tell its size, {got}")
        if pixels > MAX_PIXELS:
            raise at(path, None, f"expected at most {MAX_PIXELS} pixels, got {pixels}; make the image smaller")
        self._pixels += pixels
        if self._pixels > MAX_ALL_PIXELS:
            raise at(path, None, f"expected at most {MAX_ALL_PIXELS} pixels in all images together, got more")


def _decoded_head(path: str, text: str, start: int, end: int) -> bytes:
    """Check that a part of a text is base64. Returns the first `HEAD_BYTES` of what it stands for, or some more.

    Raises:
        BadRequest: it is empty, or not base64 with padding and without other characters.
    """
    head = bytearray()
    is_right = end > start and (end - start) % 4 == 0
    for place in range(start, end if is_right else start, _PIECE_CHARACTERS):
        piece = text[place : min(place + _PIECE_CHARACTERS, end)]
        padding = len(piece) - len(piece.rstrip("=")) if place + len(piece) == end else 0
        try:
            data = a2b_base64(piece)  # leaves other characters out
        except ValueError:
            data = b""
        if padding > 2 or len(data) != len(piece) // 4 * 3 - padding:
            is_right = False
            break
        if len(head) < HEAD_BYTES:
            head += data
    if not is_right:
        raise at(path, None, "expected base64, with its padding and without line ends, got something else")
    return bytes(head)


def _refuse_file_id(path: str, fields: Mapping[str, Any]) -> None:
    if fields.get("file_id") is not None:
        raise at(f"{path}.file_id", None, "expected it absent, since this server keeps no files; send the data")


def _word(kind: Kind) -> str:
    return "recording" if kind == "audio" else kind
