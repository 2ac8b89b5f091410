"""The characters in which byte-level vocabularies write bytes: printable Latin-1 as it is, others from U+0100.

Owns that table. Used by `text.py` and `tiktoken_file.py`. Source: Radford et al. 2019, whose published code fixed it.
"""


def _char_of_byte() -> dict[int, str]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


CHAR_OF_BYTE = _char_of_byte()
BYTE_OF_CHAR = {char: byte for byte, char in CHAR_OF_BYTE.items()}
