"""Images of unknown origin: what is accepted comes out as a PNG file of the model's size, everything else is refused in
words, and no file can make the decoder hang, crash its owner, or open anything."""

from __future__ import annotations

import base64
import io
import random
import signal
import struct
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image, ImageDraw

from asyncrl.extensions.vision import decoder as module
from asyncrl.extensions.vision.decoder import DecodingProcesses
from asyncrl.extensions.vision.fitting import ImageSizes
from asyncrl.extensions.vision.sizes import png_size
from asyncrl.images import ImageRefused

SIZES = ImageSizes(side=28, least=28 * 28, most=16 * 28 * 28)
MODES = {"PNG": ("1", "L", "LA", "P", "RGB", "RGBA"), "JPEG": ("L", "RGB", "CMYK"), "WEBP": ("RGB", "RGBA")}


@pytest.fixture(scope="module")
def decoder() -> Iterator[DecodingProcesses]:
    decoder = DecodingProcesses(SIZES, max_bytes=1 << 20)
    yield decoder
    decoder.close()


def picture(mode: str = "RGB", size: tuple[int, int] = (56, 56)) -> Image.Image:
    image = Image.new("RGB", size, (250, 240, 20))
    ImageDraw.Draw(image).rectangle((4, 4, 20, 30), fill=(10, 20, 200))
    return image.convert(mode)


def file(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def forged_png(width: int, height: int, *more: bytes) -> bytes:
    """A small file that states any size."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(bytes(1000)))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(more) + body + chunk(b"IEND", b"")


def test_every_accepted_format_becomes_a_png_in_rgb(decoder: DecodingProcesses) -> None:
    for form, modes in MODES.items():
        for mode in modes:
            found = decoder.begin(file(picture(mode), form)).result()
            image = Image.open(io.BytesIO(found))
            assert (image.format, image.mode, image.size) == ("PNG", "RGB", (56, 56))
            assert image.getpixel((50, 50))[0] > 200


def test_a_lossless_image_of_the_models_size_keeps_its_pixels(decoder: DecodingProcesses) -> None:
    given = picture()
    found = decoder.begin("data:image/png;base64," + base64.b64encode(file(given)).decode()).result()
    assert Image.open(io.BytesIO(found)).tobytes() == given.tobytes()
    assert decoder.begin(found).result() == found


def test_large_and_small_images_get_the_models_size(decoder: DecodingProcesses) -> None:
    assert png_size(decoder.begin(file(picture(size=(200, 300)))).result()) == (84, 112)
    assert png_size(decoder.begin(file(picture(size=(5, 7)))).result()) == (28, 56)


def test_transparent_pixels_show_white(decoder: DecodingProcesses) -> None:
    found = decoder.begin(file(Image.new("RGBA", (28, 28), (200, 0, 0, 0)))).result()
    assert Image.open(io.BytesIO(found)).getpixel((3, 3)) == (255, 255, 255)


def test_photos_with_exif_data_and_previews_are_read(decoder: DecodingProcesses) -> None:
    exif = Image.Exif()
    exif[0x010F], exif[0x0112] = "a camera", 6
    assert png_size(decoder.begin(file(picture(), "JPEG", exif=exif, dpi=(72, 72))).result()) == (56, 56)
    assert png_size(decoder.begin(file(picture(), "MPO", save_all=True, append_images=[picture()])).result()) == (
        56,
        56,
    )


REFUSED = {
    "http": ("http://127.0.0.1:1/a.png", "nothing opens a path or an address"),
    "file": ("file:///etc/passwd", "nothing opens a path or an address"),
    "path": ("/etc/passwd", "nothing opens a path or an address"),
    "bare base64": (base64.b64encode(file(picture())).decode(), "data URLs"),
    "svg": ("data:image/svg+xml;base64,AAAA", "data URLs"),
    "not base64": ("data:image/png;base64,%%%", "not base64"),
    "none": (None, "NoneType is not an image"),
    "empty": (b"", "no PNG, JPEG or WebP"),
    "text": (b"hello", "no PNG, JPEG or WebP"),
    "gif": (file(picture("P"), "GIF"), "no PNG, JPEG or WebP"),
    "tiff": (file(picture(), "TIFF"), "no PNG, JPEG or WebP"),
    "bmp": (file(picture(), "BMP"), "no PNG, JPEG or WebP"),
    "postscript": (file(picture(), "EPS"), "no PNG, JPEG or WebP"),
    "animation": (file(picture(), "WEBP", save_all=True, append_images=[picture("L")]), "videos are not supported"),
    "moving png": (file(picture(), save_all=True, append_images=[picture("L")]), "videos are not supported"),
    "16 bits": (file(Image.new("I;16", (28, 28))), "mode I;16: convert"),
    "cut off": (file(picture(size=(112, 112)), "JPEG")[:-99], "damaged or incomplete"),
    "cut off webp": (file(picture(size=(112, 112)), "WEBP")[:60], "WebP|damaged"),
    "bomb": (forged_png(60_000, 60_000), "more than the limit of 40,000,000: scale it down"),
    "small bomb": (forged_png(6000, 6000), "damaged or incomplete"),
    "text bomb": (forged_png(28, 28, chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(80 << 20)))), "WebP|damaged"),
    "strip": (file(Image.new("L", (1, 300))), "over 200 times the other"),
    "too many bytes": (bytes(2 << 20), "vision.max_bytes=1,048,576"),
    "long url": ("data:image/png;base64," + "A" * (3 << 20), "1,048,576 bytes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_image_is_refused_in_words(decoder: DecodingProcesses, name: str) -> None:
    image, why = REFUSED[name]
    with pytest.raises(ImageRefused, match=why):
        decoder.begin(image).result()
    assert png_size(decoder.begin(file(picture())).result()) == (56, 56)


def mutations(count: int, seed: int) -> Iterator[bytes]:
    """Valid files with changed, lost, doubled and swapped bytes; each is a function of the seed alone."""
    numbers = random.Random(seed)
    valid = [file(picture(mode), form) for form, modes in MODES.items() for mode in modes]
    for _ in range(count):
        data = bytearray(numbers.choice(valid))
        for _ in range(numbers.choice((1, 1, 2, 8, 64))):
            place, length = numbers.randrange(len(data)), numbers.choice((1, 1, 2, 4, 32))
            change = numbers.randrange(4)
            if change == 0:
                data[place : place + length] = numbers.randbytes(length)
            elif change == 1 and len(data) > 64:
                del data[place : place + length]
            elif change == 2:
                data[place:place] = data[place : place + length]
            else:
                data[place : place + 4] = numbers.choice((b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff"))
        if data.startswith(b"\x89PNG") and numbers.random() < 0.8:  # otherwise a check sum would refuse nearly all
            data = _with_checksums(data)
        yield bytes(data)


def _with_checksums(data: bytearray) -> bytearray:
    place = 8
    while place + 12 <= len(data):
        length = int.from_bytes(data[place : place + 4], "big")
        end = place + 8 + length
        if end + 4 > len(data):
            break
        data[end : end + 4] = struct.pack(">I", zlib.crc32(data[place + 4 : end]))
        place = end + 4
    return data


def outcomes(decoder: DecodingProcesses, count: int, seed: int) -> Counter[str]:
    """Decode mutated files, and count how each ended. None may take longer than the limit of CPU time allows."""
    found = Counter[str]()
    for data in mutations(count, seed):
        began = time.monotonic()
        try:
            png_size(decoder.begin(data).result())
            found["accepted"] += 1
        except ImageRefused as refused:
            found["process lost" if "the process" in str(refused) else "refused"] += 1
        assert time.monotonic() - began < 25
    return found


def test_damaged_files_are_decoded_or_refused(decoder: DecodingProcesses) -> None:
    found = outcomes(decoder, 200, seed=1)
    assert found["accepted"] > 20
    assert found["refused"] > 20
    assert found["process lost"] == 0


@pytest.mark.campaign
def test_thousands_of_damaged_files_are_decoded_or_refused(decoder: DecodingProcesses) -> None:
    print(outcomes(decoder, 5000, seed=2))


def test_images_are_decoded_by_several_processes_at_once() -> None:
    decoder = DecodingProcesses(SIZES, max_bytes=1 << 20)
    try:
        images = [picture(size=(28 + number, 56)) for number in range(24)]
        begun = [decoder.begin(file(one)) for one in images]
        alone = [decoder.begin(file(one)).result() for one in images]
        assert [one.result() for one in begun] == alone
        assert 1 < len(decoder._idle) <= module.WORKERS
    finally:
        decoder.close()


def test_a_process_that_dies_or_hangs_costs_one_image(
    decoder: DecodingProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder.begin(file(picture())).result()
    decoder._idle[-1].send_signal(signal.SIGKILL)
    with pytest.raises(ImageRefused, match="crashed on it"):
        decoder.begin(file(picture())).result()
    decoder.begin(file(picture())).result()
    monkeypatch.setattr(module, "DEADLINE", 0.5)
    decoder._idle[-1].send_signal(signal.SIGSTOP)
    with pytest.raises(ImageRefused, match="took too long on it"):
        decoder.begin(file(picture())).result()
    monkeypatch.undo()
    decoder.begin(file(picture())).result()


def test_the_process_can_open_no_file_and_has_limits(decoder: DecodingProcesses) -> None:
    decoder.begin(file(picture())).result()
    limits = Path(f"/proc/{decoder._idle[-1].pid}/limits").read_text()
    found = {line[:26].strip(): line[26:].split()[1] for line in limits.splitlines()[1:]}
    assert found["Max open files"] == "3"
    assert found["Max file size"] == found["Max processes"] == found["Max core file size"] == "0"
    assert found["Max address space"] == str(2 << 30)
