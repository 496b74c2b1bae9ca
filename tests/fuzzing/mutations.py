"""Changes that a fuzzer makes to a valid file: flips, cuts, numbers at the edges, pieces moved, repeated, removed."""

NUMBERS = [0, 1, 2, 7, 8, 127, 128, 255, 256, 32767, 65535, 65536]
NUMBERS += [(1 << power) + near for power in (31, 32, 40, 62, 63) for near in (-1, 0, 1)]
NUMBERS += [-1, -2, -(1 << 31), -(1 << 63)]


def flip(rng, content):
    offset = rng.randrange(len(content))
    content[offset] ^= 1 << rng.randrange(8)


def set_byte(rng, content):
    content[rng.randrange(len(content))] = rng.choice(
        [0, 1, 0x7F, 0x80, 0xFF, 0x0A, 0x22, 0x5B, 0x7B, rng.randrange(256)]
    )


def set_number(rng, content):
    size = rng.choice([1, 2, 4, 8])
    offset = rng.randrange(len(content))
    content[offset : offset + size] = (rng.choice(NUMBERS) % (1 << 8 * size)).to_bytes(size, "little")


def cut(rng, content):
    del content[rng.randrange(len(content)) :]


def remove(rng, content):
    offset = rng.randrange(len(content))
    del content[offset : offset + rng.randint(1, 40)]


def repeat(rng, content):
    offset, size = rng.randrange(len(content)), rng.randint(1, 200)
    content[offset:offset] = content[offset : offset + size] * rng.choice([1, 1, 2, 50])


def insert(rng, content):
    offset = rng.randrange(len(content))
    content[offset:offset] = rng.randbytes(rng.randint(1, 20))


def move(rng, content):
    offset, target = rng.randrange(len(content)), rng.randrange(len(content))
    piece = content[offset : offset + rng.randint(1, 100)]
    content[target : target + len(piece)] = piece


def clear(rng, content):
    offset = rng.randrange(len(content))
    size = min(rng.randint(1, 100), len(content) - offset)
    content[offset : offset + size] = bytes(size)


CHANGES = (flip, flip, set_byte, set_number, set_number, cut, remove, repeat, insert, move, clear)


def mutated(rng, content):
    """A changed copy of ``content``, by one to four changes."""
    content = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 3, 4])):
        if content:
            rng.choice(CHANGES)(rng, content)
    return bytes(content)


def other_value(rng, value):
    """Something else in place of a value of a JSON document, one level deep or more."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(sorted(value))
        return value | {name: other_value(rng, value[name])}
    if isinstance(value, list) and value and rng.random() < 0.8:
        index = rng.randrange(len(value))
        return [*value[:index], other_value(rng, value[index]), *value[index + 1 :]]
    if isinstance(value, int) and rng.random() < 0.8:
        return rng.choice([value - 1, value + 1, value * 2, 10**30, *NUMBERS])
    return rng.choice([None, True, "", "../../x", 1.5, -1, [], {}, [[]], {"bytes": 1}, "é\ud800", 10**400])
