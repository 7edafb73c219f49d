"""Images, recordings and videos in a request: what goes to vLLM, and what is refused before."""

from __future__ import annotations

import base64
import copy
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater_server.errors import BadRequest
from headwater_server.vllm.media_parts import MAX_ALL_PIXELS, MAX_PARTS, MAX_PIXELS
from headwater_server.vllm.requests import VllmRequest, read_request
from tests.app.vllm.pictures import data_url, png, png_header, png_url

IMAGE = png_url(2, 2)
RAW = IMAGE.partition(",")[2]
SOUND = data_url(b"RIFF....WAVE", "audio/wav")
VIDEO = data_url(b"....ftyp", "video/mp4")
WAV = base64.b64encode(b"RIFF....WAVE").decode()
FRAMES = f"data:video/jpeg;base64,{RAW},{RAW}"
"""vLLM's form of a video; its frames may be of any format."""


def read(*parts: Any, fetches: bool = False) -> VllmRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": list(parts)}]}
    before = copy.deepcopy(body)
    request = read_request("chat", body, fetches=fetches)
    assert body == before  # the client's body isn't changed
    return request


def sent(part: Any) -> Any:
    """The part that vLLM gets."""
    request = read(part)
    assert request.media is not None
    assert request.media.links == []
    return request.body["messages"][0]["content"][0]


def fault(*parts: Any, fetches: bool = False) -> str:
    with pytest.raises(BadRequest) as caught:
        read(*parts, fetches=fetches)
    assert caught.value.field is not None
    assert caught.value.message.startswith(caught.value.field)
    return caught.value.message.removeprefix("messages[0].content")


CHAT_IMAGE = {"type": "image_url", "image_url": {"url": IMAGE}}


@pytest.mark.parametrize(
    ("part", "chat"),
    [
        (CHAT_IMAGE, CHAT_IMAGE),
        ({"type": "image_url", "image_url": IMAGE}, CHAT_IMAGE),
        ({"image_url": IMAGE}, CHAT_IMAGE),
        ({"image_url": {"url": IMAGE}, "audio_url": None, "type": None}, {**CHAT_IMAGE, "audio_url": None}),
        ({"type": "input_image", "image_url": IMAGE, "file_id": None}, CHAT_IMAGE),
        (
            {"type": "input_image", "image_url": IMAGE, "detail": "low"},
            {"type": "image_url", "image_url": {"url": IMAGE, "detail": "low"}},
        ),
        (
            {
                "type": "image_url",
                "image_url": {"url": IMAGE, "detail": "high"},
                "cache_control": {"type": "ephemeral"},
            },
            {
                "type": "image_url",
                "image_url": {"url": IMAGE, "detail": "high"},
                "cache_control": {"type": "ephemeral"},
            },
        ),
        ({"type": "image_url", "image_url": {"url": IMAGE, "detail": None}}, CHAT_IMAGE),
        ({"type": "file", "file": {"file_data": IMAGE, "filename": "a"}}, CHAT_IMAGE),
        ({"type": "input_file", "file_data": IMAGE, "filename": "a.pdf"}, CHAT_IMAGE),
        ({"type": "input_file", "file_url": IMAGE}, CHAT_IMAGE),
        ({"type": "file", "file": {"file_data": RAW, "filename": "A.PNG"}}, CHAT_IMAGE),
        ({"type": "audio_url", "audio_url": {"url": SOUND}}, {"type": "audio_url", "audio_url": {"url": SOUND}}),
        ({"audio_url": SOUND}, {"type": "audio_url", "audio_url": {"url": SOUND}}),
        ({"type": "video_url", "video_url": VIDEO}, {"type": "video_url", "video_url": {"url": VIDEO}}),
        ({"type": "video_url", "video_url": FRAMES}, {"type": "video_url", "video_url": {"url": FRAMES}}),
        (
            {"type": "input_audio", "input_audio": {"data": WAV, "format": "wav"}},
            {"type": "input_audio", "input_audio": {"data": WAV, "format": "wav"}},
        ),
        (
            {"type": "file", "file": {"file_data": WAV, "filename": "a.wav"}},
            {"type": "audio_url", "audio_url": {"url": SOUND}},
        ),
        ({"type": "file", "file": {"file_data": VIDEO}}, {"type": "video_url", "video_url": {"url": VIDEO}}),
    ],
)
def test_each_form_becomes_vllms(part: Any, chat: Any) -> None:
    assert sent(part) == chat


def test_other_parts_go_on_as_they_are() -> None:
    for part in (
        "x",
        None,
        5,
        {"type": "text", "text": "x"},
        {"type": [1]},
        {"type": "unknown", "url": "http://x"},
        {},
    ):
        assert sent(part) == part
    cited = {"type": "output_text", "text": "x", "annotations": [{"type": "url_citation", "url": "https://x/?y"}]}
    assert sent(cited) == cited
    for value in ("x", [1, {"content": "x"}], [{"content": {"a": 1}}]):
        assert read_request("chat", {"model": "m", "messages": value}).body["messages"] == value


def test_images_in_results_of_tools() -> None:
    body: dict[str, Any] = {"messages": [{"role": "tool", "tool_call_id": "c", "content": [{"image_url": IMAGE}]}]}
    assert read_request("chat", body).body["messages"][0]["content"] == [CHAT_IMAGE]


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "image_url"}, "[0].image_url: expected the URL of the image, got null"),
        ({"type": "image_url", "image_url": {}}, "[0].image_url.url: expected the URL of the image, got null"),
        ({"image_url": None}, "[0].image_url: expected the URL of the image, got null"),
        ({"type": "video_url", "video_url": 5}, "[0].video_url: expected the URL of the video, got 5"),
        ({"type": "input_image", "file_id": "file-1"}, "[0].file_id: expected it absent, since this server keeps no"),
        ({"type": "file", "file": {"file_id": "file-1"}}, "[0].file.file_id: expected it absent"),
        ({"type": "input_file", "file_id": "file-1"}, "[0].file_id: expected it absent"),
        (
            {"type": "image_url", "image_url": IMAGE, "uuid": "u"},
            "[0].uuid: expected it absent, since this server keeps",
        ),
        ({"image_url": None, "uuid": "u"}, "[0].uuid: expected it absent"),
        ({"type": "text", "text": "x", "image_url": None, "uuid": "u"}, "[0].uuid: expected it absent"),
        (
            {"type": "image_embeds", "image_embeds": "AAAA"},
            "[0].type: expected an image, a recording or a video itself",
        ),
        ({"image_pil": "x"}, "[0].type: expected an image, a recording or a video itself, got 'image_pil'"),
        ({"type": "prompt_embeds", "data": "AAAA"}, "[0].type: expected an image"),
        ({"type": "file"}, "[0].file: expected an object with file_data and filename, got null"),
        ({"type": "input_file"}, "[0].file_data: expected the file as a data: URL, or in base64, got null"),
        (
            {"type": "file", "file": {"file_data": data_url(b"%PDF-1.7", "application/pdf"), "filename": "a.png"}},
            "[0].file.file_data: expected an image, a recording or a video, by a data: URL's type or by the file's "
            "name, got 'application/pdf'",
        ),
        ({"type": "file", "file": {"file_data": RAW}}, "[0].file.file_data: expected an image, a recording or a video"),
        ({"type": "file", "file": {"file_data": RAW, "filename": "a.txt"}}, "got 'txt'; send a text as a part"),
        ({"type": "input_audio"}, "[0].input_audio: expected an object with data and format, got null"),
        (
            {"type": "input_audio", "input_audio": {"data": WAV}},
            "[0].input_audio.format: expected a format such as wav",
        ),
        (
            {"type": "input_audio", "input_audio": {"data": WAV, "format": "wav;base64,AAAA"}},
            "[0].input_audio.format: expected a format",
        ),
        ({"type": "input_audio", "input_audio": {"format": "wav"}}, "[0].input_audio.data: expected the recording"),
        (
            {"type": "input_audio", "input_audio": {"data": "A!==", "format": "wav"}},
            "[0].input_audio.data: expected base64",
        ),
        (
            {"type": "audio_url", "audio_url": IMAGE},
            "[0].audio_url: expected data of a type audio/..., got 'image/png'",
        ),
        ({"type": "video_url", "video_url": {"url": SOUND}}, "[0].video_url.url: expected data of a type video/..."),
        ({"type": "video_url", "video_url": FRAMES + ","}, "[0].video_url: expected base64"),
        ({"type": "video_url", "video_url": f"{FRAMES},{WAV}"}, "[0].video_url: expected an image in PNG, JPEG"),
    ],
)
def test_what_can_not_be_passed_on_is_refused_by_its_path(part: Any, said: str) -> None:
    found = fault(part)
    assert said in found if not said.startswith("[") else found.startswith(said)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("data:image/png,AAAA", "expected a URL such as data:image/...;base64,"),
        ("data:image/png;base64", "expected a URL such as"),
        ("data:" + "x" * 1000 + ";base64,AAAA", "expected a URL such as"),
        ("data:image/png;base64,", "expected base64"),
        ("data:image/png;base64,AAA", "expected base64"),
        ("data:image/png;base64,AA\nAA=", "expected base64"),
        ("data:image/png;base64," + RAW.replace("/", "_").replace("A", "-"), "expected base64"),
        ("data:image/png;base64,AAAA" + "Ä" * 4, "expected base64"),
        (data_url(b"<svg xmlns='http://www.w3.org/2000/svg'>", "image/svg+xml"), "expected an image in PNG, JPEG, GIF"),
        (data_url(b"<svg xmlns='http://www.w3.org/2000/svg'>", "image/png"), "expected an image in PNG, JPEG, GIF"),
        (data_url(b"%!PS-Adobe-3.0"), "that begins b'%!PS-Ado'"),
        (data_url(png(9, 9)[:20]), "expected an image in"),
        (data_url(png_header(30_000, 30_000)), f"expected at most {MAX_PIXELS} pixels, got 900000000"),
        ("https://user:secret@host/x.png?token=secret", "got one that begins 'https'"),
        ("file:///etc/passwd", "got one that begins 'file'"),
        ("//host/x.png?secret", "got one that begins '//host"),
        (RAW, "expected a data: URL"),
    ],
)
def test_images_that_are_none(url: str, said: str) -> None:
    for part, path in (
        ({"type": "image_url", "image_url": {"url": url}}, "[0].image_url.url: "),
        ({"type": "input_image", "image_url": url}, "[0].image_url: "),
    ):
        found = fault(part)
        assert found.startswith(path)
        assert said in found
        assert len(found) < 400
        assert "user:secret" not in found


def test_a_type_of_an_image_is_not_believed() -> None:
    for type in ("image/jpg", "application/octet-stream", "", "text/html", "IMAGE/PNG;charset=utf-8"):
        url = f"DATA:{type};base64,{RAW}"
        assert sent({"image_url": url})["image_url"]["url"] == url


def test_ten_thousand_images_are_refused_at_once() -> None:
    parts = [{"type": "image_url", "image_url": {"url": IMAGE}}] * 10_000
    began_s = time.process_time()
    said = f"[{MAX_PARTS}].image_url.url: expected at most {MAX_PARTS} images, recordings and videos, got more"
    assert fault(*parts) == said
    assert time.process_time() - began_s < 1
    assert fault(*[{"image_url": "https://x/y"}] * 10_000, fetches=True).startswith(f"[{MAX_PARTS}].image_url")
    frames = "data:video/jpeg;base64," + ",".join([RAW] * 10_000)
    assert "expected at most 128 images" in fault({"type": "video_url", "video_url": frames})
    read(*parts[:MAX_PARTS])


def test_all_images_together_are_bounded() -> None:
    large = {"image_url": data_url(png_header(MAX_PIXELS // 1000, 1000))}
    read(*[large] * (MAX_ALL_PIXELS // MAX_PIXELS))
    message = fault(*[large] * (MAX_ALL_PIXELS // MAX_PIXELS + 1))
    assert f"expected at most {MAX_ALL_PIXELS} pixels in all images together" in message


def test_an_image_of_many_bytes() -> None:
    content = png(3, 3) + b"x" * 10_000_000
    assert sent({"image_url": data_url(content)})["type"] == "image_url"
    wrong = data_url(content)
    for place in (100, 5_000_000, len(wrong) - 1):
        url = f"{wrong[:place]}!{wrong[place + 1 :]}"
        assert "expected base64" in fault({"image_url": url})


@given(st.text("AB=+/-_\n é", max_size=12) | st.binary(max_size=40).map(lambda raw: base64.b64encode(raw).decode()))
def test_base64_is_what_the_library_takes(text: str) -> None:
    try:
        is_right = bool(base64.b64decode(text, validate=True)) and len(text) % 4 == 0
    except ValueError:
        is_right = False
    part = {"type": "input_audio", "input_audio": {"data": text, "format": "wav"}}
    if is_right:
        sent(part)
    else:
        assert "expected base64" in fault(part)


# URLs


def test_urls_are_collected_where_they_may_be_fetched() -> None:
    request = read(
        {"type": "image_url", "image_url": {"url": "https://x/a.png", "detail": "low"}},
        {"audio_url": "https://x/a.wav"},
        {"type": "input_file", "file_url": "https://x/a.MP4?name=b.png#c.png"},
        {"image_url": IMAGE},
        fetches=True,
    )
    assert request.media is not None
    assert [(link.path, link.url, link.kind) for link in request.media.links] == [
        ("messages[0].content[0].image_url.url", "https://x/a.png", "image"),
        ("messages[0].content[1].audio_url", "https://x/a.wav", "audio"),
        ("messages[0].content[2].file_url", "https://x/a.MP4?name=b.png#c.png", "video"),
    ]
    for link, url in zip(request.media.links, (IMAGE, SOUND, VIDEO), strict=True):
        request.media.put(link, url)
    content = request.body["messages"][0]["content"]
    assert content[0] == {"type": "image_url", "image_url": {"url": IMAGE, "detail": "low"}}
    assert content[1] == {"type": "audio_url", "audio_url": {"url": SOUND}}
    assert content[2] == {"type": "video_url", "video_url": {"url": VIDEO}}


def test_what_was_fetched_is_checked() -> None:
    request = read({"type": "input_image", "image_url": "https://x/a.png"}, fetches=True)
    assert request.media is not None
    (link,) = request.media.links
    for url in (data_url(b"<html>", "image/png"), data_url(png_header(30_000, 30_000)), data_url(b"")):
        with pytest.raises(BadRequest, match=r"^messages\[0\]\.content\[0\]\.image_url: expected"):
            request.media.put(link, url)
    request.media.put(link, IMAGE)
    assert request.body["messages"][0]["content"] == [CHAT_IMAGE]
