"""The safetensors format: files written in one pass and read in parts, without trust in them.

A file is a length, a JSON header with each tensor's place, and the bytes. It cannot hold code.
Written by hand, not with the library: this writer streams from any device, digests while it writes,
copies at most one chunk, and reads any box of a tensor.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch

from shardstep.checkpoint.files import (
    CheckpointError,
    Digest,
    Progress,
    no_progress,
    open_plain,
    parse_json,
    reading,
    require,
    writing,
)
from shardstep.params.flat import flat
from shardstep.plan import Box, Interval, boxes, contiguous
from shardstep.state.tree import Form, is_counts, is_sizes

CHUNK_NBYTES = 16 * 2**20
MAX_HEADER_NBYTES = 100 * 2**20
THREAD_NBYTES = 2**20

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True, slots=True)
class Streamed(Form):
    """A tensor that is not in memory: the writer reads a box of it into a buffer and writes it."""

    read: Callable[[Box, torch.Tensor], None]


Source = torch.Tensor | Streamed
"""A tensor to be written to a file."""


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, which keeps the tensor alive."""
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    # After Ctrl-C, a thread may still digest it.
    memory.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def has_name(dtype: torch.dtype) -> bool:
    """Return True if the format knows the dtype. Tensors of others are written as bytes."""
    return dtype in _NAMES


def _in_file(tensor: Source | Form) -> Form:
    """Return dtype and shape of a tensor as they stand in a file's header."""
    if has_name(tensor.dtype):
        return Form(tensor.dtype, tuple(tensor.shape))
    return Form(torch.uint8, (tensor.nbytes,))


def write(
    path: Path,
    tensors: Mapping[str, Source],
    metadata: Mapping[str, str] | None = None,
    progress: Progress = no_progress,
) -> Digest:
    """Write a new file and flush it to disk. Dtypes unknown to the format are written as bytes."""
    if "__metadata__" in tensors:
        raise ValueError("a tensor cannot be called '__metadata__' in a safetensors file")
    # Widest dtype first, so that each tensor starts at a multiple of its element size.
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        tensor = tensors[name]
        form = _in_file(tensor)
        header[name] = {
            "dtype": _NAMES[form.dtype],
            "shape": list(form.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_NBYTES:
        raise ValueError(
            f"{path} would have a header of {len(text):,} bytes: {len(order):,} tensors are too "
            "many for one file"
        )
    digest = hashlib.sha256()
    with writing(path), open(path, "xb", buffering=0) as file:
        start = memoryview(len(text).to_bytes(8, "little") + text)
        _write_and_digest(file, start, digest.update)
        for name in order:
            for chunk in _chunks(tensors[name]):
                _write_and_digest(file, raw_bytes(chunk), digest.update)
                progress(chunk.nbytes)
        os.fsync(file.fileno())
    return Digest(8 + len(text) + end, digest.hexdigest())


def _write_and_digest(file: FileIO, data: memoryview, update: Callable[[memoryview], None]) -> None:
    """Write and digest all of `data` at the same time: both release the GIL."""
    # Not an executor: those refuse work at interpreter exit, and a background save may outlive
    # the main thread.
    hasher = threading.Thread(target=update, args=(data,))
    # Smaller data is digested faster than a thread starts.
    (hasher.start if len(data) > THREAD_NBYTES else hasher.run)()
    try:
        written = 0
        while written < len(data):
            written += file.write(data[written:])
    finally:
        # Even on an error: the caller may write to the memory.
        if hasher.ident is not None:
            hasher.join()


def _chunks(source: Source) -> Iterator[torch.Tensor]:
    """Yield the bytes of a tensor in C order, as contiguous CPU tensors."""
    if isinstance(source, torch.Tensor):
        tensor = source.detach().resolve_conj().resolve_neg()
        raw = flat(tensor.contiguous()).view(torch.uint8)
        for start in range(0, raw.nbytes, CHUNK_NBYTES):
            yield raw[start : start + CHUNK_NBYTES].cpu()
        return
    # All chunks of a streamed tensor share one buffer.
    total = math.prod(source.shape)
    at_once = max(1, CHUNK_NBYTES // source.dtype.itemsize)
    buffer = torch.empty(min(total, at_once), dtype=source.dtype, device="cpu")
    for start in range(0, total, at_once):
        interval = Interval(start, min(total, start + at_once))
        for stretch, box in boxes(interval, source.shape, contiguous(source.shape)):
            source.read(box, buffer[stretch.shift(-start).slice].view(box.sizes))
        yield buffer[: interval.numel]


@dataclass(frozen=True, slots=True)
class Entry(Form):
    """Form and place of one tensor in a file."""

    start: int


class File:
    """A safetensors file that is open for reading and has a valid header."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open_plain(path)
        try:
            self.entries = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _read_header(self) -> dict[str, Entry]:
        size = os.fstat(self._file.fileno()).st_size
        with reading(self._path):
            length = int.from_bytes(self._file.read(8), "little")
            possible = size >= 8 and length <= min(size - 8, MAX_HEADER_NBYTES)
            self._require(possible, f"it has {size:,} bytes, but a header of {length:,}")
            header = parse_json(self._file.read(length), self._path)
        self._require(isinstance(header, dict), "its header is not a JSON object")
        metadata = header.pop("__metadata__", {})
        texts = isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
        self._require(texts, "the metadata in its header is not text")
        end = 8 + length
        entries = {name: self._entry(name, item, end) for name, item in header.items()}
        for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.nbytes)):
            self._require(entry.start == end, f"no tensor begins at byte {end:,}")
            end += entry.nbytes
        self._require(end == size, f"it is {size:,} bytes long, but its tensors end at {end:,}")
        return entries

    def _entry(self, name: str, item: Any, base: int) -> Entry:
        try:
            dtype, shape = _DTYPES[item["dtype"]], item["shape"]
            start, stop = item["data_offsets"]
        except (TypeError, KeyError, ValueError) as error:
            raise CheckpointError(
                f"{self._path}: tensor {name!r} has an invalid header entry; the file is damaged"
            ) from error
        possible = is_sizes(shape) and is_counts([start, stop])
        self._require(possible, f"tensor {name!r} has impossible sizes")
        entry = Entry(dtype, tuple(shape), base + start)
        fits = entry.nbytes == stop - start
        self._require(fits, f"tensor {name!r} does not take the bytes that its shape needs")
        return entry

    def _require(self, holds: bool, problem: str) -> None:
        require(holds, f"{self._path}: {problem}; the file is damaged or not safetensors")

    def check(self, name: str, form: Form, what: str = "a tensor") -> Entry:
        """Return the entry of a chunk of `what`, or raise if the file has none of this form."""
        entry = self.entries.get(name)
        if entry is None or Form(entry.dtype, entry.shape) != _in_file(form):
            there = f"{entry.dtype} of shape {entry.shape} there" if entry else "missing"
            raise CheckpointError(
                f"{self._path}: chunk {name!r} of {what} is {there}, but should be {form.dtype} of "
                f"shape {form.shape}; the file belongs to another checkpoint"
            )
        return entry

    def read(self, name: str, form: Form, part: Box, target: torch.Tensor) -> None:
        """Copy a part of a tensor into `target`, one bounded chunk at a time."""
        start = self.check(name, form).start
        if part.numel:
            self._read_rows(start, form.dtype, form.shape, part, target)

    def _read_rows(
        self, start: int, dtype: torch.dtype, shape: Sequence[int], part: Box, target: torch.Tensor
    ) -> None:
        """Read a part row by row. Recurse into rows that are too large to read at once."""
        if not shape:
            self._fetch(start, target, dtype)
            return
        row_nbytes = math.prod(shape[1:]) * dtype.itemsize
        first, count = part.offsets[0], part.sizes[0]
        inner = Box(part.offsets[1:], part.sizes[1:])
        partial = inner != Box.whole(shape[1:])
        # Reading a whole row is cheaper than many small reads, up to a point. No row larger than
        # a chunk is read at once.
        if row_nbytes > (CHUNK_NBYTES // 16 if partial else CHUNK_NBYTES):
            for row in range(count):
                offset = start + (first + row) * row_nbytes
                self._read_rows(offset, dtype, shape[1:], inner, target[row])
            return
        at_once = max(1, CHUNK_NBYTES // max(1, row_nbytes))
        for row in range(0, count, at_once):
            rows = min(at_once, count - row)
            offset = start + (first + row) * row_nbytes
            into = target[row : row + rows]
            slab = torch.empty(rows, *shape[1:], dtype=dtype, device="cpu") if partial else into
            self._fetch(offset, slab, dtype)
            if partial:
                into.copy_(slab[(slice(None), *inner.slices)])

    def _fetch(self, offset: int, target: torch.Tensor, dtype: torch.dtype) -> None:
        """Read contiguous bytes into `target`, directly if it has their form."""
        direct = target.dtype == dtype and target.device.type == "cpu" and target.is_contiguous()
        into = target if direct else torch.empty(target.shape, dtype=dtype, device="cpu")
        buffer, done = raw_bytes(into), 0
        while done < len(buffer):
            with reading(self._path):
                got = os.preadv(self._file.fileno(), [buffer[done:]], offset + done)
            require(got > 0, f"{self._path}: the file ended while it was being read")
            done += got
        if into is not target:
            target.copy_(into)
