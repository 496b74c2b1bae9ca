"""Texts on which two implementations of one tokenizer are compared: what they are known to do differently, or might."""

from collections.abc import Iterator, Sequence

from ...errors import OptionError
from ..interface import Tokenizer

SAMPLED_PIECES = 2000
"""Pieces of a vocabulary that are among its probes."""

_WORDS = (
    "The quick brown fox jumps over the lazy dog, isn't it? ",
    "I'll, we've, they're, I'm, he'd, it's, can't, 'tis 's ''s; I'LL WE'VE THEY'RE I'M HE'D IT'S CAN'T \u2019s",
    "camelCase PascalCase snake_case SCREAMING_CASE kebab-case XMLHttpRequest iPhone 3DMark eBay don'tStop",
    "1 12 123 1234 12345 1234567 3.14159 1,000,000 0x1F 1e-9 2024-01-31 v1.2.3 a1b2c3",
    "\u0663\u0664\u0665\u0666 \u2167 \xbd \xb2\xb3 \u0967\u0968\u0969\u096a \uff11\uff12",
    "!!! ??? ... --- *** ### $$$ %%% @@@ ~~~ <<>> (()) [[]] {{}} ;;:: ,,.. \\\\// ``'' \"\" \xab\xbb \u2014\u2026",
    "https://example.org/a/b?c=d&e=%20#f user@example.org /usr/lib/x86_64 C:\\Users\\x",
)
_CODE = (
    'def f(x: int) -> str:\n    """Doc."""\n\tif x != 0 and y[1:-1] == {"a": None}:\n\t\treturn f"{x!r:>10}"\n\n\n',
    "for (int i = 0; i < n; ++i) { a[i] *= b->c; }\r\n\r\n// comment\r\n#include <stdio.h>\r\n",
    "<html>\n  <body class='x'>&nbsp;<br/></body>\n</html>\n| a | b |\n|---|---|\n$$\\frac{1}{2}$$\n",
)
_SCRIPTS = (
    "Élève naïve straße Ångström İstanbul ı ǅ ǈ ñ ẞ ſ ﬁ ŉ",
    "e\u0301 n\u0303 A\u030a a\u0300\u0301\u0302\u0303 \u0438\u0306",
    "Съешь же ещё этих мягких ФРАНЦУЗСКИХ булок, да выпей чаю",
    "Ξεσκεπάζω τὴν ψυχοφθόρα βδελυγμία ᾈ Σσς",
    "我能吞下玻璃而不伤身体。他说:“你好!”共12个,2024年。",
    "こんにちは、世界！カタカナ ｶﾞ ＡＢ１２ か\u3099\u3000x々ー",
    "한국어 텍스트 \u1112\u1161\u11ab ㅋㅋㅋ",
    "हिन्दी क्ष ภาษาไทยน้ำ தமிழ் বাংলা ລາວ မြန်မာ ភាសាខ្មែរ",
    "العربية وَالْحَمْدُ فارسی‌ها עברית שָׁלוֹם \u202eabc\u202c",
    "ქართული አማርኛ Ꭰꭰ հայերեն Հ ᠮᠣᠩ",
    "\U0001f600\U0001f601 \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f44d\U0001f3fd \U0001f1e9\U0001f1ea",
    "\u2764\ufe0f 1\ufe0f\u20e3 \U0001d54f\U0001d7d8 \U00010400\U00010428 \U00020000 \u2460 \u2122 \u20ac \xb5 \xaa",
)
_SPACES = (
    "",
    *(" " * count + "x" + " " * count + "." + " " * count for count in (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33, 100)),
    *("\n" * count + "x" + "\n" * count for count in (1, 2, 3, 4, 5, 9, 30)),
    *("\t" * count + "x" + "\t" * count + "1" for count in (1, 2, 3, 4, 5, 9, 30)),
    "a \n b\n \nc \t d\t \te\r\n\r\nf\r\rg\n\rh  \n  i\n  \n  j   ",
    "\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2000\u2003\u200a\u2028\u2029\u202f\u205f\u3000\u200b\u2060\xad\u180e",
    "a\xa0b a\xa0 b \xa0\xa0c\u3000\u3000d \u2028e\u2029 f\x85g \xa0\n\xa0h",
    "\u2581 \u2581a a\u2581b \u2581\u2581 \u0120 \u010a \u0120a",  # characters that vocabularies write for white space
)
_ODD = (
    "a\0b\0\0c \0 d",
    "".join(map(chr, range(0x100))),
    "\ufeffThe text \ufeff",
    "\ufffd \ufffe \uffff \ue000 \U0010ffff \U000e0001 \u0378",
    "\u0301",
    "\u0301\u0302 \u0303a\n\u0300 1\u0301 .\u0301 \u20dd",
    "a" * 3000,
    "ab" * 700 + "中" * 700 + "=" * 700 + "7" * 700 + "\U0001f600" * 100,
    "\xe9" * 500 + "'" * 500,
    "<|endoftext|> <|im_start|> <s> </s> <unk> [INST] [/INST] <0x0A> <0xE2> <pad> [CLS] <think></think> <|eot_id|>",
)
_CHARACTERS = tuple(
    form.replace("?", chr(code)) for code in (*range(0x100), 0x2028, 0xFEFF) for form in ("?", "a?b", " ?", "? ", "??1")
)
_TOGETHER = "".join((*_SCRIPTS, *_WORDS, *_CODE, *_SPACES, *_ODD[1:]))
PROBES = (*_WORDS, *_CODE, *_SCRIPTS, *_SPACES, *_ODD, *_CHARACTERS, _TOGETHER)


def probes(reference: Tokenizer) -> Iterator[str]:
    """``PROBES``, and this vocabulary's reserved texts and some of its pieces."""
    yield from PROBES
    for text in reference.reserved_texts():
        yield from (text, f"a{text}b", f" {text} {text}{text}\n")
    sample = range(0, reference.vocab_size, max(1, reference.vocab_size // SAMPLED_PIECES))
    texts = [reference.decode([number]) for number in _known(reference, sample)]
    yield from texts
    yield "".join(texts)


def _known(reference: Tokenizer, numbers: Sequence[int]) -> Iterator[int]:
    """Those ids that are tokens."""
    for number in numbers:
        try:
            reference.pieces([number])
        except OptionError:
            continue
        yield number
