"""Made-up texts to train small tokenizers on, the same on every machine and whatever becomes of this repository."""

from random import Random

MARKS = (
    "é naïve, straße, Ångström",
    "日本語のテキスト、中文文本。",
    "“quoted” – 2 × 3 ½ …",
    "https://example.org/a?b=c%20d",
)
STATEMENTS = (
    "{a} = {b}.{c}({a}, {n})",
    'if {a} is None or not {b}[{n}:-1] == {{"{c}": {a}}}:',
    "for {a}, {b} in zip(self._{c}, range({n}), strict=True):",
    'raise ValueError(f"{{{a}}}: {b} {c} is not {n} or less; give --{b}-{c}")',
    "{a} += {b} ** {n} // {c} - 0x{n:X}",
    "return [{a} for {a} in {b} if {a} != {n} and {a}.{c} <= {n}.5]",
    "self.{a}, self._{b} = {b}, {c}",
    "# {a} {b} {c} {a}s, isn't it? {n:,} {b}s \u2014 {mark}",
)


def texts():
    """1,000 texts of made-up words, the same on every machine: the rows that a seed chooses must not change."""
    random = Random(7)
    words = ["".join(random.choices("aeinorstlmd", k=random.randint(2, 9))) for _ in range(800)]
    weights = [1 / rank for rank in range(1, len(words) + 1)]  # Zipf's law
    lengths = [min(600, 1 + int(random.lognormvariate(3.4, 1.1))) for _ in range(1000)]
    return [" ".join(random.choices(words, weights, k=length)) for length in lengths]


def code_files():
    """40 texts of 8 to 25 KB that look like Python: indentation, punctuation, numbers, some characters beyond ASCII."""
    random = Random(18)
    syllables = ("se", "lf", "to", "ken", "in", "dex", "ri", "ver", "pa", "th", "num", "le", "ng", "do", "cu", "ment")
    names = ["".join(random.choices(syllables, k=random.randint(1, 4))) for _ in range(400)]
    weights = [1 / rank for rank in range(1, len(names) + 1)]

    def line(template):
        a, b, c = random.choices(names, weights, k=3)
        return template.format(a=a, b=f"{b}_{c}", c=c, n=random.randrange(10 ** random.randint(1, 5)), mark=mark())

    def mark():
        return random.choice(MARKS)

    def function():
        yield line("def {a}_{c}(self, {b}: int, {c}: str = '{a}') -> list[{c}]:")
        yield line('    """The {a} of the {b}, in {c}s.\n\n    Args:\n        {b}: {c} {a}, {n} of them.\n    """')
        for _ in range(random.randint(2, 9)):
            yield " " * random.choice((4, 4, 8, 12)) + line(random.choice(STATEMENTS))
        yield "\n"

    def file():
        head = line(
            '"""{a} {b} {c}: the {a} and the path to the river. {mark}"""\n\nimport {a}\nfrom {b} import {c}\n\n'
        )
        return "\n".join([head, *(text for _ in range(random.randint(14, 34)) for text in function())])

    return [file() for _ in range(40)]
