"""Job names that are easily mixed up, cut off, folded or taken for syntax."""

from __future__ import annotations

import base64
import hashlib
from urllib.parse import quote

__all__ = ("ODD_NAMES",)

LONG = "long name, " * 90 + "1234567890"

# fmt: off
PLAIN = (
    "", " ", "  ", "a", "A", "a ", " a", "a b", "a  b", "a\tb", "a\nb", "a\r\nb", "a\0b", "\0",
    "a:b", "a;b", "a.b", "a..b", ".", "..", "a/b", "a\\b", "a_b", "a-b", "a,b", "a|b", "a=b",
    "*", "**", ">", "a.>", "a.*", "$", "#", "?", "%", "%%", "&", "+", "~", "!", "@", "^", "`",
    "{}", "{a}", "{a}b", "}{", "[a]", "(a)", "<a>", "'", "''", '"', "a'; --", "%s", "$1", "\\",
    "None", "null", "0", "1", "-1", "1e3", "runs", "jobs", "state", "slot", "schedule", "a:b:runs",
    "🕰", "日本語", "שלום", "Ünïcödé", "\u200b", "\ufeff", "\U0010ffff", "\x7f", "\x1b[0m",
    # One word in its two normal forms; letters that fold into each other.
    "caf\u00e9", "cafe\u0301", "\u212b", "\u00c5", "A\u030a", "ß", "ss", "SS", "İ", "i", "I", "ı",
    LONG, LONG[:-1], LONG[:-1] + "9", LONG[:-1] + " ", "é" * 1000, "é" * 999 + "e",
    "x" * 63, "x" * 64, "X" * 64, "x" * 255, "x" * 256,
)
# fmt: on


def encodings(name: str) -> list[str]:
    """Return what a store might make of a name."""
    raw = name.encode()
    forms = [repr(name), f"={name}", f"{{{name}}}", raw.hex(), raw.hex().upper()]
    forms += [quote(name), quote(name, safe=""), quote(quote(name, safe=""), safe="")]
    forms += [quote(name, safe="").lower(), name.replace(" ", "+"), name.replace(":", "_")]
    for encode in (base64.b64encode, base64.urlsafe_b64encode, base64.b32encode):
        forms += [encode(raw).decode(), encode(raw).decode().rstrip("=")]
    for digest in (hashlib.md5, hashlib.sha1, hashlib.sha256, hashlib.blake2b):
        hashed = digest(raw, usedforsecurity=False)
        forms += [hashed.hexdigest(), base64.urlsafe_b64encode(hashed.digest()).decode()]
        forms += [forms[-1].rstrip("=")]
    return forms


#: Names that a store has to hold apart, each as it is; some are what a store might make of others.
ODD_NAMES = tuple(
    dict.fromkeys(
        [*PLAIN, *(form for name in ("a:b", "a b", "é", "{a}", LONG) for form in encodings(name))]
    )
)
