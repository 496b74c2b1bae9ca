"""Compressed files of one member or many are read whole; damaged and cut ones are errors that name file and byte."""

import bz2
import gzip
import io
import lzma
import tracemalloc

import pytest

from megatron_bfp import InputError
from megatron_bfp.preprocessing.readers import compression
from megatron_bfp.preprocessing.readers.compression import chunks_of

zstd = pytest.importorskip("backports.zstd")

COMPRESS = {"gzip": gzip.compress, "zstd": zstd.compress, "bzip2": bz2.compress, "xz": lzma.compress}
CONTENT = b"".join(b"line %d of a text that is not very random\n" % number for number in range(20_000))


def read(data, start=512):
    file = io.BytesIO(data)
    return b"".join(chunks_of(file, "file", file.read(start)))


@pytest.mark.parametrize("content", [b"", b"abc\n", CONTENT, b"\x00" * 1000])
def test_plain_bytes_pass_through(content):
    assert read(content) == content


@pytest.mark.parametrize("name", COMPRESS)
def test_members_follow_one_another(name):
    compress = COMPRESS[name]
    assert read(compress(CONTENT)) == CONTENT
    assert read(b"".join(compress(part) for part in (b"a", b"", CONTENT, b"b")), start=20) == b"a" + CONTENT + b"b"
    many = [b"document %d\n" % number for number in range(3000)]
    assert read(b"".join(map(compress, many))) == b"".join(many)


@pytest.mark.parametrize("name", COMPRESS)
def test_what_is_cut_off_is_an_error_at_every_byte(name):
    first, second = COMPRESS[name](b"abc" * 100), COMPRESS[name](b"def" * 100)
    for size in range(len(first) + 8, len(first) + len(second)):
        with pytest.raises(
            InputError, match=f"^file: its {name} data ends at byte {size} .* begins at byte {len(first)}:"
        ):
            read((first + second)[:size])


@pytest.mark.parametrize("name", COMPRESS)
def test_a_large_file_that_is_cut_off_is_an_error(name):
    data = COMPRESS[name](CONTENT)
    with pytest.raises(InputError, match=f"ends at byte {len(data) // 2} in the middle"):
        read(data[: len(data) // 2])


@pytest.mark.parametrize("name", COMPRESS)
def test_damage_is_an_error(name):
    options = {"options": {zstd.CompressionParameter.checksum_flag: 1}} if name == "zstd" else {}
    data = bytearray(COMPRESS[name](CONTENT, **options))
    data[len(data) // 2] ^= 0xFF
    with pytest.raises(InputError, match=f"^file: (damaged {name} data|its {name} data ends)"):
        read(bytes(data))


@pytest.mark.parametrize("name", COMPRESS)
@pytest.mark.parametrize("rest", [b"garbage", b"\n", b"\x1f"])
def test_what_follows_and_is_no_member_is_an_error(name, rest):
    data = COMPRESS[name](b"abc")
    with pytest.raises(InputError, match=f"^file: what follows the {name} data at byte {len(data)} is not {name} data"):
        read(data + rest)


@pytest.mark.parametrize("name", ["gzip", "xz"])
def test_padding_of_zeros_is_passed_over(name):
    data = COMPRESS[name](b"abc")
    assert read(data + bytes(70_000) + data + bytes(512)) == b"abcabc"


def test_zstd_frames_that_hold_no_data_are_passed_over():
    skipped = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"size"
    assert read(skipped + zstd.compress(b"abc") + skipped + zstd.compress(b"def") + skipped) == b"abcdef"


@pytest.fixture(scope="module")
def dictionary():
    samples = [b"document %d is one of many texts that are alike" % number for number in range(2000)]
    return zstd.train_dict(samples, 2000)


@pytest.mark.parametrize("has_number", [True, False])
@pytest.mark.parametrize("is_second", [False, True])
def test_fault_B13_zstd_with_a_dictionary_is_called_that(dictionary, has_number, is_second):
    options = {zstd.CompressionParameter.dict_id_flag: int(has_number)}
    member = zstd.compress(b"document 77 is one of many texts that are alike", zstd_dict=dictionary, options=options)
    data = zstd.compress(b"abc") * is_second + member
    begin = len(data) - len(member)
    if has_number:
        match = (
            rf"^file: its zstd data at byte {begin} needs the dictionary {dictionary.dict_id} .*zstd -d -D DICTIONARY"
        )
    else:
        match = r"^file: damaged zstd data .*, or decompress it with the dictionary it was compressed with, if it was$"
    with pytest.raises(InputError, match=match):
        read(data)


@pytest.mark.parametrize("size", [0, 1, 100, 255, 256, 70_000, 1 << 20])
@pytest.mark.parametrize("content_size", [0, 1])
def test_a_zstd_frame_without_a_dictionary_has_none(size, content_size):
    options = {zstd.CompressionParameter.content_size_flag: content_size}
    assert compression.zstd_dictionary(zstd.compress(bytes(size), options=options)[:10]) == 0
    assert read(zstd.compress(bytes(size), options=options)) == bytes(size)


@pytest.mark.parametrize(
    "frame, number",
    [
        (b"\x28\xb5\x2f\xfd\x20\x05", 0),
        (b"\x28\xb5\x2f\xfd\x21\x07\x05", 7),
        (b"\x28\xb5\x2f\xfd\x22\x07\x01\x05", 0x107),
        (b"\x28\xb5\x2f\xfd\x23\x07\x01\x00\x02\x05", 0x2000107),
        (b"\x28\xb5\x2f\xfd\x01\x58\x07\x05", 7),
        (b"\x28\xb5\x2f\xfd", 0),
        (b"\x50\x2a\x4d\x18\x21\x07", 0),
    ],
)
def test_where_the_number_of_a_dictionary_is(frame, number):
    assert compression.zstd_dictionary(frame) == number


def test_zstd_with_a_long_window():
    parameters = {zstd.CompressionParameter.window_log: 28, zstd.CompressionParameter.enable_long_distance_matching: 1}
    compressor = zstd.ZstdCompressor(options=parameters)
    data = compressor.compress(CONTENT) + compressor.flush()
    assert read(data) == CONTENT


@pytest.mark.parametrize("name", COMPRESS)
def test_memory_does_not_grow_with_what_is_inside(name):
    """200 MB in a few KB."""
    member = COMPRESS[name](bytes(100 << 20))
    tracemalloc.start()
    try:
        file = io.BytesIO(member * 2)
        sizes = [len(chunk) for chunk in chunks_of(file, "file", file.read(512))]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(sizes) == 200 << 20 and max(sizes) <= compression.CHUNK_BYTES
    assert peak < 20 << 20
