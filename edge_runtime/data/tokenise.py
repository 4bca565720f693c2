"""Turn texts into token ids: the program of a process of its own, `python -m edge_runtime.data.tokenise REQUEST`.

A tokenizer may come with a bundle, from a coordinator that this device does not trust. Its rules can rewrite a text
into one a million times longer, or search it for ever. So they run here, in bounded memory, and token_file.py ends
the process when it makes no progress. Texts come on standard input, each behind a header; ids go to standard output.
"""

from __future__ import annotations

import errno
import json
import os
import struct
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

HEADER = struct.Struct("<I?")  # bytes of a piece of text, and whether a document ends with it
MOST_TOKENS, SOME_TOKENS = 8, 64  # of a text: for each of its bytes, and in any case
REFUSED = 2  # exit code: standard error has one line for the user
_AT_ONCE = 1 << 20  # bytes of text
_PADDING = ("[PAD]", "<pad>", "<|pad|>", "<|padding|>")
_END = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[SEP]")


class Refused(Exception):
    """A tokenizer that is of no use here."""


def main(request: dict[str, Any]) -> None:
    """Write rows of `length` ids, each behind their number; or, without a length, documents one after the other."""
    _bound(request["memory"], request["disk"])
    tokenizer = _open(request["tokenizer"])
    dtype, length = np.dtype(request["dtype"]), request["length"]
    texts = _pieces(sys.stdin.buffer)
    # Not sys.stdout.buffer: with PYTHONUNBUFFERED that writes what fits on a full disk, and says nothing.
    with open(sys.stdout.fileno(), "wb", closefd=False) as out:
        if length is None:
            _write_documents(tokenizer, texts, dtype, out)
        else:
            _write_rows(tokenizer, texts, dtype, length, out)


def _write_rows(
    tokenizer: Tokenizer, texts: Iterator[list[Piece]], dtype: np.dtype[Any], length: int, out: BinaryIO
) -> None:
    tokenizer.enable_truncation(length)
    end = _first_known(tokenizer, _END)
    known = tokenizer.padding["pad_id"] if tokenizer.padding else _first_known(tokenizer, _PADDING)
    tokenizer.no_padding()
    for pieces in texts:
        rows = np.full((len(pieces), 1 + length), known if known is not None else end or 0, np.int64)
        for row, ids in zip(rows, _encode(tokenizer, pieces, special=True)):
            row[0] = len(ids)
            row[1 : 1 + len(ids)] = ids
        _write(rows, dtype, out)


def _write_documents(tokenizer: Tokenizer, texts: Iterator[list[Piece]], dtype: np.dtype[Any], out: BinaryIO) -> None:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    end = _first_known(tokenizer, _END)
    if end is None:
        raise Refused(f"it has no token that ends a document; expected one of {' '.join(_END)}")
    for pieces in texts:
        for (_, ends), ids in zip(pieces, _encode(tokenizer, pieces, special=False)):
            _write(np.array([*ids, end] if ends else ids, np.int64), dtype, out)


def _encode(tokenizer: Tokenizer, pieces: list[Piece], special: bool) -> Iterator[list[int]]:
    found = tokenizer.encode_batch_fast([text for text, _ in pieces], add_special_tokens=special)
    for (text, _), encoding in zip(pieces, found):
        if len(encoding) > MOST_TOKENS * len(text) + SOME_TOKENS:
            raise Refused(f"it makes {len(encoding)} tokens of a text of {len(text)} characters")
        yield encoding.ids


def _write(ids: np.ndarray[Any, Any], dtype: np.dtype[Any], out: BinaryIO) -> None:
    if ids.size and ids.max() > np.iinfo(dtype).max:
        raise Refused(f"it has the token id {ids.max()}, more than the model takes")
    out.write(ids.astype(dtype).data)


def _first_known(tokenizer: Tokenizer, names: tuple[str, ...]) -> int | None:
    ids = map(tokenizer.token_to_id, names)
    return next((number for number in ids if number is not None), None)


Piece = tuple[str, bool]  # of a document, and whether it is the last


def _pieces(stream: BinaryIO) -> Iterator[list[Piece]]:
    """Yield pieces of text, some at once."""
    found: list[Piece] = []
    size = 0
    while header := stream.read(HEADER.size):
        length, ends = HEADER.unpack(header)
        found.append((stream.read(length).decode(), ends))
        size += length
        if size >= _AT_ONCE:
            yield found
            found, size = [], 0
    if found:
        yield found


def _open(path: str) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # the library raises this type and no other
        raise Refused(f"it is no tokenizer.json that can be read: {' '.join(str(error).split())[:200]}") from None


def _bound(memory: int, disk: int | None) -> None:
    """Let the system refuse this process more than that, where the system can."""
    try:
        import resource
    except ModuleNotFoundError:
        return
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    if disk is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (disk, disk))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    request = json.loads(sys.argv[1])
    try:
        main(request)
    except Refused as refusal:
        sys.stderr.write(f"{refusal}\n")
        sys.exit(REFUSED)
    except OSError as error:
        large = f"the ids that it makes take more than the {request['disk']} bytes that are left for them"
        sys.stderr.write(f"{large if error.errno == errno.EFBIG else error}\n")
        os._exit(REFUSED)  # what waits in the buffer could not be written either
    except MemoryError:
        sys.stderr.write("it takes more memory than a tokenizer of its size may\n")
        sys.exit(REFUSED)
